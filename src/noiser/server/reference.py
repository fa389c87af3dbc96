"""The page about the API, on which each route can be tried."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from functools import cache
from html import escape
from importlib.resources import files
from typing import Any, Literal, get_args, get_origin, get_type_hints

from pydantic import BaseModel

from noiser.html import html_table
from noiser.server.replies import Reply

_STYLE = """
:root { color-scheme: light dark; font-family: system-ui, sans-serif; line-height: 1.5; }
body { margin: 0 auto; max-width: 60rem; padding: 1rem; background: light-dark(#fff, #161616);
  color: light-dark(#1a1a1a, #eee); }
h2 { margin-top: 2.5rem; } h3 { font-size: 1rem; }
a { color: light-dark(#0a58a8, #7fbfff); }
.wide { overflow-x: auto; }
th, td { text-align: start; vertical-align: top; padding: .2rem .9rem .2rem 0; }
textarea, pre { box-sizing: border-box; width: 100%; font: .85rem/1.4 ui-monospace, monospace;
  border: 1px solid light-dark(#767676, #8a8a8a); border-radius: .3rem; padding: .5rem; }
textarea { background: inherit; color: inherit; resize: vertical; }
pre { max-height: 24rem; overflow: auto; white-space: pre-wrap; overflow-wrap: anywhere; }
pre:empty { display: none; }
summary { cursor: pointer; }
"""

_HEAD = f"""<!doctype html><html lang="en"><head><meta charset="utf-8"><title>Noiser: API</title>
<meta name="viewport" content="width=device-width, initial-scale=1"><link rel="icon" href="data:,">
<style>{_STYLE}</style><script src="docs.js" defer></script></head>
<body><main><h1>Noiser: API</h1>
<p>JSON in, JSON out; errors are <code>{{"error": {{"type", "message"}}}}</code>.
With <code>Accept: text/event-stream</code>, events <code>progress</code>, then
<code>answer</code> or
<code>error</code>. Offsets count Unicode code points, or with <code>"offsets": "utf16"</code> code
units, as JavaScript does. The same for programs: <a href="openapi.json">openapi.json</a>.</p>"""


@cache
def examples() -> dict[str, dict[str, Any]]:
    """By path, an example's `request`, where the route has a body, and its `response`."""
    text = files("noiser.server").joinpath("examples.json").read_text(encoding="utf-8")
    return json.loads(text)


def reference_html(routes: Iterable[Any]) -> str:
    """A section for each route of the schema: its fields, its answer, and a form to try it.

    Then the records in these fields and answers.
    """
    sections: list[str] = []
    records: dict[type[BaseModel], None] = {}
    for route in routes:
        if getattr(route, "include_in_schema", False) and getattr(route, "summary", None):
            sections.append(_section(route))
            if route.body_field:
                records |= dict.fromkeys(_inner(route.body_field.field_info.annotation))
            records |= dict.fromkeys(_inner(route.response_model))
    for record in records:
        name = record.__name__
        about = escape((record.__doc__ or "").partition("\n")[0])
        sections.append(f'<h2 id="{name}"><code>{name}</code></h2><p>{about}</p>{_fields(record)}')
    return f"{_HEAD}{''.join(sections)}</main></body></html>"


def _section(route: Any) -> str:
    """A route's heading and form, and folded its fields and its answer."""
    method = min(route.methods)
    example = examples()[route.path]
    name = f"{method} {route.path}"
    parts = [f"<h2><code>{escape(name)}</code></h2><p>{escape(route.summary)}</p>"]
    parts.append(f'<form data-method="{method}" data-path="{route.path[1:]}">')
    if route.body_field:
        request = json.dumps(example["request"], indent=2, ensure_ascii=False)
        rows = request.count("\n") + 1
        parts.append(
            f'<textarea aria-label="Body of {escape(name)}" rows={rows} spellcheck=false>'
            f"{escape(request)}</textarea>"
        )
    parts.append(
        f"<p><button>Send</button> <span role=status></span></p><pre tabindex=0 role=region "
        f'aria-label="Answer of {escape(name)}"></pre></form>'
    )
    if route.body_field:
        fields = _fields(route.body_field.field_info.annotation)
        parts.append(f"<details open><summary>Fields</summary>{fields}</details>")
    response = json.dumps(example["response"], indent=1, ensure_ascii=False)
    parts.append(
        f"<details><summary>Answer</summary>{_fields(route.response_model)}"
        f'<pre tabindex=0 role=region aria-label="Example of {escape(name)}">'
        f"{escape(response)}</pre></details>"
    )
    return "".join(parts)


def _fields(record: type[BaseModel]) -> str:
    """A table of a record's fields; those of an answer have no defaults."""
    is_reply = issubclass(record, Reply)
    rows: list[list[str]] = []
    kinds = get_type_hints(record)  # without the bounds
    own = record.__annotations__
    for name in sorted(record.model_fields, key=lambda name: name not in own):
        field = record.model_fields[name]
        cells = [f"<code>{field.alias or name}</code>", _type(kinds[name])]
        if not is_reply:
            cells.append("needed" if field.is_required() else escape(json.dumps(field.default)))
        rows.append([*cells, escape(field.description or "")])
    head = ["field", "type", ""] if is_reply else ["field", "type", "default", ""]
    return html_table(head, rows)


_JSON_NAMES: dict[Any, str] = {
    str: "text",
    bool: "true or false",
    int: "integer",
    float: "number",
    Any: "anything",
    dict: "object",
    type(None): "null",
}
"""What JSON calls a type."""


def _type(kind: Any) -> str:
    """A type as JSON has it, in HTML; a record is a link to its table."""
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        return f'<a href="#{kind.__name__}">{kind.__name__}</a>'
    origin = get_origin(kind) or kind
    parts = get_args(kind)
    if origin is Literal:
        return " or ".join(f"<code>{escape(json.dumps(value))}</code>" for value in parts)
    if origin is tuple:
        return f"[{', '.join(map(_type, parts))}]"
    if origin is list and parts:
        inner = _type(parts[0])
        return f"list of ({inner})" if " or " in inner else f"list of {inner}"
    if origin in _JSON_NAMES:
        return _JSON_NAMES[origin]
    return " or ".join(map(_type, parts))  # a union


def _inner(record: type[BaseModel]) -> Iterator[type[BaseModel]]:
    """The records in the fields of a record, and in theirs."""
    for kind in get_type_hints(record).values():
        for inner in _records(kind):
            yield inner
            yield from _inner(inner)


def _records(kind: Any) -> Iterator[type[BaseModel]]:
    """The records in a type."""
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        yield kind
    for part in get_args(kind):
        yield from _records(part)
