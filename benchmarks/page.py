"""Writes measured tables into the manual.

    python benchmarks/page.py build/speed/results.json
    python benchmarks/page.py build/speed/results.json --machine amx

Results are kept in `benchmarks/results/MODEL.json`, those of another machine in `MODEL@MACHINE.json`.
`docs/performance.md` has places for their tables,

    <!-- speed: MODEL PART -->
    <!-- end -->

with the name of a part, or "claims", and MODEL@MACHINE for another machine's. What is given replaces the parts that are
kept; without an argument the page is written again from those.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
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


def keep(results: Path, machine: str | None = None) -> None:
    """Takes measured results over, and the figure with them."""
    found = _kept(results)
    (model,) = {part["conditions"]["model"] for part in found.values()}
    RESULTS.mkdir(exist_ok=True)
    stem = Path(model).name if machine is None else f"{Path(model).name}@{machine}"
    place = RESULTS / f"{stem}.json"
    merged = _kept(place) | found
    ordered = {name: merged[name] for name in everything.PARTS if name in merged}
    place.write_text(json.dumps(ordered, indent=1) + "\n", encoding="utf-8")
    if stem == MAIN and "growth" in found:
        for ending in (".svg", ".png"):
            shutil.copyfile(results.with_name("cost").with_suffix(ending), FIGURE.with_suffix(ending))


def main() -> None:
    """Keeps results where they are given, and writes the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", nargs="*", type=Path)
    parser.add_argument("--machine", help="a name for the machine, if it is not the page's own")
    chosen = parser.parse_args()
    for path in chosen.results:
        keep(path, chosen.machine)
    PAGE.write_text(filled(PAGE.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
