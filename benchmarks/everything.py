"""Every claim about speed, measured in one run on one machine; `scripts/bench` calls it.

    python benchmarks/everything.py --model gemma-3-270m --output build/speed

Writes `results.json`, `results.md` and the figure of how cost grows to the output folder, after each part. With
`--parts` only some are measured, and those that the folder holds of the same model stay. Where results of two ways to
the same numbers differ, the part fails, and so does the run; a claim that is not met is said in the table.
"""

from __future__ import annotations

import json
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import cost_growth
import many_prompts
import many_targets
import memory
import methods_speed
import noiser_speed
import precision
from measuring import Claim, Part, Setting, conditions, parser, setting_of, table

PARTS: dict[str, Callable[[Setting], Part]] = {
    "noiser": noiser_speed.run,
    "methods": methods_speed.run,
    "targets": many_targets.run,
    "prompts": many_prompts.run,
    "growth": cost_growth.run,
    "precision": precision.run,
    "memory": memory.run,
}


def measure(setting: Setting, names: list[str], folder: Path) -> list[str]:
    """Runs parts one after the other and writes what there is after each; returns the names of those that failed."""
    folder.mkdir(parents=True, exist_ok=True)
    found, failed = _kept(setting, folder / "results.json"), []
    for name in names:
        print(f"\n== {name}", flush=True)
        begin = time.perf_counter()
        try:
            part = PARTS[name](setting)
        except Exception:
            traceback.print_exc()
            failed.append(name)
            found.pop(name, None)
            write(found, folder)
            continue
        found[name] = part.stored() | {"conditions": conditions(setting), "seconds": time.perf_counter() - begin}
        print(part.text(), flush=True)
        write(found, folder)
    return failed


def write(found: Mapping[str, Any], folder: Path) -> None:
    """The results as JSON, as Markdown, and as a figure where the part of growth is among them."""
    ordered = {name: found[name] for name in PARTS if name in found}
    (folder / "results.json").write_text(json.dumps(ordered, indent=1) + "\n", encoding="utf-8")
    (folder / "results.md").write_text(markdown(ordered), encoding="utf-8")
    if "growth" in found:
        cost_growth.draw(found["growth"]["rows"], folder / "cost")


def _kept(setting: Setting, path: Path) -> dict[str, Any]:
    """The parts that a file holds of the same model, measured as thoroughly."""
    if not path.is_file():
        return {}
    now = conditions(setting)
    stored = json.loads(path.read_text(encoding="utf-8"))
    return {
        name: part
        for name, part in stored.items()
        if all(part["conditions"][key] == now[key] for key in ("model", "quick", "threads", "processor"))
    }


def markdown(found: Mapping[str, Any]) -> str:
    """All claims in one table, then every part."""
    pieces = ["# Speed", claims_table(found)]
    for part in found.values():
        pieces += [f"## {part['title']}", part["note"], table(part["rows"]), told(part["conditions"])]
    return "\n\n".join(pieces) + "\n"


def claims_table(found: Mapping[str, Any]) -> str:
    """The claims of all parts."""
    stored = [claim for part in found.values() for claim in part["claims"]]
    return table([Claim(**{key: value for key, value in claim.items() if key != "met"}).row() for claim in stored])


def told(known: Mapping[str, Any]) -> str:
    """The conditions as a sentence."""
    versions = ", ".join(f"{name} {number}" for name, number in known["versions"].items())
    quick = ", a quick run that says little" if known["quick"] else ""
    return (
        f"{known['model']}, {known['threads']} threads, {known['cores']} cores of {known['processor']}, "
        f"{known['date']}{quick}; {versions}."
    )


def main() -> int:
    """Measures, prints, writes; the exit status is 1 where results did not agree."""
    options = parser(__doc__)
    options.add_argument("--output", type=Path, default=Path("build/speed"), help="folder of the results")
    options.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    chosen = options.parse_args()
    failed = measure(setting_of(chosen), chosen.parts, chosen.output)
    results = chosen.output / "results.json"
    if results.is_file():
        print("\n== claims\n" + claims_table(json.loads(results.read_text(encoding="utf-8"))))
    print(f"\nwritten: {chosen.output}/results.json, results.md" + (f"; FAILED: {', '.join(failed)}" if failed else ""))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
