"""What the README shows runs, as it stands there."""

from __future__ import annotations

import shlex
import subprocess
import sys

import pytest

import noiser
from pages import ROOT, blocks, commands, reason_not_to_run

README = "README.md"


@pytest.mark.slow
def test_python_examples(gemma, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(noiser, "load_model", lambda name: gemma)
    names = {}
    for block in blocks(README, "python"):
        exec(block, names)
    att = names["att"]
    scores = {unit.text.strip(): float(score) for unit, score in zip(att.units, att.scores[0], strict=True)}
    assert att.targets[0].text == " Portuguese"
    assert (max(scores, key=scores.__getitem__), min(scores, key=scores.__getitem__)) == ("Lisbon", "Germany")


def runnable():
    return [line for line in commands(README) if line.startswith("noiser ") and not reason_not_to_run(README, line)]


@pytest.mark.slow
@pytest.mark.parametrize("command", runnable())
def test_commands(command, gemma, tmp_path):
    arguments = [sys.executable, "-m", "noiser", *shlex.split(command, comments=True)[1:]]
    done = subprocess.run(arguments, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "warning" not in done.stderr
    assert done.stdout or list(tmp_path.iterdir())


def test_every_method_is_named():
    text = (ROOT / "docs/methods.md").read_text(encoding="utf-8")
    for name in noiser.methods.METHODS.names():
        assert f"\n## {name}\n" in text
