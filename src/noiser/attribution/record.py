"""The fields of an attribution: what its displays, files and sums are made of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

from jaxtyping import Float
from pydantic import AfterValidator
from torch import Tensor

from noiser.attribution import store
from noiser.attribution.info import checked_info
from noiser.errors import ParameterError, StoredFileError
from noiser.registry import renamed
from noiser.types import Message, ModelIdentity, Pair, Place, Span, Target, TorchSeed, Without


def _checked_parameters(parameters: Mapping[str, Any]) -> Mapping[str, Any]:
    """The hyper-parameters of a file; "objective" is looked up by displays."""
    if not isinstance(parameters.get("objective"), str | None):
        raise ValueError(f"objective is {parameters['objective']!r:.80}; expected a text")
    return parameters


@dataclass(frozen=True, kw_only=True, eq=False)
class AttributionRecord:
    """The fields of an `Attribution`, which describes them."""

    method: Annotated[str, AfterValidator(renamed)]
    parameters: Annotated[Mapping[str, Any], AfterValidator(_checked_parameters)]
    seed: TorchSeed
    model: ModelIdentity
    versions: Mapping[str, str]
    prompt: str | tuple[Message, ...]
    text: str
    prompt_length: Place
    unit: str
    units: tuple[Span, ...]
    target_unit: str = "token"
    targets: tuple[Target, ...]
    foil: Target | None = None
    scores: Annotated[Float[Tensor, "targets units"], store.ROWS]
    stderr: Annotated[Float[Tensor, "targets units"], store.ROWS] | None = None
    thresholds: Annotated[Float[Tensor, "targets units"], store.ROWS] | None = None
    k_min: Annotated[Float[Tensor, " targets"], store.ROW] | None = None
    pairs: tuple[Pair, ...] = ()
    without: tuple[tuple[Without | None, ...], ...] | None = None
    info: Annotated[Mapping[str, Any], AfterValidator(checked_info)]

    def __post_init__(self) -> None:
        shape = (len(self.targets), len(self.units))
        there = f"{shape[0]} targets and {shape[1]} units"
        for name, expected in (
            ("scores", shape),
            ("thresholds", shape),
            ("stderr", shape),
            ("k_min", shape[:1]),
        ):
            values: Tensor | None = getattr(self, name)
            if values is not None and values.shape != expected:
                raise ParameterError(
                    f"{name} has shape {[*values.shape]}; expected {[*expected]} for {there}."
                )
        if self.without is not None:
            lengths = [len(row) for row in self.without]
            if lengths != [shape[1]] * shape[0]:
                raise ParameterError(
                    f"without has rows of {lengths}; expected {[*shape]} for {there}."
                )
        for pair in self.pairs:
            if not (
                0 <= pair.target < shape[0] and all(0 <= unit < shape[1] for unit in pair.units)
            ):
                raise ParameterError(f"{pair} is of no target or unit; there are {there}.")
            if pair.units[0] == pair.units[1]:
                raise ParameterError(f"{pair} is of one unit; expected two.")


def checked_places(att: AttributionRecord) -> None:
    """Raises StoredFileError where a part of a loaded attribution lies outside of its text."""
    length = len(att.text)
    if not att.targets:
        raise StoredFileError("targets is empty; expected at least one. The file is damaged.")
    if att.prompt_length > length:
        raise StoredFileError(
            f"prompt_length is {att.prompt_length}, and text has {length} characters. The file is "
            "damaged."
        )
    places: list[tuple[str, int, int]] = []
    for index, unit in enumerate(att.units):
        places.append((f"units.{index}", unit.start, unit.end))
        indices = unit.token_indices
        if not indices or list(indices) != sorted(set(indices)):
            raise StoredFileError(
                f"units.{index}.token_indices is {indices!r:.80}; expected ascending positions, at "
                "least one. The file is damaged."
            )
    for index, source in enumerate(att.info.get("sources") or ()):
        places.append((f"info.sources.{index}", source["start"], source["end"]))
    for name, start, end in places:
        if not start <= end <= length:
            raise StoredFileError(
                f"{name} is {start} to {end}; expected a part of the text of {length} characters. "
                "The file is damaged."
            )
    _check_images(att)
    score_units = att.info.get("score_units")
    if score_units and len(score_units) != len(att.targets):
        raise StoredFileError(
            f"info.score_units has {len(score_units)} units; expected one for each of "
            f"{len(att.targets)} targets. The file is damaged."
        )
    through = att.info.get("through")
    if through and {len(att.targets)} != {len(through), *map(len, through)}:
        raise StoredFileError(
            f"info.through is not a table of {len(att.targets)} by {len(att.targets)} targets. "
            "The file is damaged."
        )


def _check_images(att: AttributionRecord) -> None:
    """Raises StoredFileError where a region is of no unit, or outside of its picture."""
    images = att.info.get("images")
    if not images:
        return
    if len(images["boxes"]) != len(att.units):
        raise StoredFileError(
            f"info.images.boxes has {len(images['boxes'])} entries; expected one for each of "
            f"{len(att.units)} units. The file is damaged."
        )
    for index, box in enumerate(images["boxes"]):
        if box is None:
            continue
        picture, left, top, right, bottom = box
        sizes = [each["size"] for each in images["pictures"]]
        width, height = sizes[picture] if picture < len(sizes) else (0, 0)
        if not (left < right <= width and top < bottom <= height):
            raise StoredFileError(
                f"info.images.boxes.{index} is {box}; expected a part of a picture. The file is "
                "damaged."
            )


AnyRecord = TypeVar("AnyRecord", bound=AttributionRecord)
