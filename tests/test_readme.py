"""What the README shows runs, as it stands there."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import noiser

README = Path(__file__).parent.parent / "README.md"


def blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)


@pytest.mark.slow
def test_python_examples(gemma, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(noiser, "load_model", lambda name: gemma)
    names = {"prompt": "The sky is"}
    for block in blocks("python"):
        exec("\n".join(line for line in block.splitlines() if "chat:" not in line), names)  # Gemma 270M has no template
    assert "basketball" in capsys.readouterr().out
    assert (tmp_path / "a.json").is_file()
    assert (tmp_path / "a.html").is_file()


def commands():
    return [line for block in blocks("bash") for line in block.splitlines() if line.startswith("noiser ")]


@pytest.mark.slow
@pytest.mark.parametrize("command", commands())
def test_commands(command, gemma, tmp_path):
    arguments = [sys.executable, "-m", "noiser", *shlex.split(command)[1:]]
    done = subprocess.run(arguments, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout or list(tmp_path.iterdir())


def test_every_method_is_named():
    text = README.read_text(encoding="utf-8")
    for name in noiser.methods.METHODS.names():
        assert f"`{name}`" in text
