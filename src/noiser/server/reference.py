"""The API's reference as a page that fetches nothing from elsewhere."""

from __future__ import annotations

import json
from collections.abc import Mapping
from html import escape
from typing import Any

from noiser.pages import html_table

_HEAD = """<!doctype html><html lang="en"><head><meta charset="utf-8"><title>Noiser: API</title>
<meta name="viewport" content="width=device-width, initial-scale=1"><link rel="icon" href="data:,">
<link rel="stylesheet" href="page.css"></head>
<body class="docs"><main><h1>Noiser: API</h1>
<p>JSON in, JSON out; errors are <code>{"error": {"type", "message"}}</code>.
With <code>Accept: text/event-stream</code>, events <code>progress</code>, then <code>answer</code> or
<code>error</code>. The same for programs: <a href="openapi.json">openapi.json</a>.</p>"""


def reference_html(schema: Mapping[str, Any]) -> str:
    """A section for each route of an OpenAPI schema, with the fields of its body."""
    parts = [_HEAD]
    for path, methods in schema["paths"].items():
        for method, route in methods.items():
            parts.append(f"<h2><code>{method.upper()} {escape(path)}</code></h2><p>{escape(route['summary'])}</p>")
            if "requestBody" in route:
                name = route["requestBody"]["content"]["application/json"]["schema"]["$ref"].rpartition("/")[2]
                parts.append(_fields(schema["components"]["schemas"][name]))
    return f"{''.join(parts)}</main></body></html>"


def _fields(body: Mapping[str, Any]) -> str:
    rows: list[list[str]] = []
    for field, about in body["properties"].items():
        default = "needed" if field in body["required"] else json.dumps(about.get("default"))
        cells = [f"<code>{escape(field)}</code>", escape(_type(about)), escape(default)]
        rows.append([*cells, escape(about.get("description", ""))])
    return html_table(["field", "type", "default", ""], rows)


def _type(part: Mapping[str, Any]) -> str:
    if options := part.get("anyOf"):
        return " | ".join(map(_type, options))
    if values := part.get("enum") or ([part["const"]] if "const" in part else []):
        return " | ".join(map(json.dumps, values))
    inner = f" of {_type(part['items'])}" if part.get("items") else ""
    return f"{part.get('type') or part.get('$ref', 'any').rpartition('/')[2]}{inner}"
