"""The checks of the tests themselves: they must be able to fail."""

from __future__ import annotations

import importlib
import sys

import jaxtyping
import pytest
import torch

import checking
from noiser.engine.scores import logprob

MODULE = """
from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from jaxtyping import Float
from torch import Tensor

if TYPE_CHECKING:
    from nowhere import Unknown

Row = Float[Tensor, " units"]


def add(one: Row, other: Row) -> Row:
    return one[None] + other


def look(one: Row, other: Row, unknown: Unknown) -> Row:
    return one + other


def plain(unknown: Unknown) -> int:
    return unknown


@dataclass
class Pair:
    one: Row
    other: Row
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    (tmp_path / "arrays_of_ours.py").write_text(MODULE, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "meta_path", sys.meta_path.copy())
    checking.check_imports_of("arrays_of_ours")
    yield importlib.import_module("arrays_of_ours")
    del sys.modules["arrays_of_ours"]
    assert not list(tmp_path.rglob("*.pyc"))  # or others would import code with checks


def test_sizes_types_and_results_are_checked(module):
    two, three = torch.zeros(2), torch.zeros(3)
    assert module.look(two, two, None).shape == (2,)
    assert module.plain("anything") == "anything"
    assert module.Pair(two, two).one is two
    for wrong in (
        lambda: module.look(two, three, None),
        lambda: module.look(two, [0.0, 0.0], None),
        lambda: module.look(two, two.long(), None),
        lambda: module.add(two, two),
        lambda: module.Pair(two, three),
    ):
        with pytest.raises(jaxtyping.TypeCheckError):
            wrong()


def test_the_package_is_checked():
    with pytest.raises(jaxtyping.TypeCheckError):
        logprob(torch.ones(1, 2, 3), torch.ones(2, 4), torch.tensor([0]))
