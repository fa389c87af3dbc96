"""Made-up benchmarks, small enough to be worked out by hand."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from bench_for_tests import toml
from noiser.bench import Plan, Row, Store
from noiser.bench.resolve import Selection
from noiser.report.cells import entry_of, summaries_of


@dataclass
class Run:
    """A benchmark's store in memory, as far as reports read it."""

    plan: Plan
    kept: Sequence[Row] = ()
    chosen: Sequence[Selection] = ()
    path: str = "memory"

    @property
    def meta(self):
        return {"selections": [one._asdict() for one in self.chosen]}

    def rows(self, kind=None, *, failed=False):
        return (
            row
            for row in self.kept
            if kind in (None, row.kind) and (row.error is not None or not failed)
        )


def rows(
    method, metric, values, *, first=0, model="gemma-3-270m", data="known", category="", seconds=()
):
    """The rows of some prompts in turn: the numbers of each, or the type of its error."""
    found = []
    for number, each in enumerate(values):
        error, example = each if isinstance(each, str) else None, first + number
        size = (0, 0, None, {}, error) if error else (6, 1, 0.5, each, None)
        place = (model, data, f"{data}-{example}", category, example, method, metric, example)
        found.append(Row(*place, *size, seconds[number] if seconds else None))
    return found


def soft(ns, nc, random_ns=0.02, random_nc=0.4):
    """The columns of `soft_scores`."""
    return {"soft_ns": ns, "soft_nc": nc, "random_soft_ns": random_ns, "random_soft_nc": random_nc}


def plan(**changes):
    """One model, KNOWN, two methods, the paper's score; entries are given as names, or as
    fields.
    """
    named = {
        "models": "gemma-3-270m",
        "data": "known",
        "methods": "noiser occlusion",
        "metrics": "soft_scores",
    }
    entries = {kind: [{"name": name} for name in names.split()] if isinstance(names, str) else names
               for kind, names in (named | changes).items() if kind in named}  # fmt: skip
    entries["methods"] = [{"unit": "token"} | method for method in entries["methods"]]
    return Plan.model_validate({"name": "test"} | changes | entries)


JUDGED = {"judge": "local:smollm2-135m-instruct", "data": ["known"]}
FULL: dict[str, Any] = {
    "models": [{"name": "gemma-3-270m"}, {"name": "Qwen/Qwen2-0.5B"}],
    "data": [
        {"name": "known", "only_correct": True},
        {"name": "longra", "only_correct": True},
        {"label": "own", "prompts": ["LeBron James professionally plays the sport of"]},
    ],
    "methods": [
        *(
            {"name": name}
            for name in (
                "noiser",
                "noiser_relative",
                "occlusion",
                "input_x_gradient",
                "lime",
                "random",
            )
        ),
        {
            "name": "noiser",
            "label": "noiser_k_max",
            "args": {"bounding": "k_max"},
            "metrics": ["faithfulness"],
        },
        {
            "name": "noiser",
            "label": "noiser_authors",
            "profile": "authors",
            "metrics": ["faithfulness"],
        },
    ],
    "metrics": [
        {"name": "faithfulness"},
        {"name": "answerability", **JUDGED},
        {"name": "minimum_top_k", **JUDGED},
        {"name": "localisation", "data": ["longra"], "models": ["gemma-3-270m"]},
        {"name": "stability", "data": ["known"], "models": ["gemma-3-270m"]},
    ],
}
"""Something of everything."""


def columns(wanted, metric):
    """The columns of a metric's rows."""
    summaries = summaries_of(entry_of(wanted, metric), []).values()
    return sorted({name for summary in summaries for name in summary.columns} - {"seconds"})


def full(prompts=12, models=2):
    """A run with something of everything."""
    return made(plan(**FULL | {"models": FULL["models"][:models]}), prompts)


def made(wanted, prompts):
    """Rows of a plan, drawn at random; LIME has fewer prompts, and the fourth kind of rows two
    failures.
    """
    drawn, found, ids = random.Random(0), list[Row](), range(prompts)
    pairs = [(model, data) for model in wanted.labels("models") for data in wanted.labels("data")]
    kinds = [(*pair, *kind) for pair in pairs for kind in wanted.kinds(*pair)]
    for number, (model, data, method, metric) in enumerate(kinds):
        for example in range(1 if data == "own" else prompts // 2 if method == "lime" else prompts):
            values = {
                name: len(method) % 7 / 10 + drawn.uniform(0.1, 1)
                for name in columns(wanted, metric)
            }
            labels = {"model": model, "data": data, "seconds": [drawn.uniform(0.1, 3)]}
            labels["category"] = (
                ("family", "capital-world")[example % 2] if data == "longra" else ""
            )
            fails = number == 3 and example < 2
            found += rows(
                method, metric, ["NumericalError" if fails else values], first=example, **labels
            )
    chosen = [
        Selection(*pair, 1208, 100, 40, tuple(f"{pair[1]}-{i}" for i in ids), {}, ())
        for pair in pairs
    ]
    return Run(wanted, found, chosen)


def near(sample, draws, confidence):
    """An interval around the number, for tests of other things."""
    return sample.value - 0.1, sample.value + 0.1, ""


def write_folder(folder, run):
    """A benchmark's folder with those rows."""
    store, fields = (
        Store(folder, create=True),
        run.plan.model_dump(mode="json", exclude_defaults=True),
    )
    store.set_meta(plan=toml(fields), models={}, **run.meta)
    store.add(run.kept)
    return store
