"""What the parts of the benchmark share: the setting, prompts, clocks, the machine's peak, and tables of results.

A part is a function from a `Setting` to a `Part`: rows of a table, and claims with the values that they must reach.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import importlib.util
import os
import platform
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

import noiser
from noiser.engine import LocalEngine, Session, complete
from noiser.methods import Method, Scores
from noiser.model import LanguageModel, Query
from noiser.model.products import fast_products

TEXT = (
    "The old lighthouse keeper climbed the narrow stairs every evening before sunset, lit the great lamp, and watched "
    "the fishing boats come home across the bay, counting them one by one until the last of them had passed the rocks "
    "and reached the harbour, where the families of the crew were waiting on the old stone pier with blankets, "
    "lanterns and a kettle of hot soup for everyone who came. In winter, when the storms blew in from the north and "
    "the waves broke over the wall, he stayed awake all night, wrote down the hour at which each ship had passed, and "
    "listened to the wind in the chimney. His daughter brought him bread and news from the town on Sundays, and in "
    "return he told her what he had seen: a whale close to the shore, a light that moved over the water and belonged "
    "to nobody, and once a small red boat that drifted past with its sail set and no one on board, which was found "
    "the next morning on the beach of the island, dry and without a scratch, as if it had only been put down"
)

PATIENCE = 10.0
"""Seconds after which a run is not repeated."""

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Where and how everything is measured.

    Attributes:
        model: its name, hub id or folder.
        load: the model in a precision: "float32", "bfloat16" or "float16".
        quick: short prompts, few repetitions and few examples, to see that everything runs; the figures say little.
        threads: of every matrix product.
    """

    model: str
    load: Callable[[str], LanguageModel]
    quick: bool = False
    threads: int = 2

    @property
    def repeats(self) -> int:
        """Calls of which the fastest counts: what else the machine does only ever adds."""
        return 1 if self.quick else 3


@dataclass(frozen=True)
class Claim:
    """A figure that the project promises, and what was measured."""

    text: str
    measured: float
    at_least: float | None = None
    at_most: float | None = None

    @property
    def met(self) -> bool:
        """Whether the promise is kept."""
        low = float("-inf") if self.at_least is None else self.at_least
        high = float("inf") if self.at_most is None else self.at_most
        return low <= self.measured <= high

    def row(self) -> dict[str, Any]:
        """As a row of the table of claims."""
        wanted = f"≥ {cell(self.at_least)}" if self.at_most is None else f"≤ {cell(self.at_most)}"
        return {"claim": self.text, "measured": self.measured, "wanted": wanted, "met": "yes" if self.met else "no"}


@dataclass(frozen=True)
class Part:
    """What one part of the benchmark found: a title, how it was measured, a table, and the claims it decides."""

    title: str
    note: str
    rows: list[dict[str, Any]]
    claims: list[Claim] = field(default_factory=list[Claim])

    def stored(self) -> dict[str, Any]:
        """As JSON."""
        claims = [asdict(claim) | {"met": claim.met} for claim in self.claims]
        return {"title": self.title, "note": self.note, "rows": self.rows, "claims": claims}

    def text(self) -> str:
        """As Markdown."""
        claims = ["", table([claim.row() for claim in self.claims])] if self.claims else []
        return "\n".join([self.note, "", table(self.rows), *claims])


# ---- prompts --------------------------------------------------------------------------------------------------------


def prompt_of(lm: LanguageModel, tokens: int) -> str:
    """The longest beginning of the text, in whole words, with at most this many tokens, special ones included."""
    words = TEXT.split(" ")
    found = words[0]
    for end in range(2, len(words) + 1):
        longer = " ".join(words[:end])
        if len(lm.tokenizer(longer)["input_ids"]) > tokens:
            return found
        found = longer
    return found


def length_of(query: Query) -> int:
    """Tokens that the model reads."""
    return len(query.encoding.token_ids)


# ---- clocks ---------------------------------------------------------------------------------------------------------


def seconds(run: Callable[[], object], repeats: int) -> float:
    """The shortest of a few calls."""
    times: list[float] = []
    while len(times) < repeats and sum(times) < PATIENCE:
        begin = time.perf_counter()
        run()
        times.append(time.perf_counter() - begin)
    return min(times)


def _gib(name: str) -> float:
    """Of this process: VmRSS, what it holds, or VmHWM, the most it has held."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) / 2**20


def watch_memory() -> Callable[[], float]:
    """From now on: a function that tells the most GiB held so far above what is held now (Linux)."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what is free goes back to the system, lest it be taken unseen
    Path("/proc/self/clear_refs").write_text("5")
    before = _gib("VmRSS")
    return lambda: _gib("VmHWM") - before


def run_method(lm: LanguageModel, query: Query, method: Method) -> tuple[Session, Scores]:
    """One attribution without what comes before (tokens, continuation) and after it (the record)."""
    session = Session(lm, query)
    return session, complete(LocalEngine(lm), session.drive(method(query, torch.Generator().manual_seed(0))))


class ForwardClock:
    """Seconds inside the model's forward passes, while it is entered as a context."""

    def __init__(self, lm: LanguageModel) -> None:
        self.seconds, self.passes = 0.0, 0
        self._model, self._begin = lm.model, 0.0

    def __enter__(self) -> ForwardClock:
        self._handles = [
            self._model.register_forward_pre_hook(self._start),
            self._model.register_forward_hook(self._stop),
        ]
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()

    def _start(self, *_: object) -> None:
        self._begin = time.perf_counter()

    def _stop(self, *_: object) -> None:
        self.seconds += time.perf_counter() - self._begin
        self.passes += 1


@cache
def matrix_peak(dtype: str = "float32", size: int = 2048, repeats: int = 10) -> float:
    """Floating-point operations a second of a large matrix product, PyTorch's or ours, whichever is faster.

    The best of a few; measured once a process.
    """
    layer = torch.nn.Linear(size, size, bias=False, dtype=DTYPES[dtype])
    x = torch.randn(size, size).to(DTYPES[dtype])
    with torch.no_grad():
        layer(x)
        plain = seconds(lambda: layer(x), repeats)
        with fast_products(layer):
            layer(x)
            return 2 * size**3 / min(plain, seconds(lambda: layer(x), repeats))


# ---- work -----------------------------------------------------------------------------------------------------------


def operations(lm: LanguageModel, tokens: int, rows: int) -> float:
    """Floating-point operations of the model's weights: all but the table for each token, the head for each row.

    Products of queries with keys and of attention weights with values are left out: they are few at these lengths.
    """
    table = lm.model.get_input_embeddings().weight
    head = lm.model.get_output_embeddings().weight
    body = sum(p.numel() for p in lm.model.parameters()) - table.numel() - (0 if head is table else head.numel())
    return 2.0 * body * tokens + 2.0 * head.numel() * rows


def work_of(session: Session) -> float:
    """Floating-point operations of everything that has been run of a query, the clean sequence included."""
    query, ran = session.query, session.counters
    return operations(session.lm, ran.token_forwards + length_of(query), ran.head_rows + len(query.logit_positions))


def scoring_pass(query: Query, samples: int) -> int:
    """Token-forwards of one scoring pass a target: each unit's samples, from its first token to the target."""
    pairs = query.causal_mask.nonzero().tolist()
    return samples * sum(query.logit_positions[g] + 1 - query.units[u].token_indices[0] for g, u in pairs)


# ---- tables ---------------------------------------------------------------------------------------------------------


def cell(value: Any) -> str:
    """A value as it stands in a table: three significant digits."""
    if value is None:
        return ""
    if not isinstance(value, float):
        return str(value)
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


def table(rows: Sequence[dict[str, Any]]) -> str:
    """A Markdown table; a column that a row lacks is empty in it."""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    lines = [columns, ["---"] * len(columns), *([cell(row.get(name)) for name in columns] for row in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def say(row: dict[str, Any]) -> dict[str, Any]:
    """Tells a finished row on standard error, and returns it."""
    print("  " + ", ".join(f"{name} {cell(value)}" for name, value in row.items()), file=sys.stderr, flush=True)
    return row


def conditions(setting: Setting) -> dict[str, Any]:
    """What the figures depend on."""
    names = ("torch", "transformers", "inseq", "captum")
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").is_file() else []
    processor = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    return {
        "model": setting.load("float32").identity.name,
        "processor": processor or platform.processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "quick": setting.quick,
        "date": time.strftime("%Y-%m-%d"),
        "versions": {"noiser": noiser.__version__, "python": platform.python_version()}
        | {name: version(name) for name in names if importlib.util.find_spec(name)},
    }


# ---- command line ---------------------------------------------------------------------------------------------------


def parser(description: str | None) -> argparse.ArgumentParser:
    """The options that every part has."""
    found = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    found.add_argument("--model", default="gemma-3-270m", help="name, hub id or folder")
    found.add_argument("--threads", type=int, default=2)
    found.add_argument("--quick", action="store_true", help="only to see that everything runs")
    return found


def setting_of(arguments: argparse.Namespace) -> Setting:
    """The setting that the options describe."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(arguments.threads)
    load = cache(lambda dtype: noiser.load_model(arguments.model, dtype=dtype, device="cpu"))
    return Setting(model=arguments.model, load=load, quick=arguments.quick, threads=arguments.threads)


def main(run: Callable[[Setting], Part], description: str | None) -> None:
    """Runs one part alone and prints it."""
    print(run(setting_of(parser(description).parse_args())).text())
