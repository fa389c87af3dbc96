"""Noiser and its neighbours: Noiser inside Inseq, and the methods of Inseq and Captum inside Noiser.

Nothing here is imported unless it is asked for: `import noiser.integrations.inseq` makes the method "noiser" known to
Inseq, and the names `"inseq:NAME"` and `"captum:NAME"` find their methods by themselves.
"""
