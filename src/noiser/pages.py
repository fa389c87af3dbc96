"""The frame of every HTML page that is written to a file."""

from __future__ import annotations

from html import escape


def html_page(
    title: str, style: str, body: str, *, policy: str = "default-src 'none'; style-src 'unsafe-inline'"
) -> str:
    """A complete HTML page, which needs no other file.

    Args:
        title: plain text.
        style: its style sheet.
        body: HTML.
        policy: Content-Security-Policy; by default nothing is loaded or run but the style sheet.
    """
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{style}</style>\n</head>\n<body>\n{body}\n</body>\n</html>\n"
    )
