"""Complete HTML pages, and tables."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape


def html_page(title: str, style: str, body: str) -> str:
    """A complete HTML page, which loads and runs nothing: a title in plain text, a style sheet, and
    HTML.
    """
    policy = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{style}</style>\n</head>\n<body>\n{body}\n</body>\n</html>\n"
    )


def html_table(head: Iterable[str], rows: Iterable[Sequence[str]], caption: str = "") -> str:
    """A table that scrolls where it is too wide: column headings, then rows that begin with theirs;
    all HTML.
    """
    columns = "".join(f"<th scope=col>{cell}</th>" if cell else "<td></td>" for cell in head)
    body = "".join(
        f"<tr><th scope=row "
        f"dir=auto>{name}</th>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>"
        for name, *cells in rows
    )
    caption = f"<caption>{caption}</caption>" if caption else ""
    table = f"<table>{caption}<thead><tr>{columns}</tr></thead><tbody>{body}</tbody></table>"
    return f"<div class=wide tabindex=0>{table}</div>"
