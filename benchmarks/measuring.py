"""What the speed benchmarks share: the setting, prompts, clocks, the machine's peak, and tables of
results.

A part is a function from a `Setting` to a `Part`: rows of a table.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import numpy as np
import torch

import noiser
from noiser.bench.run import machine, versions_of
from noiser.engine import Cost, Query, run_one
from noiser.methods import Method, Scores
from noiser.model import LanguageModel
from noiser.model.products import forward_of

TEXT = (
    "The old lighthouse keeper climbed the narrow stairs every evening before sunset, lit the "
    "great lamp, and watched "
    "the fishing boats come home across the bay, counting them one by one until the last of them "
    "had passed the rocks "
    "and reached the harbour, where the families of the crew were waiting on the old stone pier "
    "with blankets, "
    "lanterns and a kettle of hot soup for everyone who came. In winter, when the storms blew in "
    "from the north and "
    "the waves broke over the wall, he stayed awake all night, wrote down the hour at which each "
    "ship had passed, and "
    "listened to the wind in the chimney. His daughter brought him bread and news from the town "
    "on Sundays, and in "
    "return he told her what he had seen: a whale close to the shore, a light that moved over "
    "the water and belonged "
    "to nobody, and once a small red boat that drifted past with its sail set and no one on "
    "board, which was found "
    "the next morning on the beach of the island, dry and without a scratch, as if it had only "
    "been put down"
)

PATIENCE = 10.0
"""Seconds after which a run is not repeated."""

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, kw_only=True)
class Setting:
    """The model in a precision ("float32", "bfloat16" or "float16"), and whether the run is a quick
    one.

    A quick run has short prompts and one repetition. It shows that everything runs; its figures say
    little.
    """

    load: Callable[[str], LanguageModel]
    quick: bool = False

    @property
    def repeats(self) -> int:
        """The number of calls of which the fastest counts."""
        return 1 if self.quick else 3


@dataclass(frozen=True)
class Part:
    """The results of one benchmark: a title, the conditions, and a table."""

    title: str
    note: str
    rows: list[dict[str, Any]]

    def __str__(self) -> str:
        return "\n".join([f"## {self.title}", "", self.note, "", table(self.rows)])


def prompt_of(lm: LanguageModel, tokens: int) -> str:
    """The longest beginning of the text, in whole words, with at most this many tokens, special
    ones included.
    """
    words = TEXT.split(" ")
    texts = (" ".join(words[:end]) for end in range(len(words), 0, -1))
    return next(text for text in texts if len(lm.tokenizer(text)["input_ids"]) <= tokens)


# ---- clocks --------------------------------------------------------------------------------------


def seconds(run: Callable[[], object], repeats: int) -> float:
    """The shortest of a few calls."""
    times: list[float] = []
    while len(times) < repeats and sum(times) < PATIENCE:
        begin = time.perf_counter()
        run()
        times.append(time.perf_counter() - begin)
    return min(times)


def run_method(lm: LanguageModel, query: Query, method: Method) -> tuple[Query, Scores]:
    """One run of a method on a prepared question, and the query with the work of this run alone."""
    query = replace(query, spent=Cost())
    return query, run_one(lm, method(query, torch.Generator().manual_seed(0)))


class ForwardClock:
    """Seconds inside the model's forward passes while it is entered, and their number, tokens and
    rows of the head.
    """

    def __init__(self, lm: LanguageModel) -> None:
        self.seconds, self.passes, self.tokens, self.rows = 0.0, 0, 0, 0
        self._model, self._begin = lm.model, 0.0

    def __enter__(self) -> ForwardClock:
        self._handles = [
            self._model.register_forward_pre_hook(self._start),
            self._model.register_forward_hook(self._stop, with_kwargs=True),
        ]
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()

    def _start(self, *_: object) -> None:
        self._begin = time.perf_counter()

    def _stop(self, _model: object, _args: object, given: dict[str, Any], output: Any) -> None:
        self.seconds += time.perf_counter() - self._begin
        self.passes += 1
        self.tokens += given["inputs_embeds"].shape[:2].numel()
        self.rows += output.logits.shape[:2].numel()


@cache
def matrix_peak(dtype: str = "float32", size: int = 2048, device: str = "cpu") -> float:
    """Floating-point operations per second of a large matrix product: the faster of PyTorch's and
    the library's.
    """
    layer = torch.nn.Linear(size, size, bias=False, device=device, dtype=DTYPES[dtype])
    x = torch.randn(size, size, device=device).to(DTYPES[dtype])

    def multiply(product: Callable[..., Any]) -> None:
        float(product(x)[0, 0])  # waits for the device

    products = (layer, forward_of(layer, is_head=False) or layer)
    with torch.no_grad():
        for product in products:
            multiply(product)
        return 2 * size**3 / min(seconds(partial(multiply, product), 10) for product in products)


def operations(lm: LanguageModel, tokens: int, rows: int) -> float:
    """Floating-point operations of the model's weights: all but the table for each token, the head
    for each row.

    Products of queries with keys and of attention weights with values are left out: they are few at
    these lengths.
    """
    embeddings = lm.model.get_input_embeddings().weight
    head = lm.model.get_output_embeddings().weight
    body = sum(p.numel() for p in lm.model.parameters()) - embeddings.numel()
    return (
        2.0 * (body - (0 if head is embeddings else head.numel())) * tokens
        + 2.0 * head.numel() * rows
    )


def scoring_pass(query: Query, samples: int) -> int:
    """Token-forwards of one scoring pass per target: each unit's samples, from its first token to
    the target.
    """
    pairs = query.causal_mask.nonzero().tolist()
    return samples * sum(
        query.logit_positions[g] + 1 - query.units[u].token_indices[0] for g, u in pairs
    )


# ---- tables --------------------------------------------------------------------------------------


def cell(value: Any) -> str:
    """A value with three significant digits."""
    if not isinstance(value, float):
        return "" if value is None else str(value)
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


def table(rows: Sequence[dict[str, Any]]) -> str:
    """A Markdown table; where a row lacks a column, the cell is empty."""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    lines = [
        columns,
        ["---"] * len(columns),
        *([cell(row.get(name)) for name in columns] for row in rows),
    ]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def share(hits: Sequence[bool], prompts: int | None = None) -> str:
    """A share with Wilson's 95 % interval over so many prompts, by default one for each hit or
    miss.
    """
    from scipy.stats import binomtest

    found, n = sum(hits) / len(hits), prompts or len(hits)
    low, high = binomtest(round(found * n), n).proportion_ci(method="wilson")
    return f"{found:.2f} [{low:.2f}, {high:.2f}]"


def in_turn(draws: Sequence[Sequence[Any]]) -> list[Any]:
    """One of each draw, then the next of each. Each draw begins elsewhere, since the place of the
    gold sentence goes through a draw in order.

    >>> in_turn(["abc", "def"])
    ['a', 'e', 'b', 'f', 'c', 'd']
    """
    turned: list[Sequence[Any]] = []
    for number, draw in enumerate(draws):
        begin = number * (len(draw) // len(draws) or 1) % max(len(draw), 1)
        turned.append([*draw[begin:], *draw[:begin]])
    rows = itertools.zip_longest(*turned)
    return [each for row in rows for each in row if each is not None]


def mean_difference(differences: np.ndarray, resamples: int = 10_000) -> str:
    """The mean of differences, with a 95 % percentile interval of the bootstrap over prompts."""
    count = len(differences)
    drawn = np.random.default_rng(0).integers(count, size=(resamples, count))
    low, high = np.quantile(differences[drawn].mean(1), [0.025, 0.975])
    return f"{differences.mean():+.3f} [{low:+.3f}, {high:+.3f}]"


def say(row: dict[str, Any]) -> dict[str, Any]:
    """The row, after it was written to standard error."""
    print(
        "  " + ", ".join(f"{name} {cell(value)}" for name, value in row.items()),
        file=sys.stderr,
        flush=True,
    )
    return row


def conditions(setting: Setting) -> str:
    """The machine, the model and the versions, as a sentence."""
    here, versions = machine(), versions_of(("torch", "transformers", "inseq", "captum"))
    return (
        f"{setting.load('float32').identity.name}, {torch.get_num_threads()} threads, "
        f"{here['cores']} cores of "
        f"{here['cpu']}, {time.strftime('%Y-%m-%d')}{', a quick run' if setting.quick else ''}; "
        + ", ".join(f"{name} {number}" for name, number in versions.items())
        + "."
    )


def main(run: Callable[[Setting], Part], description: str | None) -> None:
    """Runs one part with the options of the command line, and prints it."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="gemma-3-270m", help="name, hub id or folder")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--quick", action="store_true", help="only to see that everything runs")
    chosen = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(chosen.threads)
    load = cache(lambda dtype: noiser.load_model(chosen.model, dtype=dtype, device="cpu"))
    setting = Setting(load=load, quick=chosen.quick)
    print(run(setting), conditions(setting), sep="\n\n")
