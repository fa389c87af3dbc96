"""The notebooks of the manual run, on the built-in model, and what is stored in them is what a run shows."""

from __future__ import annotations

import importlib.util
import os

import pytest

from pages import ROOT

if any(importlib.util.find_spec(name) is None for name in ("nbclient", "nbformat", "ipykernel")):
    pytest.skip("nbclient is not installed: pip install --group docs", allow_module_level=True)

import nbformat
from nbclient import NotebookClient

FOLDER = ROOT / "docs/notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))


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
    text = path.read_text(encoding="utf-8")
    assert "/home/" not in text
    assert "Traceback" not in text


@pytest.fixture(scope="module")
def client(gemma):
    """One process for all notebooks, which would take ten seconds each to import what they use."""
    client = NotebookClient(nbformat.v4.new_notebook(), timeout=600, kernel_name="python3")
    environment = os.environ | {"PYTHONWARNINGS": "ignore:IProgress not found"}
    with client.setup_kernel(cwd=str(FOLDER), env=environment):
        yield client


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # of the client's own libraries; the notebook runs in another process
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_runs(path, client):
    stored, again = (nbformat.read(path, as_version=4) for _ in range(2))
    again.cells.insert(0, nbformat.v4.new_code_cell("%reset -f"))  # no name of the notebook before
    client.nb = again
    client.execute(cleanup_kc=False)
    assert shown(again)[1:] == shown(stored)
