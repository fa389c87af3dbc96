"""The models that a page offers: loaded when first asked for, one question at a time each."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager
from typing import Any

from noiser.app.jobs import Job, Turns
from noiser.errors import ParameterError, UnknownNameError
from noiser.model import LanguageModel
from noiser.model.catalog import BUILT_IN

__all__ = ["Models", "Source", "offered"]

Source = Callable[[], LanguageModel]


class Models:
    """Models by name.

    Args:
        sources: what loads each; a model that fails to load is tried again by the next question.
    """

    def __init__(self, sources: Mapping[str, Source]) -> None:
        if not sources:
            raise ParameterError("There is no model to serve; expected at least one.")
        self._sources = dict(sources)
        self._loaded: dict[str, LanguageModel] = {}
        self._turns = {name: Turns() for name in sources}

    @property
    def names(self) -> list[str]:
        """All names; the first is the page's own choice."""
        return list(self._sources)

    @contextmanager
    def use(self, name: str, job: Job[Any]) -> Generator[LanguageModel]:
        """The model, for this job alone until the block ends; every pass through it first asks whether to stop.

        Raises:
            UnknownNameError: the page offers no such model. BusyError, StoppedError: see `Turns`.
        """
        chosen = name or self.names[0]
        if chosen not in self._sources:  # the only models that a visitor can make the server load
            raise UnknownNameError("model", chosen, self.names, "Only models that the server offers can be used.")
        with self._turns[chosen].turn(job):
            if chosen not in self._loaded:
                job.step(f"Loading {chosen}")
                self._loaded[chosen] = self._sources[chosen]()
            lm = self._loaded[chosen]
            hook = lm.model.register_forward_pre_hook(_asking(job))
            try:
                yield lm
            finally:
                hook.remove()


def _asking(job: Job[Any]) -> Callable[[Any, Any], None]:
    def hook(_module: Any, _arguments: Any) -> None:
        job.check()

    return hook


def offered(names: Iterable[str], load: Callable[[str], LanguageModel]) -> dict[str, Source]:
    """The named models, then the built-in ones whose weights are installed."""
    installed = [model.name for model in BUILT_IN.values() if model.folder() is not None]

    def source(name: str) -> Source:
        return lambda: load(name)

    return {name: source(name) for name in dict.fromkeys([*names, *installed])}
