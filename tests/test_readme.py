"""What the README shows runs, as it stands there."""

from __future__ import annotations

import importlib.util
import shlex
import subprocess
import sys

import pytest

import noiser
from noiser.integrations.adapter import copied_tokenizer, twin
from noiser.integrations.inseq_method import import_inseq
from pages import ROOT, blocks, commands, reason_not_to_run

README = "README.md"


@pytest.mark.slow
def test_python_examples(gemma, tmp_path, monkeypatch, capsys):
    if importlib.util.find_spec("inseq") is None:
        pytest.skip("Inseq is not installed: pip install inseq")
    import_inseq()
    monkeypatch.chdir(tmp_path)
    # Inseq changes the objects that it is given
    lent = noiser.wrap(twin(gemma.model), copied_tokenizer(gemma.tokenizer))
    monkeypatch.setattr(noiser, "load_model", lambda name: lent)
    names = {"prompt": "The sky is"}
    for block in blocks(README, "python"):
        exec("\n".join(line for line in block.splitlines() if "chat:" not in line), names)  # Gemma 270M has no template
    shown = capsys.readouterr().out
    assert "basketball" in shown
    assert "▁blue" in shown  # by Inseq
    assert (tmp_path / "a.json").is_file()
    assert (tmp_path / "a.html").is_file()


def runnable():
    return [line for line in commands(README) if line.startswith("noiser ") and not reason_not_to_run(README, line)]


@pytest.mark.slow
@pytest.mark.parametrize("command", runnable())
def test_commands(command, gemma, tmp_path):
    arguments = [sys.executable, "-m", "noiser", *shlex.split(command, comments=True)[1:]]
    done = subprocess.run(arguments, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout or list(tmp_path.iterdir())


def test_every_method_is_named():
    text = (ROOT / README).read_text(encoding="utf-8")
    for name in noiser.methods.METHODS.names():
        assert f"`{name}`" in text
