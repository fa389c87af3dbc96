"""Numbers do not change: scores, metrics and citations on tiny models are those that are stored."""

from __future__ import annotations

import json
from functools import cache
from operator import itemgetter
from pathlib import Path

import pytest
import torch

from bench_for_tests import plan_text, save_models
from golden.cases import FAMILIES, cases, run
from golden.make import stored
from noiser.bench import Store, run_bench

numbers_of_all = cache(stored)
pytestmark = pytest.mark.usefixtures("unchecked")  # shapes are checked everywhere else


def parts():
    """Families, those with many cases in parts of methods, so that workers share them."""
    return sorted({(name.split("/")[0], name.split("/")[1]) for name in numbers_of_all()})


@pytest.mark.parametrize(("family", "part"), parts())
def test_numbers_are_the_stored_ones(family, part):
    expected = {name: numbers for name, numbers in numbers_of_all().items() if name.split("/")[:2] == [family, part]}
    made = {f"{family}/{name}": case for name, case in cases(family)}
    wrong = {}
    for name, numbers in expected.items():
        found = run(made[name]) or {}
        wrong |= {
            f"{name} {each}": how
            for each, value in numbers.items()
            if (how := difference(each, found.get(each), value))
        }
    assert not wrong, "\n".join(f"{name}: {how}" for name, how in wrong.items())


def difference(name, found, expected):
    """What differs, or nothing; less work than stored is welcome."""
    if found is None:
        return "missing"
    if name.startswith("token_forwards"):
        return f"{found.item():.0f} token-forwards, {expected.item():.0f} stored" if found > expected else ""
    if found.shape != expected.shape:
        return f"shape {list(found.shape)}, stored {list(expected.shape)}"
    if torch.allclose(found, expected, rtol=1e-5, atol=1e-5, equal_nan=True):
        return ""
    return f"off by {(found - expected).abs().nan_to_num(0).max():.1e}"


def test_every_family_has_numbers():
    assert {name.split("/")[0] for name in numbers_of_all()} == set(FAMILIES)


def test_rows_of_a_benchmark_are_the_stored_ones(tmp_path):
    plan = tmp_path / "plan.toml"
    plan.write_text(plan_text(save_models(tmp_path)))
    run_bench(plan, tmp_path / "out", workers=0)
    key = itemgetter("model", "data", "method", "metric", "index")
    found = sorted((row._asdict() for row in Store(tmp_path / "out").rows()), key=key)
    expected = json.loads((Path(__file__).parent / "golden" / "rows.json").read_text())
    assert [key(row) for row in found] == [key(row) for row in expected]
    for one, other in zip(found, expected, strict=True):
        work = [{name: row["values"].pop(name, 0) for name in ("token_forwards", "passes")} for row in (one, other)]
        assert work[0]["token_forwards"] <= work[1]["token_forwards"], key(one)
        assert (one["error"] is None) == (other["error"] is None), one
        for each in ("units", "targets", "seed", "example", "category"):
            assert one[each] == other[each], key(one)
        assert dict(one["values"]) == pytest.approx(other["values"], rel=1e-5, abs=1e-5), key(one)
        assert one["probability"] == pytest.approx(other["probability"], rel=1e-5, abs=1e-5), key(one)
