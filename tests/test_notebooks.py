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

NOTEBOOKS = sorted((ROOT / "docs/notebooks").glob("*.ipynb"))


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


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # of the client's own libraries; the notebook runs in another process
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_runs(path, gemma):
    stored, again = (nbformat.read(path, as_version=4) for _ in range(2))
    client = NotebookClient(again, timeout=600, kernel_name="python3")
    client.execute(cwd=str(path.parent), env=os.environ | {"PYTHONWARNINGS": "ignore:IProgress not found"})
    assert shown(again) == shown(stored)
