"""What docs/coming_from.md shows runs, as it stands there."""

from __future__ import annotations

import importlib.util
import shlex
import subprocess
import sys

import pytest

import noiser
from pages import ROOT, blocks, commands
from tiny import tiny, tiny_tokenizer

if importlib.util.find_spec("inseq") is None or importlib.util.find_spec("shapiq") is None:
    pytest.skip("Inseq or shapiq is not installed: pip install inseq==0.7.1 shapiq==1.4.1", allow_module_level=True)

from noiser.integrations.captum import CaptumMethod
from noiser.integrations.common import imported
from noiser.integrations.inseq_method import InseqMethod
from noiser.integrations.shapiq import ShapiqMethod
from noiser.methods import METHODS

inseq = imported("inseq", "inseq")
PAGE = "docs/coming_from.md"
TEXT = (ROOT / PAGE).read_text(encoding="utf-8")
NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"


@pytest.fixture
def small():
    return noiser.wrap(tiny("gemma3").model, tiny_tokenizer(bos=False))


@pytest.mark.filterwarnings("ignore:Contrastive inputs do not match")  # Inseq says so of every contrastive function
def test_python_examples(small, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    load = inseq.load_model

    def load_small(name, *args, **options):
        if name == NAME:
            small.model.save_pretrained(tmp_path / "model")
            small.tokenizer.save_pretrained(tmp_path / "model")
            name = str(tmp_path / "model")
        return load(name, *args, **options)

    monkeypatch.setattr(inseq, "load_model", load_small)
    monkeypatch.setattr(noiser, "load_model", lambda name: small)
    before = {**METHODS._entries}, {**METHODS._newest}
    names = {}
    try:
        for block in blocks(PAGE, "python"):
            exec(block, names)
    finally:
        METHODS._entries, METHODS._newest = before
    assert names["att"].method == "shapiq:SVARM@1"
    assert names["out"].sequence_attributions


@pytest.mark.slow
@pytest.mark.parametrize("command", [line for line in commands(PAGE) if not line.startswith("pip ")])
def test_commands(command, small, tmp_path):
    """With a small model in place of the one that is named, and of the built-in one."""
    program, *arguments = shlex.split(command.replace(NAME, str(tmp_path / "model")))
    small.model.save_pretrained(tmp_path / "model")
    small.tokenizer.save_pretrained(tmp_path / "model")
    if program == "noiser":
        arguments = ["-m", "noiser", *arguments, "--model", str(tmp_path / "model")]
    done = subprocess.run([sys.executable, *arguments], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout


def test_every_method_is_described():
    for name in [*CaptumMethod.names(), *ShapiqMethod.names()]:
        assert f"`{name}`" in TEXT


def test_names_in_the_text_are_inseqs():
    assert {"saliency", "integrated_gradients"} <= {*InseqMethod.names()}
