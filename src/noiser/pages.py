"""The frame of every HTML page that is written to a file."""

from __future__ import annotations

from html import escape

_POLICY = "default-src 'none'; style-src 'unsafe-inline'"
"""The Content-Security-Policy: nothing is loaded or run but the style sheet."""


def html_page(title: str, style: str, body: str) -> str:
    """A complete HTML page, which needs no other file.

    Args:
        title: plain text.
        style: its style sheet.
        body: HTML.
    """
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{style}</style>\n</head>\n<body>\n{body}\n</body>\n</html>\n"
    )
