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
    routes = [
        _route(schema, f"{method.upper()} {path}", route)
        for path, methods in schema["paths"].items()
        for method, route in methods.items()
    ]
    return f"{_HEAD}{''.join(routes)}</main></body></html>"


def _route(schema: Mapping[str, Any], name: str, route: Mapping[str, Any]) -> str:
    text = f"<h2><code>{escape(name)}</code></h2><p>{escape(route['summary'])}</p>"
    if "requestBody" not in route:
        return text
    body = _resolved(schema, route["requestBody"]["content"]["application/json"]["schema"])
    required = body.get("required", [])
    rows = [
        [
            f"<code>{escape(field)}</code>",
            escape(_type(schema, about)),
            "needed" if field in required else f"<code>{escape(json.dumps(about.get('default')))}</code>",
            escape(about.get("description", "")),
        ]
        for field, about in body["properties"].items()
    ]
    return text + html_table(["field", "type", "default", ""], rows)


def _resolved(schema: Mapping[str, Any], part: Mapping[str, Any]) -> Mapping[str, Any]:
    name = part.get("$ref", "").rpartition("/")[2]
    return schema["components"]["schemas"][name] if name else part


def _type(schema: Mapping[str, Any], part: Mapping[str, Any]) -> str:
    part = _resolved(schema, part)
    if options := part.get("anyOf"):
        return " | ".join(_type(schema, option) for option in options)
    if "enum" in part:
        return " | ".join(map(json.dumps, part["enum"]))
    if "prefixItems" in part:
        return f"[{', '.join(_type(schema, item) for item in part['prefixItems'])}]"
    if part.get("type") == "array":
        return f"list of {_type(schema, part.get('items', {}))}"
    return str(part.get("title") if "properties" in part else part.get("type", "any"))
