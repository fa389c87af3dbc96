"""Regions of pictures among the units of an attribution."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    from noiser.attribution.record import AttributionRecord

Box = tuple[float, float, float, float]


class ShownRegion(NamedTuple):
    """A region of a picture with its score for one target.

    Attributes:
        column: of the unit.
        picture: the picture's index.
        box: left, top, right and bottom, in shares of the picture's width and height.
        score: the unit's.
        weight: the score divided by the largest magnitude of the row, of text and pictures; None
            without a signal.
    """

    column: int
    picture: int
    box: Box
    score: float
    weight: float | None


class HasInfo(Protocol):
    """What has further facts by name, such as those of pictures."""

    @property
    def info(self) -> Mapping[str, Any]:
        """The facts."""
        ...


def pictures_of(att: HasInfo) -> Sequence[Mapping[str, Any]]:
    """The pictures of the prompt as they are saved."""
    images = att.info.get("images")
    return images["pictures"] if images else ()


def region_columns(att: AttributionRecord) -> dict[int, tuple[int, Box]]:
    """From the column of each region to its picture and box; regions are units without a place of
    their own in the text.
    """
    images: Any = att.info.get("images")
    found: dict[int, tuple[int, Box]] = {}
    if not images:
        return found
    for column, box in enumerate(images["boxes"]):
        if box is not None:
            picture, left, top, right, bottom = box
            width, height = images["pictures"][picture]["size"]
            shares = (left / width, top / height, right / width, bottom / height)
            found[column] = (picture, shares)
    return found


def with_columns(info: Mapping[str, Any], columns: Sequence[Sequence[int]]) -> dict[str, Any]:
    """The `info` of an attribution whose units are other ones, each made of some columns."""
    images = info.get("images")
    if not images:
        return dict(info)
    boxes: list[Any] = []
    for columns_of_unit in columns:
        is_one = len(columns_of_unit) == 1
        boxes.append(images["boxes"][columns_of_unit[0]] if is_one else None)
    return {**info, "images": {**images, "boxes": boxes}}


def picture_name(att: AttributionRecord, number: int) -> str:
    """What stands for a picture in the text that is shown."""
    return f"[image {number + 1}]" if len(pictures_of(att)) > 1 else "[image]"


def grid_of(regions: Sequence[ShownRegion]) -> list[list[ShownRegion]]:
    """The rows of regions that make up a grid; nothing where they do not."""
    rows: dict[tuple[float, float], list[ShownRegion]] = {}
    for region in regions:
        rows.setdefault((region.box[1], region.box[3]), []).append(region)
    lines: list[list[ShownRegion]] = []
    columns: list[list[tuple[float, float]]] = []
    for _, row in sorted(rows.items()):
        line = sorted(row, key=lambda region: region.box[0])
        lines.append(line)
        columns.append([(region.box[0], region.box[2]) for region in line])
    has_columns = all(columns_of_line == columns[0] for columns_of_line in columns)
    return lines if has_columns else []


def has_score(region: ShownRegion) -> bool:
    """Whether a region has a score for the target."""
    return not math.isnan(region.score)
