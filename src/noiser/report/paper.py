"""The numbers that the paper printed, which stand beside ours."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.resources import files
from statistics import fmean
from typing import Any, NamedTuple

from noiser.bench.plan import DataEntry, MethodEntry, MetricEntry
from noiser.registry import unversioned

MODELS = ("Qwen2-0.5B", "Llama3.2-1B", "Qwen2-1.5B", "gemma-2-2B", "gemma-2-9B", "Llama3-8B")
"""The paper's six models, as it names them."""

_SPELLINGS = {
    "qwen2-0.5b": "Qwen2-0.5B",
    "llama-3.2-1b": "Llama3.2-1B",
    "llama3.2-1b": "Llama3.2-1B",
    "qwen2-1.5b": "Qwen2-1.5B",
    "gemma-2-2b": "gemma-2-2B",
    "gemma-2-9b": "gemma-2-9B",
    "meta-llama-3-8b": "Llama3-8B",
    "llama-3-8b": "Llama3-8B",
    "llama3-8b": "Llama3-8B",
}
_INSEQ = ("gradient_shap", "input_x_gradient", "integrated_gradients", "deeplift", "sequential_integrated_gradients")
_METHODS = {"noiser": "noiser"} | {f"inseq:{name}": name for name in (*_INSEQ, "lime", "occlusion")}
"""What the paper ran, and what it calls that. Its baselines were Inseq's methods with Inseq's defaults, which ours of
the same names are not; its last attention went through a second softmax."""

_DATA = {"known": "known", "longra": "longra", "wikitext": "wikibio"}
_BOUNDINGS = {"random": "random_k", "k_max_per_unit": "k_max_per_token"}
_HARMLESS = frozenset({"search", "all_thresholds", "batch_size"})
"""Parameters that change how a score is computed, not what it is."""


class Printed(NamedTuple):
    """A number of the paper's tables.

    Attributes:
        table: as for `published`.
        column: of tables with several numbers per cell.
    """

    table: str
    column: str | None = None

    def number(self, data: DataEntry, method: MethodEntry, model: str) -> float | None:
        """The paper's number for a method and one of its models, or their "average"; None if it has none."""
        settings = method.name, method.args, method.unit
        if self.table in ("faithfulness", "soft_ns_nc"):
            path = [data_of(data.name), method_of(*settings)]
        else:  # on KNOWN alone
            name = bounding_of(*settings) if self.table == "bounding_known" else method_of(*settings)
            path = [name if data_of(data.name) == "known" else None]
        names = [name for name in path if name]
        one = None if model == "average" else model
        value = published(self.table, names, one, self.column) if len(names) == len(path) else None
        return value / 100 if value is not None and self.column == "rate_percent" else value


def model_of(name: str) -> str | None:
    """The paper's name of a model, given a hub id or folder; None for other models, instruction-tuned ones included.

    >>> model_of("meta-llama/Llama-3.2-1B"), model_of("gemma-3-270m")
    ('Llama3.2-1B', None)
    """
    return _SPELLINGS.get(name.replace("\\", "/").rstrip("/").rsplit("/", 1)[-1].lower())


def data_of(name: str | None) -> str | None:
    """The paper's name of a data set. The sentences that it calls WikiBio are our `wikitext`."""
    return _DATA.get(unversioned(name)) if name else None


def method_of(name: str, args: Mapping[str, Any], unit: str = "token") -> str | None:
    """The paper's name of a method; None unless it is the very method, with the parameters and unit of the paper."""
    plain = unversioned(name)
    changed = {key: value for key, value in args.items() if key not in _HARMLESS}
    if plain == "noiser" and changed.get("bounding") == "k_min":
        del changed["bounding"]
    return _METHODS.get(plain) if not changed and unit == "token" else None


def bounding_of(name: str, args: Mapping[str, Any], unit: str = "token") -> str | None:
    """The `bounding` of a Noiser that differs from the paper's in nothing else; None for everything else."""
    changed = {key: value for key, value in args.items() if key not in _HARMLESS}
    bounding = changed.pop("bounding", "k_min")
    return str(bounding) if unversioned(name) == "noiser" and not changed and unit == "token" else None


def comparable(measure: MetricEntry) -> bool:
    """Whether a metric normalises the scores as the paper's does."""
    return measure.normalization in (None, "sum")


def published(table: str, path: Sequence[str], model: str | None, column: str | None = None) -> float | None:
    """A number of the paper, as printed.

    Args:
        table: "faithfulness", "soft_ns_nc", "answerability_top1", "answerability_top5", "bounding_known" or
            "correct_predictions".
        path: the keys down to the models: (data set, method), (method,) or (data set,).
        model: the paper's name of a model; None for the mean of all six, as printed or, where the paper prints none,
            computed.
        column: of tables with several numbers per cell.

    Returns:
        None where the paper has no such number.
    """
    cells: Any = _tables()[table]
    for key in path:
        cells = cells.get(_BOUNDINGS.get(key, key)) if isinstance(cells, dict) else None
    if not isinstance(cells, dict):
        return None
    if model is None and "average" not in cells:
        numbers = [_number(cells.get(name), column) for name in MODELS]
        return fmean(present) if (present := [number for number in numbers if number is not None]) else None
    return _number(cells.get(model or "average"), column)


def _number(cell: Any, column: str | None) -> float | None:
    return cell.get(column) if isinstance(cell, dict) else cell


@cache
def _tables() -> Mapping[str, Any]:
    return json.loads(files("noiser.report").joinpath("paper.json").read_text(encoding="utf-8"))
