"""The manual as a site, which fetches nothing from elsewhere, and its notebooks, which run as they
are stored.
"""

import importlib.util
import inspect
import os
import re
import subprocess
import sys
from html import unescape

import pytest

import noiser
import noiser.errors
from pages import ROOT

if any(
    importlib.util.find_spec(name) is None
    for name in ("material", "mkdocstrings", "nbclient", "ipykernel")
):
    pytest.skip(
        "MkDocs or nbclient is not installed: pip install --group docs", allow_module_level=True
    )

import nbformat
from nbclient import NotebookClient

FOLDER = ROOT / "docs/notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
FETCHED = r"<(?:script|img|iframe|link|source)\b[^>]*>"
HARMLESS = r"""rel=["']?(canonical|next|prev|alternate)"""  # links that a browser does not fetch


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    command = [
        sys.executable,
        "-m",
        "mkdocs",
        "build",
        "--strict",
        "--quiet",
        "--site-dir",
        str(folder),
    ]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    ran = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return folder


@pytest.mark.slow
def test_pages_fetch_nothing_from_elsewhere(site):
    for path in site.rglob("*.html"):
        for tag in re.findall(FETCHED, path.read_text(encoding="utf-8")):
            assert re.search(HARMLESS, tag) or not re.search(
                r"""(src|href)=["']?(https?:)?//""", tag
            ), (path.name, tag)
    for path in site.rglob("*.css"):
        text = path.read_text(encoding="utf-8")
        assert not re.search(r"@import|url\(['\"]?(https?:)?//", text), path.name


@pytest.mark.slow
def test_reference_shows_what_is_public_and_notebooks_are_pages_with_their_outputs(site):
    text = "".join(
        path.read_text(encoding="utf-8") for path in (site / "reference").rglob("*.html")
    )
    names = [name for name in noiser.__all__ if not name.startswith("__")]
    assert [name for name in names if not re.search(rf'id="[\w.]+\.{name}"', text)] == []
    assert "noiser-att" in (site / "notebooks/quickstart.html").read_text(encoding="utf-8")
    assert (site / "notebooks/quickstart.ipynb").is_file()


@pytest.mark.slow
def test_every_error_has_a_page_that_says_what_to_do(site):
    index = (site / "llms.txt").read_text(encoding="utf-8")
    overview = (site / "reference/errors.html").read_text(encoding="utf-8")
    for name in (name for name in vars(noiser.errors) if name.endswith("Error")):
        page = (site / f"reference/errors/{name}.html").read_text(encoding="utf-8")
        line, *more = filter(None, inspect.getdoc(getattr(noiser.errors, name)).splitlines())
        for part in (line, *more):
            assert part.partition("`")[0].partition("'")[0] in unescape(page), (name, part)
        assert f"](reference/errors/{name}.html): {line}" in index
        assert f'href="errors/{name}.html"' in overview


def shown(notebook):
    """What each cell shows, as kinds of output."""
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    return [[sorted(out.get("data", {"stream": 1})) for out in cell.outputs] for cell in cells]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_stored_with_outputs_and_small(path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    counts = [cell.execution_count for cell in notebook.cells if cell.cell_type == "code"]
    assert counts == [*range(1, len(counts) + 1)]
    assert path.stat().st_size < 200_000
    assert not re.search("/home/|Traceback", path.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def client(gemma):
    """One process for all notebooks, which would take ten seconds each to import what they use."""
    client = NotebookClient(nbformat.v4.new_notebook(), timeout=600, kernel_name="python3")
    environment = os.environ | {"PYTHONWARNINGS": "ignore:IProgress not found"}
    with client.setup_kernel(cwd=str(FOLDER), env=environment):
        yield client


@pytest.mark.slow
@pytest.mark.filterwarnings(
    "default"
)  # of the client's own libraries; the notebook runs in another process
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_runs(path, client):
    stored, again = (nbformat.read(path, as_version=4) for _ in range(2))
    again.cells.insert(0, nbformat.v4.new_code_cell("%reset -f"))  # no name of the notebook before
    client.nb = again
    client.execute(cleanup_kc=False)
    assert shown(again)[1:] == shown(stored)
