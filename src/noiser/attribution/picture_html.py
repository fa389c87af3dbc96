"""Pictures with the scores of their regions, as HTML."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape
from typing import TYPE_CHECKING

from noiser.attribution.amounts import amounts_of
from noiser.attribution.regions import ShownRegion, has_score, picture_name, pictures_of

if TYPE_CHECKING:
    from noiser.attribution.record import AttributionRecord


def figures(
    att: AttributionRecord,
    row: int,
    regions: Sequence[ShownRegion],
    title_of: Callable[[int], str],
    *,
    with_plain: bool = True,
) -> str:
    """Each picture, with the colours of its regions over it and their scores in them, and a small
    copy without colours beside it.

    `title_of` gives what shows where the pointer rests on a unit. `with_plain` is for the small
    copies, of which several methods side by side need one.
    """
    shown = ""
    for number, picture in enumerate(pictures_of(att)):
        own = [region for region in regions if region.picture == number and has_score(region)]
        spots = "".join(_spot(att, row, region, title_of(region.column)) for region in own)
        width, height = picture["size"]
        name = picture_name(att, number)
        alternative = f"{name} of the prompt, {len(own)} regions"
        source = f'<img src="{picture["data"]}" width={width} height={height}'
        image = f'{source} alt="{alternative}">'
        plain = f'{source} class=plain alt="" title="as it was asked">' if with_plain else ""
        caption = f"<figcaption>{name}</figcaption>" if len(pictures_of(att)) > 1 else ""
        shown += f"<figure><div class=pic>{image}{spots}</div>{plain}{caption}</figure>"
    return f"<div class=pics>{shown}</div>" if shown else ""


def _spot(att: AttributionRecord, row: int, region: ShownRegion, title: str) -> str:
    """A region's colour and score at its place."""
    left, top, right, bottom = (100 * share for share in region.box)
    sign = "g"
    strength = 0.0
    if region.weight is not None:
        sign = "n" if region.weight < 0 else "p"
        strength = abs(region.weight)
    place = (
        f"left:{left:.2f}%;top:{top:.2f}%;width:{right - left:.2f}%;height:{bottom - top:.2f}%;"
        f"--a:{strength:.3f}"
    )
    score = escape(amounts_of(att, row)(region.score))
    return (
        f'<span class="spot {sign}" style="{place}" tabindex=0 title="{escape(title)}" '
        f"data-unit={region.column}><b>{score}</b></span>"
    )
