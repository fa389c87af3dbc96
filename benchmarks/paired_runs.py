"""Two runs of one plan, such as in float32 and in bfloat16: every number of the second minus the first, by prompts.

    python benchmarks/paired_runs.py FIRST SECOND [--numbers rank_area,lds,faithfulness]

Both are run folders, or packed ones. Only what both have is compared; p-values are corrected for all lines.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from itertools import product
from operator import attrgetter
from pathlib import Path

from noiser.bench.plan import MetricEntry
from noiser.bench.store import Store
from noiser.metrics.bootstrap import corrected
from noiser.metrics.metric import Summary
from noiser.report.grid import metric_of
from noiser.report.rows import Cell, Results

_SECOND = " (second)"


def both(first: Results, second: Results) -> Results:
    """The rows that both have, those of the second under other names of their models."""
    names = attrgetter("model", "data", "method", "metric", "example")
    rows, others = ({names(row): row for row in results.stored} for results in (first, second))
    shared = rows.keys() & others.keys()
    moved = [row._replace(model=row.model + _SECOND) for key, row in others.items() if key in shared]
    return Results(plan=second.plan, stored=[*(row for key, row in rows.items() if key in shared), *moved])


def table(first: Results, second: Results, wanted: Sequence[str]) -> list[str]:
    """Lines of Markdown: model, method and number, its value in both, and the paired difference."""
    results = both(first, second)
    models, sets, methods = (results.plan.labels(kind) for kind in ("models", "data", "methods"))
    kinds = [(measure, name, one) for measure in results.measures for name, one in _numbers(measure) if name in wanted]
    gaps, values = {}, {}
    for model, data, method, (measure, name, summary) in product(models, sets, methods, kinds):
        old = Cell(model, data, method, measure.label)
        new = old._replace(model=model + _SECOND)
        gap = results.paired(new, old, summary)
        if gap.n:
            key = (f"{model}, {data}", method, name.replace("_", " "))
            gaps[key], values[key] = gap, [results.estimate(cell, summary).value for cell in (old, new)]
    lines = ["| model, data | method | number | first | second | second − first | n | p |", "|---|" + 7 * "---|"]
    for key, gap in corrected(gaps).items():
        numbers = [f"{value:.3f}" for value in values[key]]
        interval = f"{gap.value:+.3f} [{gap.low:+.3f}, {gap.high:+.3f}]"
        lines.append("| " + " | ".join([*key, *numbers, interval, str(gap.n), f"{gap.p_holm:.2g}"]) + " |")
    return lines


def _numbers(measure: MetricEntry) -> Iterable[tuple[str, Summary]]:
    metric = metric_of(measure)
    return metric.summaries.items() if metric else ()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("first", type=Path)
    parser.add_argument("second", type=Path)
    parser.add_argument("--numbers", default="rank_area,lds,faithfulness", help="names of numbers, with commas")
    chosen = parser.parse_args()
    first, second = (Results.of(Store(folder)) for folder in (chosen.first, chosen.second))
    print("\n".join(table(first, second, chosen.numbers.split(","))))
