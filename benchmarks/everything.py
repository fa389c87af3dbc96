"""The claims about speed, measured in one run on one machine.

    python benchmarks/everything.py --model gemma-3-270m --output build/speed.md

The exit status is 1 where results of two ways to the same numbers differ; a claim that is not met is in the tables.
"""

from __future__ import annotations

import sys
import traceback
from pathlib import Path

import many_prompts
import methods_speed
import noiser_speed
from measuring import conditions, parser, setting_of

PARTS = {"noiser": noiser_speed.run, "methods": methods_speed.run, "prompts": many_prompts.run}


def main() -> int:
    """How many parts failed."""
    options = parser(__doc__)
    options.add_argument("--output", type=Path, default=Path("build/speed.md"))
    options.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    chosen = options.parse_args()
    setting, pieces, failed = setting_of(chosen), ["# Speed"], 0
    chosen.output.parent.mkdir(parents=True, exist_ok=True)
    for name in chosen.parts:
        try:
            pieces.append(str(PARTS[name](setting)))
        except Exception:  # the other parts go on
            traceback.print_exc()
            failed += 1
            continue
        print(pieces[-1], flush=True)
        chosen.output.write_text("\n\n".join([*pieces, conditions(setting)]) + "\n", encoding="utf-8")
    return failed


if __name__ == "__main__":
    sys.exit(main())
