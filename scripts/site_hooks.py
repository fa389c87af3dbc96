"""Pages that the site makes of other files: notebooks, the changelog, errors; and links out of
`docs`.
"""

from __future__ import annotations

import ast
import json
import posixpath
import re
from html import escape
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).parent.parent
_TREE = ast.parse((ROOT / "src/noiser/errors.py").read_text(encoding="utf-8"))
ERRORS = {each.name: (ast.get_docstring(each) or "").partition("\n")[0]
          for each in _TREE.body if isinstance(each, ast.ClassDef)}  # fmt: skip
"""The first line of the docstring of every class of error, by name."""
_LINK = re.compile(r"\[([^\]]*)\]\((\.\.?/[^)#\s]*)(#[^)\s]*)?\)")
_NOTEBOOK = re.compile(r"(\]\((?:\.\./)*notebooks/\w+)\.ipynb\)")


def on_files(files: Any, config: Any) -> Any:
    """Adds a page for every notebook and every class of error, the changelog, and llms.txt."""
    notebooks = [file for file in files if file.src_uri.endswith(".ipynb")]
    made = {
        file.src_uri.replace(".ipynb", ".md"): notebook(Path(file.abs_src_path))
        for file in notebooks
    }
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    made["changelog.md"] = changelog.replace("](docs/", "](").replace(
        "](SECURITY.md", "](../SECURITY.md"
    )
    for name in ERRORS:
        made[f"reference/errors/{name}.md"] = (
            f"::: noiser.errors.{name}\n    options: {{ heading_level: 1 }}\n"
        )
    index = (
        (ROOT / "llms.txt").read_text(encoding="utf-8")
        + "\n## Errors\n\n"
        + error_list("docs/reference/errors/")
    )
    made["llms.txt"] = index.replace("](docs/", "](").replace(".md)", ".html)")
    for name, text in made.items():
        files.append(File.generated(config, name, content=text))
    return files


def error_list(folder: str) -> str:
    """Markdown with a line for every class of error."""
    return "".join(f"- [{name}]({folder}{name}.md): {line}\n" for name, line in ERRORS.items())


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Turns links to files outside `docs`, which the site does not have, into paths, and to
    notebooks into pages.
    """
    if page.file.src_uri == "reference/errors.md":
        markdown += "\n" + error_list("errors/")

    def link(match: re.Match[str]) -> str:
        place = posixpath.normpath(
            posixpath.join("docs", posixpath.dirname(page.file.src_uri), match[2])
        )
        path = f"`{place}`" if match[1].strip("`") == place else f"{match[1]} (`{place}`)"
        return match[0] if place.startswith("docs/") else path

    return _NOTEBOOK.sub(r"\1.md)", _LINK.sub(link, markdown))


def notebook(path: Path) -> str:
    """A stored notebook as Markdown, with its outputs."""
    pieces: list[str] = []
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        source = "".join(cell["source"])
        pieces.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
        for output in cell.get("outputs", ()):
            data = output.get("data", {"text/plain": output.get("text", "")})
            html = (
                "".join(data.get("text/html", ()))
                or f"<pre>{escape(''.join(data['text/plain']))}</pre>"
            )
            pieces.append(f'<div class="notebook-output">\n{html}\n</div>')
    return "\n\n".join(
        [*pieces, f'[Download this notebook]({path.name}){{ download="{path.name}" }}', ""]
    )
