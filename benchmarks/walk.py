"""How far a reader walks through the code of one call: named functions, files and frames of noiser's own.

    python benchmarks/walk.py        # a table
    python benchmarks/walk.py -l     # also the functions, in the order of their first calls

Counted is the second call on a two-layer llama, so that nothing is imported, measured or compiled for the first time.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import noiser

ROOT = Path(noiser.__file__).parent
PROMPT = "The quick brown fox jumps over the lazy"


class Walk(NamedTuple):
    """Calls by function ("file:line name", no lambdas), and counts of functions, files, most frames and calls."""

    calls: dict[str, int]
    functions: int
    files: int
    depth: int
    total: int


def walk(call: Callable[[], Any]) -> Walk:
    """The functions that the second of two calls passes, in this thread."""
    calls, depth, deepest = Counter[tuple[str, str, int]](), 0, 0

    def profile(frame: FrameType, event: str, _: Any) -> None:
        nonlocal depth, deepest
        code = frame.f_code
        if event in ("call", "return") and code.co_filename.startswith(f"{ROOT}/"):
            depth += 1 if event == "call" else -1
            deepest = max(deepest, depth)
            if event == "call":
                calls[code.co_filename[len(f"{ROOT}/") :], code.co_qualname, code.co_firstlineno] += 1

    call()
    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        call()
    finally:
        sys.setprofile(before)
    files = {file for file, _, _ in calls}
    named = {key: count for key, count in calls.items() if "<" not in key[1].rsplit(".", 1)[-1]}
    listed = {f"{file}:{line} {name}": count for (file, name, line), count in named.items()}
    return Walk(listed, len(named), len(files), deepest, sum(calls.values()))


def walks(lm: noiser.LanguageModel) -> dict[str, Walk]:
    """An attribution of eight tokens, and a metric of one prompt."""
    return {
        "attribute": walk(lambda: noiser.attribute(lm, PROMPT, method=noiser.Occlusion())),
        "evaluate": walk(lambda: noiser.evaluate(lm, [PROMPT], method="occlusion", metrics=["lds"])),
    }


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("-l", "--list", action="store_true", help="also the functions, in the order of first calls")
    listed = parser.parse_args().list
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
    from tiny import tiny

    found = walks(tiny("llama"))
    print(f"{'':10}" + "".join(f"{name:>11}" for name in ("functions", "files", "depth", "calls")))
    for name, (_, *numbers) in found.items():
        print(f"{name:10}" + "".join(f"{number:>11,}" for number in numbers))
    for name, (calls, *_) in found.items() if listed else ():
        print(f"\n{name}:", *(f"{count:>7,}  {function}" for function, count in calls.items()), sep="\n")


if __name__ == "__main__":
    main()
