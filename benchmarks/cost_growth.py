"""How cost grows with prompt length, targets, samples and units: counted, by the clock, and against the formula.

    python benchmarks/cost_growth.py --model gemma-3-270m --figure build/cost

One scoring pass of Noiser runs M Σ_u (r_u + 1 - s_u) token-forwards: M noise samples, s_u the first token of unit u,
r_u the position that predicts the last target that sees u. For a prompt of T tokens and one target that is about
M T² / 2. The count must be what the formula says, or the run fails. The search adds to it; what it adds depends on the
prompt, so it is drawn beside the pass.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import noiser
from measuring import Part, Setting, parser, prompt_of, run_method, say, setting_of
from noiser.model import LanguageModel, Query, build_query
from noiser.types import Unit

NOTE = (
    "One scoring pass, `Noiser(bounding=0.05)`, and the default with its search, in float32. What does not vary has "
    "{tokens} tokens, one target, {samples} samples and token units. Formula: M Σ_u (r_u + 1 - s_u)."
)


LONG = 160
"""Tokens of a prompt that is scored without a search, which would take minutes."""


class Case(NamedTuple):
    """One point of one curve."""

    varied: str
    value: int | str
    tokens: int
    targets: int = 1
    samples: int = 2
    unit: Unit = "token"


def cases(quick: bool) -> list[Case]:
    """What is varied: one thing at a time."""
    base = 12 if quick else 20
    lengths, targets, samples = (
        ((8, 16), (1, 3), (2, 4)) if quick else ((10, 20, 40, 80, 160), (1, 2, 5, 10, 20), (2, 5, 10, 20))
    )
    return [
        *(Case("prompt, tokens", n, n) for n in lengths),
        *(Case("targets", n, base, targets=n) for n in targets),
        *(Case("samples", n, base, samples=n) for n in samples),
        *(Case("unit", unit, 2 * base, unit=unit) for unit in ("token", "word", "sentence")),
    ]


def formula(query: Query, samples: int) -> int:
    """M Σ_u (r_u + 1 - s_u)."""
    last = [
        max(row for row, seen in zip(query.logit_positions, column, strict=True) if seen)
        for column in query.causal_mask.T.tolist()
    ]
    return samples * sum(r + 1 - unit.token_indices[0] for r, unit in zip(last, query.units, strict=True))


def row_of(lm: LanguageModel, case: Case) -> dict[str, Any]:
    """One line of the table, after a check of the count."""
    query = build_query(lm, prompt_of(lm, case.tokens), max_new_tokens=case.targets, unit=case.unit)
    expected = formula(query, case.samples)
    passed, passing = timed(lm, query, noiser.Noiser(bounding=0.05, samples=case.samples))
    assert passed == expected or not lm.reuses_prefix(len(query.token_ids)), (case, passed, expected)
    row: dict[str, Any] = {
        "varied": case.varied,
        "value": case.value,
        "prompt tokens": query.prompt_tokens,
        "targets": len(query.logit_positions),
        "samples": case.samples,
        "units": len(query.units),
        "formula": expected,
        "one pass, token-forwards": passed,
        "one pass, s": passing,
    }
    if case.tokens < LONG:
        row["with search, token-forwards"], row["with search, s"] = timed(
            lm, query, noiser.Noiser(samples=case.samples)
        )
    return row


def timed(lm: LanguageModel, query: Query, method: noiser.Noiser) -> tuple[int, float]:
    """Token-forwards and seconds of one call."""
    begin = time.perf_counter()
    session, _ = run_method(lm, query, method)
    return session.counters.token_forwards, time.perf_counter() - begin


def run(setting: Setting) -> Part:
    """Every curve."""
    lm = setting.load("float32")
    run_method(lm, build_query(lm, prompt_of(lm, 8)), noiser.Noiser(bounding=0.05, samples=1))
    rows = [say(row_of(lm, case)) for case in cases(setting.quick)]
    base = Case("", 0, 12 if setting.quick else 20)
    return Part("How cost grows", NOTE.format(tokens=base.tokens, samples=base.samples), rows)


# ---- the figure -----------------------------------------------------------------------------------------------------

INK, GREY = "#1b1b1b", "#6b6b6b"


def draw(rows: Sequence[dict[str, Any]], path: Path) -> list[Path]:
    """Four panels, as SVG and PNG; lines differ by dash and marker, so that no colour is needed.

    Args:
        rows: of `run`.
        path: the file's name without its ending.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 6.4), layout="constrained")
    for panel, varied in zip(figure.subplots(2, 2).flat, dict.fromkeys(row["varied"] for row in rows), strict=True):
        _panel(panel, [row for row in rows if row["varied"] == varied], varied)
    handles, labels = figure.axes[0].get_legend_handles_labels()
    clock = figure.axes[-1]
    more, texts = clock.get_legend_handles_labels()
    figure.legend([*handles, *more], [*labels, *texts], loc="outside lower center", ncols=4, frameon=False)
    written = []
    for ending, options in ((".svg", {"metadata": {"Date": None}}), (".png", {"dpi": 110})):
        path.parent.mkdir(parents=True, exist_ok=True)
        written.append(path.with_suffix(ending))
        figure.savefig(written[-1], **options)
    return written


def _panel(panel: Any, rows: Sequence[dict[str, Any]], varied: str) -> None:
    """Token-forwards on the left axis, seconds on the right, both from 0; for lengths, all axes are logarithmic."""
    names = [str(row["value"]) for row in rows]
    places: list[Any] = names if varied == "unit" else [int(name) for name in names]
    if varied == "unit":
        names = [f"{row['value']}\n({row['units']})" for row in rows]
        places = list(range(len(names)))
        panel.set_xticks(places, names)
    clock = panel.twinx()
    panel.plot(places, [r["formula"] for r in rows], color=GREY, linewidth=5, alpha=0.35, label="formula, one pass")
    panel.plot(places, [r["one pass, token-forwards"] for r in rows], "o-", color=INK, label="counted, one pass")
    searched = [r.get("with search, token-forwards") for r in rows]
    panel.plot(
        places, [float("nan") if n is None else n for n in searched], "s--", color=INK, label="counted, with search"
    )
    clock.plot(places, [r["one pass, s"] for r in rows], "^:", color=GREY, label="seconds, one pass (right)")
    for axis in (panel, clock):
        if varied.startswith("prompt"):
            axis.set_xscale("log")
            axis.set_yscale("log")
        else:
            axis.set_ylim(bottom=0)
    if varied != "unit":
        panel.set_xticks(places, names)
        panel.xaxis.minorticks_off()
    panel.set_xlabel(varied)
    panel.set_ylabel("token-forwards")
    clock.set_ylabel("seconds", color=GREY)
    for axis in (panel, clock):
        axis.spines["top"].set_visible(False)


def main() -> None:
    """Prints the table, and draws it where asked."""
    options = parser(__doc__)
    options.add_argument("--figure", type=Path, help="draw it too: the file's name without its ending")
    chosen = options.parse_args()
    found = run(setting_of(chosen))
    print(found.text())
    if chosen.figure is not None:
        print(*draw(found.rows, chosen.figure), sep="\n")


if __name__ == "__main__":
    main()
