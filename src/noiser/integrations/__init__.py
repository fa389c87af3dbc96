"""Noiser and its neighbours: Noiser inside Inseq, and the methods of Inseq, Captum and shapiq inside Noiser.

Nothing here is imported unless it is asked for: `import noiser.integrations.inseq` makes the method "noiser" known to
Inseq, and the names `"inseq:NAME"`, `"captum:NAME"` and `"shapiq:NAME"` find their methods by themselves.
"""
