"""Runs the notebooks of the documentation and stores what they show: `python scripts/notebooks.py [NAME ...]`."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient

FOLDER = Path(__file__).parent.parent / "docs" / "notebooks"


def execute(path: Path, seconds: int = 600) -> Any:
    """The notebook with new outputs; the file stays as it is.

    Raises:
        CellExecutionError: a cell raised. CellTimeoutError: a cell took longer than `seconds`.
    """
    notebook = nbformat.read(path, as_version=4)
    quiet = {"PYTHONWARNINGS": "ignore:IProgress not found", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}  # no widgets here
    client = NotebookClient(notebook, timeout=seconds, kernel_name="python3", record_timing=False)
    client.execute(cwd=str(path.parent), env=os.environ | quiet)
    return notebook


def main(names: list[str]) -> None:
    """Runs the named notebooks, or all."""
    for path in sorted(FOLDER.glob("*.ipynb")):
        if not names or path.stem in names:
            print(path.stem, flush=True)
            nbformat.write(execute(path), path)


if __name__ == "__main__":
    main(sys.argv[1:])
