"""What a run will take: from the plan before it starts, from what was measured as soon as there is something."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from noiser.bench.plan import ATTRIBUTION
from noiser.bench.records import Cost

__all__ = ["Forecast", "Key", "Load", "attribution_tokens", "metric_tokens"]


class Key(NamedTuple):
    """Rows of one kind, by their labels; metric "attribution" for the attributions themselves."""

    model: str
    data: str
    method: str
    metric: str


class Load(NamedTuple):
    """What is to be done of a kind.

    Attributes:
        examples: how many.
        tokens: token-forwards of each, estimated.
    """

    examples: int
    tokens: float


def attribution_tokens(name: str, parameters: Mapping[str, Any], length: float, targets: int = 1) -> float:
    """Token-forwards of one attribution, roughly.

    Args:
        name: of the method, without its version.
        parameters: its hyper-parameters, defaults included.
        length: of the prompt in tokens.
        targets: tokens that are explained.
    """
    samples = float(parameters.get("samples") or parameters.get("n_samples") or 10)
    one_by_one = length * (length + 1) / 2  # every unit once, each from its own place to the end
    if name == "noiser":
        searches = {"k_min": 1 + parameters.get("steps", 10) / length, "k_max": 3.0, "k_max_per_unit": 10.0}
        return samples * one_by_one * (1 + searches.get(str(parameters.get("bounding")), 0.0)) * targets
    steps = float(parameters.get("n_steps") or 50)
    formulas: dict[str, Callable[[], float]] = {
        "noiser_relative": lambda: samples * one_by_one * targets,
        "occlusion": lambda: one_by_one,
        "random": lambda: 0.0,
        "last_attention": lambda: length,
        "attention_rollout": lambda: length,
        "input_x_gradient": lambda: 3 * length * targets,
        "deeplift": lambda: 6 * length * targets,
        "attn_lrp": lambda: 3 * length * targets,
        "gradient_shap": lambda: 3 * samples * length * targets,
        "integrated_gradients": lambda: 3 * steps * length * targets,
        "sequential_integrated_gradients": lambda: 3 * steps * length * length * targets,
        "shapley_sampling": lambda: samples * one_by_one,
    }
    return formulas.get(name, lambda: max(samples, 50) * length)()


def metric_tokens(name: str, masks: int | None, rates: int, length: float, targets: int = 1) -> float:
    """Token-forwards of one measurement, roughly; arguments as for `attribution_tokens`."""
    samples = masks or 10
    soft, curve = (2 * samples + 1) * length * targets, 2 * samples * rates * length * targets
    known = {
        "soft_scores": soft,
        "mass_matched": 2 * curve,
        "mass_matched_rank": curve,
        "faithfulness": soft + 3 * curve,
        "erasure": 10 * length * targets,
        "erasure_curves": 2 * length * length * targets,
        "localisation": 0.0,
        "answerability": 100.0,
        "answerability_top5": 1000.0,
        "minimum_top_k": 100.0 * length,
    }
    return known.get(name, 20 * length * targets)


class Forecast:
    """What is left to do, and how long that takes.

    Args:
        loads: what is to be done.
        speeds: token-forwards a second, by model.
        costs: what rows took that are stored.
        workers: who do it side by side.
    """

    def __init__(
        self, loads: Mapping[Key, Load], speeds: Mapping[str, float], costs: Iterable[Cost] = (), workers: int = 1
    ) -> None:
        self.loads = {key: load for key, load in loads.items() if load.examples}
        self.workers = workers
        self._left = {key: load.examples for key, load in self.loads.items()}
        self._speeds = speeds
        self._spent: dict[Key, tuple[float, int]] = {}
        for cost in costs:
            self._count(Key(cost.model, cost.data, cost.method, cost.metric), cost.seconds, 1)

    def done(self, key: Key, seconds: float, examples: int) -> None:
        """Books a finished chunk."""
        self._count(key, seconds, examples)
        if key in self._left:
            self._left[key] -= min(examples, self._left[key])

    def _count(self, key: Key, seconds: float, examples: int) -> None:
        before, count = self._spent.get(key, (0.0, 0))
        self._spent[key] = (before + seconds, count + examples)

    @property
    def attributions(self) -> int:
        """How many are to be made in all."""
        return sum(load.examples for key, load in self.loads.items() if key.metric == ATTRIBUTION)

    @property
    def measurements(self) -> int:
        """How many are to be made in all."""
        return sum(load.examples for key, load in self.loads.items() if key.metric != ATTRIBUTION)

    @property
    def token_forwards(self) -> float:
        """How many tokens have to go through a model in all, roughly."""
        return sum(load.examples * load.tokens for load in self.loads.values())

    @property
    def rows(self) -> tuple[int, int]:
        """Rows that were made, and rows in all."""
        total = sum(load.examples for load in self.loads.values())
        return total - sum(self._left.values()), total

    def seconds_left(self) -> float | None:
        """Of wall clock; None where nothing is known about a model's speed."""
        scales = self._scales()
        total = 0.0
        for key, count in self._left.items():
            if not count:
                continue
            seconds, examples = self._spent.get(key, (0.0, 0))
            if examples:
                total += count * seconds / examples
            elif key.model in scales:
                total += count * self.loads[key].tokens * scales[key.model]
            else:
                return None
        return total / self.workers

    def _scales(self) -> dict[str, float]:
        """Seconds a token-forward by model: of what was measured, else of its plain forward pass."""
        scales = {model: 1 / speed for model, speed in self._speeds.items() if speed > 0}
        for model in {key.model for key in self._spent}:
            known = [
                (seconds, examples * self.loads[key].tokens)
                for key, (seconds, examples) in self._spent.items()
                if key.model == model and key in self.loads
            ]
            tokens = sum(tokens for _, tokens in known)
            if tokens > 0:
                scales[model] = sum(seconds for seconds, _ in known) / tokens
        return scales
