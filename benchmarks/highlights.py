"""The paper's highlighted prompts again: how our scores correlate with the colours that it printed.

    python benchmarks/highlights.py noiser.tex --models gemma-3-270m smollm2-135m-instruct

noiser.tex is the source of the paper (arXiv 2504.02911), whose table "tab:highlights" has a prompt each of KNOWN,
LongRA and its WikiBio, a colour in percent for each word, and the word that its model said next; it does not say which
model. Ours are asked about that word, and a token has the mean colour of the words that it is part of. Spearman's
correlation over the tokens, and how many of the paper's three highest are among ours.
"""

from __future__ import annotations

import argparse
import re
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from scipy.stats import spearmanr

import noiser
from noiser.types import Span

METHODS = ("noiser@1", "noiser_relative", "noiser_joint", "occlusion", "position")
TOP = 3


class Highlighted(NamedTuple):
    """A prompt with its words' (start, end), the space before included, the colour of each, and what follows."""

    data: str
    prompt: str
    spans: list[tuple[int, int]]
    colours: list[float]
    target: str


def highlighted(source: str) -> list[Highlighted]:
    """The rows of the table; words are joined as prose is written."""
    rows: list[Highlighted] = []
    for row in re.findall(r"(\w+)\s*&\s*((?:\\hlc\{teal!.*?)+)&\s*(\w+)\s*\\\\", source):
        prompt, spans, colours = "", list[tuple[int, int]](), list[float]()
        for colour, word in re.findall(r"\\hlc\{teal!([\d.]+)\}\{([^}]*)\}", row[1]):
            word = word.replace("\\", "").replace("’", "'")
            close = not prompt or prompt.endswith(("(", "'")) or word[:1] in ".,)'?!"
            spans.append((len(prompt), len(prompt) + len(word) + (not close)))
            prompt += ("" if close else " ") + word
            colours.append(float(colour))
        rows.append(Highlighted(row[0], prompt, spans, colours, f" {row[2]}"))
    return rows


def by_token(row: Highlighted, units: Sequence[Span]) -> list[float]:
    """The colour of each token."""
    pairs = list(zip(row.spans, row.colours, strict=True))
    return [statistics.mean(c for (a, b), c in pairs if a < unit.end and b > unit.start) for unit in units]


def highest(values: list[float]) -> set[int]:
    """Places of the three largest."""
    return set(sorted(range(len(values)), key=lambda i: -values[i])[:TOP])


def main() -> None:
    """A line of Markdown for each model and prompt."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path)
    parser.add_argument("--models", nargs="+", default=["gemma-3-270m", "smollm2-135m-instruct"])
    chosen = parser.parse_args()
    rows = highlighted(chosen.source.read_text(encoding="utf-8"))
    print(
        f"| model | prompt | tokens | p(target), rank | {' | '.join(METHODS)} |",
        "|" + "---|" * (4 + len(METHODS)),
        sep="\n",
    )
    for name in chosen.models:
        lm = noiser.load_model(name, device="cpu")
        for row in rows:
            atts = [
                noiser.attribute(lm, row.prompt, target=row.target, target_unit="all", method=method)
                for method in METHODS
            ]
            colours, cells = by_token(row, atts[0].units), list[str]()
            for scores in (att.scores[0].tolist() for att in atts):
                shared = len(highest(scores) & highest(colours))
                cells.append(f"{spearmanr(colours, scores).statistic:+.2f}, {shared} of {TOP}")
            said = f"{atts[0].targets[0].probability:.2f}, {atts[0].targets[0].rank}"
            print(f"| {name} | {row.data} | {len(colours)} | {said} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
