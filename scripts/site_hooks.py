"""Pages that the site makes of other files: notebooks, the changelog, errors; and links out of `docs`."""

from __future__ import annotations

import ast
import json
import posixpath
import re
from html import escape
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File

ROOT = Path(__file__).parent.parent
_LINK = re.compile(r"\[([^\]]*)\]\((\.\.?/[^)#\s]*)(#[^)\s]*)?\)")
_NOTEBOOK = re.compile(r"(\]\((?:\.\./)*notebooks/\w+)\.ipynb\)")


def on_files(files: Any, config: Any) -> Any:
    """Adds a page for every notebook and every class of error, the changelog, and llms.txt."""
    for file in [file for file in files if file.src_uri.endswith(".ipynb")]:
        page = file.src_uri.removesuffix(".ipynb") + ".md"
        text = notebook_markdown(Path(file.abs_src_path).read_text(encoding="utf-8"), posixpath.basename(file.src_uri))
        files.append(File.generated(config, page, content=text))
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    moved = changelog.replace("](docs/", "](").replace("](SECURITY.md", "](../SECURITY.md")
    files.append(File.generated(config, "changelog.md", content=moved))
    for name in errors():
        page = f"::: noiser.errors.{name}\n    options: {{ heading_level: 1 }}\n"
        files.append(File.generated(config, f"reference/errors/{name}.md", content=page))
    index = (ROOT / "llms.txt").read_text(encoding="utf-8") + "\n## Errors\n\n" + error_list("docs/reference/errors/")
    index = index.replace("](docs/", "](").replace(".md)", ".html)")
    files.append(File.generated(config, "llms.txt", content=index))
    return files


def errors() -> dict[str, str]:
    """The first line of the docstring of every class of error, by name."""
    tree = ast.parse((ROOT / "src/noiser/errors.py").read_text(encoding="utf-8"))
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    return {node.name: (ast.get_docstring(node) or "").partition("\n")[0] for node in classes}


def error_list(folder: str) -> str:
    """Markdown with a line for every class of error."""
    return "".join(f"- [{name}]({folder}{name}.md): {line}\n" for name, line in errors().items())


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Turns links to files outside `docs`, which the site does not have, into paths, and to notebooks into pages."""
    folder = posixpath.dirname(page.file.src_uri)
    if page.file.src_uri == "reference/errors.md":
        markdown += "\n" + error_list("errors/")

    def link(match: re.Match[str]) -> str:
        place = posixpath.normpath(posixpath.join("docs", folder, match[2]))
        if place.startswith("docs/"):
            return match[0]
        if not (ROOT / place).exists():
            raise PluginError(f"{page.file.src_uri} links to {match[2]}, which does not exist.")
        return f"`{place}`" if match[1].strip("`") == place else f"{match[1]} (`{place}`)"

    return _NOTEBOOK.sub(r"\1.md)", _LINK.sub(link, markdown))


def notebook_markdown(text: str, name: str) -> str:
    """A stored notebook as Markdown, with its outputs.

    Raises:
        PluginError: a cell that was not run, or that failed; `python scripts/notebooks.py` runs them.
    """
    pieces = []
    for cell in json.loads(text)["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            pieces.append(source)
            continue
        if cell["execution_count"] is None:
            raise PluginError(f"{name} has a cell that was not run; run it with scripts/notebooks.py: {source[:60]!r}")
        pieces.append(f"```python\n{source}\n```")
        pieces += [_output(output, name) for output in cell["outputs"]]
    download = f'[Download this notebook]({name}){{ download="{name}" }}'
    return "\n\n".join([*pieces, download, ""])


def _output(output: dict[str, Any], name: str) -> str:
    if output["output_type"] == "error":
        raise PluginError(f"{name} holds an error: {output['ename']}: {output['evalue']}")
    data = output.get("data", {"text/plain": output.get("text", "")})
    html = data.get("text/html") or ["<pre>", escape("".join(data["text/plain"])), "</pre>"]
    inner = "".join(html)
    return f'<div class="notebook-output">\n{inner}\n</div>'
