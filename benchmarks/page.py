"""Writes measured tables into the manual: `python benchmarks/page.py [build/speed/results.json]`.

Results are kept in `benchmarks/results/MODEL.json`. `docs/performance.md` has places for their tables,

    <!-- speed: MODEL PART -->
    <!-- end -->

with the name of a part, or "claims". What is given replaces the parts that are kept; without an argument the page is
written again from those.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import everything
from measuring import table

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "performance.md"
RESULTS = Path(__file__).parent / "results"
FIGURE = ROOT / "docs" / "images" / "cost"
MAIN = "gemma-3-270m"
"""The model whose figure the page shows."""

PICTURE = (
    "![Token-forwards counted against the formula, and seconds, by prompt length, targets, samples and unit]"
    "(images/cost.svg)"
)

_PLACE = re.compile(r"(<!-- speed: (\S+) (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def filled(text: str, results: Path = RESULTS) -> str:
    """A page with the tables of what is kept in the places for them."""

    def fill(place: re.Match[str]) -> str:
        found = _kept(results / f"{place[2]}.json")
        if place[3] == "claims" and found:
            pieces = [everything.claims_table(found)]
        elif place[3] in found:
            part = found[place[3]]
            picture = [PICTURE] if (place[2], place[3]) == (MAIN, "growth") else []
            pieces = [*picture, part["note"], table(part["rows"]), everything.told(part["conditions"])]
        else:
            return place[0]  # not measured yet
        return place[1] + "\n" + "\n\n".join(pieces) + "\n\n" + place[4]

    return _PLACE.sub(fill, text)


def _kept(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def keep(results: Path) -> None:
    """Takes measured results over, and the figure with them."""
    found = _kept(results)
    (model,) = {part["conditions"]["model"] for part in found.values()}
    RESULTS.mkdir(exist_ok=True)
    place = RESULTS / f"{Path(model).name}.json"
    merged = _kept(place) | found
    ordered = {name: merged[name] for name in everything.PARTS if name in merged}
    place.write_text(json.dumps(ordered, indent=1) + "\n", encoding="utf-8")
    if model == MAIN and "growth" in found:
        for ending in (".svg", ".png"):
            shutil.copyfile(results.with_name("cost").with_suffix(ending), FIGURE.with_suffix(ending))


def main() -> None:
    """Keeps results where they are given, and writes the page."""
    for path in sys.argv[1:]:
        keep(Path(path))
    PAGE.write_text(filled(PAGE.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
