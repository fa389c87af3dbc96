"""Noiser inside Inseq, and the methods of Inseq, Captum and shapiq inside Noiser; each is imported
when asked for.
"""
