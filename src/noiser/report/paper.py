"""The numbers that the paper printed, which stand beside ours."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from statistics import fmean
from typing import Any

from noiser.bench.plan import DataEntry, MethodEntry, MetricEntry
from noiser.registry import unversioned

MODELS = ("Qwen2-0.5B", "Llama3.2-1B", "Qwen2-1.5B", "gemma-2-2B", "gemma-2-9B", "Llama3-8B")
"""The paper's six models, as it names them."""

_DATA = {"known": "known", "longra": "longra", "wikitext": "wikibio"}
_BOUNDINGS = {"random": "random_k", "k_max_per_unit": "k_max_per_token"}
_TABLES = {
    "faithfulness": ("faithfulness", None),
    "log_ratio_ns": ("soft_ns_nc", "soft_ns"),
    "log_ratio_nc": ("soft_ns_nc", "soft_nc"),
    "answerability_rate": ("answerability_top1", "rate_percent"),
    "answerability_score": ("answerability_top1", "score"),
    "answerability_top5_rate": ("answerability_top5", "rate_percent"),
    "answerability_top5_score": ("answerability_top5", "score"),
}
"""The paper's table of each number, and its column in tables with several numbers per cell."""


def paper_number(
    number: str, model: str, data: DataEntry, method: MethodEntry, metric: MetricEntry | None
) -> float:
    """The paper's number for the same model, or else the mean of its six models.

    NaN where there is none: for other data, methods, parameters, units and normalizations than the
    paper's.
    """
    of_data = data_of(data.name)
    of_method = method_of(method)
    if metric is None or metric.normalization not in (None, "sum") or not of_data or not of_method:
        return math.nan
    table, column = _TABLES.get(number, ("", None))
    path = [of_method]
    if table == "faithfulness" and of_method not in _tables()["faithfulness"]["known"]:
        table = "bounding_known"
    elif table in ("faithfulness", "soft_ns_nc"):
        path = [of_data, of_method]
    if not table:
        return math.nan
    if len(path) == 1 and of_data != "known":  # these tables are about the data set "known" alone
        return math.nan
    value = published(table, path, model_of(model), column)
    if value is None:
        return math.nan
    return value / 100 if column == "rate_percent" else value


def model_of(name: str) -> str | None:
    """The paper's name of a model, from a hub id or folder.

    None for other models, instruction-tuned ones included.

    >>> model_of("meta-llama/Llama-3.2-1B"), model_of("gemma-3-270m")
    ('Llama3.2-1B', None)
    """
    plain = name.replace("\\", "/").rstrip("/").rsplit("/", 1)[-1].lower()
    plain = plain.removeprefix("meta-").replace("llama-", "llama")
    for model in MODELS:
        if model.lower() == plain:
            return model
    return None


def data_of(name: str | None) -> str | None:
    """The paper's name of a data set. The sentences that it calls WikiBio are our `wikitext`."""
    return _DATA.get(unversioned(name)) if name else None


def method_of(method: MethodEntry) -> str | None:
    """The paper's name of a method or bounding; None unless parameters and unit are the paper's.

    The paper's baselines were Inseq's methods with Inseq's defaults, which ours of the same names
    are not. It does not say by which `noise_norm` its noise was divided: every reading has its
    number.
    """
    name = unversioned(method.name)
    args = {key: value for key, value in method.args.items() if key not in ("search", "noise_norm")}
    bounding = str(args.pop("bounding", "k_min")) if name == "noiser" else ""
    if args or method.unit != "token":
        return None
    if bounding == "k_min":
        return "noiser"
    if bounding:
        return _BOUNDINGS.get(bounding, bounding)
    return name.removeprefix("inseq:") if name.startswith("inseq:") else None


def published(
    table: str, path: Sequence[str], model: str | None, column: str | None = None
) -> float | None:
    """A number of the paper, as printed; None where it has none.

    Args:
        table: "faithfulness", "soft_ns_nc", "answerability_top1", "answerability_top5",
            "bounding_known" or "correct_predictions".
        path: the keys down to the models: (data set, method), (method,) or (data set,).
        model: the paper's name of a model; None for the mean of all six, as printed or else
            computed.
        column: of tables with several numbers per cell.
    """
    cells: Any = _tables()[table]
    for key in path:
        cells = cells.get(key, {})
    if model or "average" in cells:
        return _number(cells.get(model or "average"), column)
    numbers: list[float] = []
    for name in MODELS:
        value = _number(cells.get(name), column)
        if value is not None:
            numbers.append(value)
    return fmean(numbers) if numbers else None


def _number(cell: Any, column: str | None) -> float | None:
    return cell.get(column) if isinstance(cell, dict) else cell


@cache
def _tables() -> dict[str, Any]:
    return json.loads(files("noiser.report").joinpath("paper.json").read_text(encoding="utf-8"))
