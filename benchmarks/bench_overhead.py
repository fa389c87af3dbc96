"""What a benchmark costs beyond its attributions and metrics: planning, storing, handing over, telling.

    python benchmarks/bench_overhead.py [PLAN.toml] [--workers 1]

Runs a plan in a temporary folder. The time from the first job to the end, minus what was measured inside attributions
and metrics (the costs that it stores), is overhead; so is nothing before the first job, which does not grow with the
plan: loading Python, PyTorch and the model, and choosing the examples.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

from noiser.bench import Store, run_bench
from noiser.bench.progress import Forecast
from noiser.bench.records import Selection
from noiser.bench.tasks import Finished

MINI = Path(__file__).parent / "plans" / "mini.toml"


class Clock:
    """A listener that looks at the clock."""

    def __init__(self) -> None:
        self.first = 0.0

    def say(self, text: str) -> None:
        """Prints it."""
        print(text)

    def selecting(self, selection: Selection) -> None:
        """Choosing examples is before the jobs."""

    def progress(self, forecast: Forecast, last: Finished | None) -> None:  # noqa: ARG002
        """Called once before the first job."""
        self.first = self.first or time.perf_counter()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("plan", nargs="?", type=Path, default=MINI)
    parser.add_argument("--workers", type=int, default=1)
    chosen = parser.parse_args()
    clock, started = Clock(), time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        outcome = run_bench(chosen.plan, Path(folder), clock, workers=chosen.workers)
        ended = time.perf_counter()
        work = sum(cost.seconds for cost in Store(folder).costs()) / max(1, chosen.workers)
        files = [place for place in Path(folder).rglob("*") if place.is_file()]
        size = sum(place.stat().st_size for place in files)
    wall = ended - clock.first
    print(f"{outcome.rows} rows in {len(files)} files, {size / 1e6:.1f} MB")
    print(f"before the first job: {clock.first - started:.1f} s")
    print(f"jobs: {wall:.2f} s, of which attributions and metrics {work:.2f} s")
    print(f"overhead: {(wall - work) / wall:.1%}")


if __name__ == "__main__":
    main()
