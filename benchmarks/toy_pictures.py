"""Does the strongest region of a picture name what the answer was read from? On a toy with a truth.

    python benchmarks/toy_pictures.py RESULTS.jsonl --questions 100

A tiny LLaVA is trained to name the colour at a quarter of a picture (`tests/toy_images.py`), and
asked about pictures that it has not seen. A line of the file is one question with one setting;
those that are there are not run again, and the weights are kept beside them. The table says on how
many of the questions the strongest region lies in the quarter that was asked for, and what share of
all regions' |scores| this quarter has, in the mean. `random` and `centre` are controls: regions in
a random order, and those nearest to the picture's centre first.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

import torch

import noiser
from measuring import table
from noiser.numbers import wilson

sys.path.append(str(Path(__file__).parent.parent / "tests"))

from toy_images import Asked, questions, train, untrained

SIDE = 56
HIDDEN = {"removal": "hidden"}
ROWS = {"image_removal": "rows"}


class Setting(NamedTuple):
    """A method with its options, on a grid of so many rows and columns."""

    method: Any
    grid: int
    options: dict[str, Any]


SETTINGS = {
    "occlusion, grey": Setting(noiser.Occlusion(), 2, {}),
    "occlusion, hidden tokens": Setting(noiser.Occlusion(**HIDDEN), 2, ROWS),
    "occlusion, zero rows": Setting(noiser.Occlusion(), 2, ROWS),
    "occlusion, blur": Setting(noiser.Occlusion(), 2, {"image_removal": "blur"}),
    "joint, grey": Setting(noiser.Joint(), 2, {}),
    "joint, grey, the text as one unit": Setting(noiser.Joint(), 2, {"unit": "turn"}),
    "joint, zero rows": Setting(noiser.Joint(), 2, ROWS),
    "occlusion, grey, 4 × 4": Setting(noiser.Occlusion(), 4, {}),
    "occlusion, hidden tokens, 4 × 4": Setting(noiser.Occlusion(**HIDDEN), 4, ROWS),
    "joint, grey, 4 × 4": Setting(noiser.Joint(), 4, {}),
    "joint, grey, the text as one unit, 4 × 4": Setting(noiser.Joint(), 4, {"unit": "turn"}),
}


def quarter_of(box: Sequence[int]) -> int:
    """The quarter of the picture in which a region lies."""
    left, top, right, bottom = box
    return (left + right >= SIDE) + 2 * (top + bottom >= SIDE)


def measured(lm: noiser.LanguageModel, asked: Asked, setting: Setting) -> dict[str, Any]:
    """Whether the model and the strongest region are right, and the share of the right quarter."""
    options = {"unit": "word", "image_unit": (setting.grid, setting.grid), **setting.options}
    att = noiser.attribute(
        lm, asked.chat, method=setting.method, max_new_tokens=1, target_unit="token", **options
    )
    scores: dict[tuple[int, ...], float] = {}
    for box, score in zip(att.info["images"]["boxes"], att.scores[0].tolist(), strict=True):
        if box is not None:
            scores[tuple(box[1:])] = score
    right = [box for box in scores if quarter_of(box) == asked.quarter]
    size = sum(map(abs, scores.values()))
    return {
        "says": att.targets[0].text.strip() == asked.colour,
        "strongest": quarter_of(max(scores, key=scores.__getitem__)) == asked.quarter,
        "share": sum(abs(scores[box]) for box in right) / size,
    }


def controls(asked: Sequence[Asked]) -> dict[str, list[bool]]:
    """Whether a random region, and the one nearest to the centre, lie in the right quarter."""
    rng = random.Random(1)
    cells = [(x, y, x + 14, y + 14) for y in range(0, SIDE, 14) for x in range(0, SIDE, 14)]

    def distance(box: Sequence[int]) -> float:
        left, top, right, bottom = box
        return abs(left + right - SIDE) + abs(top + bottom - SIDE)

    at_random = [quarter_of(rng.choice(cells)) == each.quarter for each in asked]
    centre = quarter_of(min(cells, key=distance))
    return {"random": at_random, "centre": [each.quarter == centre for each in asked]}


def model_of(weights: Path) -> noiser.LanguageModel:
    """The trained toy; its weights are read, or made and kept."""
    if weights.exists():
        model, processor = untrained()
        model.load_state_dict(torch.load(weights, weights_only=True))
        model.eval()
    else:
        model, processor = train()
        torch.save(model.state_dict(), weights)
    return noiser.wrap(model, processor)


def run(results: Path, asked: Sequence[Asked]) -> None:
    """Adds the lines that are not there."""
    done = {(line["setting"], line["question"]) for line in lines_of(results)}
    missing = [
        (name, number)
        for number in range(len(asked))
        for name in SETTINGS
        if (name, number) not in done
    ]
    if not missing:
        return
    lm = model_of(results.with_suffix(".pt"))
    with results.open("a", encoding="utf-8") as file:
        for name, number in missing:
            found = measured(lm, asked[number], SETTINGS[name])
            file.write(json.dumps({"setting": name, "question": number, **found}) + "\n")
            file.flush()


def lines_of(results: Path) -> list[dict[str, Any]]:
    """The lines of the file so far."""
    if not results.exists():
        return []
    return [json.loads(line) for line in results.read_text(encoding="utf-8").splitlines()]


def row_of(name: str, hits: Sequence[bool], shares: Sequence[float]) -> dict[str, str]:
    """A line of the table."""
    low, high = wilson(sum(hits), len(hits))
    return {
        "": name,
        "strongest region right": f"{sum(hits)} of {len(hits)}",
        "95 %": f"{low:.2f} to {high:.2f}",
        "share of the right quarter": f"{mean(shares):.2f}" if shares else "",
    }


def main() -> None:
    """Runs what is missing, and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("results", type=Path)
    parser.add_argument("--questions", type=int, default=100)
    arguments = parser.parse_args()
    asked = [*questions(arguments.questions)]
    run(arguments.results, asked)
    lines = [line for line in lines_of(arguments.results) if line["question"] < len(asked)]
    rows: list[dict[str, str]] = []
    for name in SETTINGS:
        own = [line for line in lines if line["setting"] == name]
        hits = [line["strongest"] for line in own]
        rows.append(row_of(name, hits, [line["share"] for line in own]))
    for name, hits in controls(asked).items():
        rows.append(row_of(f"control: {name}", hits, []))
    first = [line["says"] for line in lines if line["setting"] == "occlusion, grey"]
    print(f"The model names the right colour in {sum(first)} of {len(first)} questions.\n")
    print(table(rows))


if __name__ == "__main__":
    main()
