"""Two runs of one plan, such as in float32 and in bfloat16: every number of the second minus the first, by prompts.

    python benchmarks/paired_runs.py FIRST SECOND [--numbers rank_area,lds,faithfulness]

Both are run folders, or packed ones. Only prompts that both have are compared; p-values are corrected for all lines.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from noiser.bench import Store
from noiser.evaluation import estimated, paired
from noiser.metrics.bootstrap import corrected
from noiser.report import rows_of
from noiser.report.results import LABELS, summaries_of


def table(first: Store, second: Store, wanted: Sequence[str]) -> list[str]:
    """Lines of Markdown: model, method and number, its value in both, and the paired difference."""
    parts = [
        {labels: part.set_index("example") for labels, part in rows_of(store).groupby(LABELS, sort=False)}
        for store in (first, second)
    ]
    gaps, values = {}, {}
    for labels, new in parts[1].items():
        model, data, method, metric = labels
        if metric == "attribution" or labels not in parts[0]:
            continue
        old = parts[0][labels]
        common = new.index.intersection(old.index)
        for name, summary in summaries_of(second.plan.entry("metrics", metric), []).items():
            if name in wanted and len(common):
                key = f"{model}, {data}", method, name
                gaps[key] = paired(new, old, summary)
                values[key] = [estimated(rows.loc[common], summary).value for rows in (old, new)]
    lines = ["| model, data | method | number | first | second | second − first | n | p |", "|---|" + 7 * "---|"]
    for key, gap in corrected(gaps).items():
        texts = [f"{value:.3f}" for value in values[key]]
        interval = f"{gap.value:+.3f} [{gap.low:+.3f}, {gap.high:+.3f}]"
        lines.append("| " + " | ".join([*key, *texts, interval, str(gap.n), f"{gap.p_holm:.2g}"]) + " |")
    return lines


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("first", type=Path)
    parser.add_argument("second", type=Path)
    parser.add_argument("--numbers", default="rank_area,lds,faithfulness", help="names of numbers, with commas")
    chosen = parser.parse_args()
    print("\n".join(table(Store(chosen.first), Store(chosen.second), chosen.numbers.split(","))))
