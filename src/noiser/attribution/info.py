"""The form of `info` in a saved attribution, as far as displays and questions read it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, Field, ValidationError

from noiser.attribution.store import with_nan

_InfoNumber = Annotated[float, BeforeValidator(lambda value: math.nan if value is None else value)]
"""A number; null stands for NaN."""

_Natural = Annotated[int, Field(ge=0, lt=2**31)]
_Pixels = Annotated[int, Field(gt=0, lt=2**31)]


class _Check(BaseModel, extra="allow"):
    """What `noiser.explain.check` found."""

    units: str
    fewest_units: _Natural
    mean: Annotated[list[_InfoNumber], Field(min_length=3, max_length=3)]
    masks: _Natural
    targets: _Natural
    p: _InfoNumber
    predicts: bool
    lds: list[_InfoNumber]
    low: list[_InfoNumber]
    high: list[_InfoNumber]


class _Aggregated(BaseModel, extra="allow"):
    """What an attribution over coarser units was made of."""

    from_: str = Field(alias="from")
    reduce: str


class _Source(BaseModel, extra="allow"):
    """A document in the prompt."""

    title: str
    start: _Natural
    end: _Natural


class _Picture(BaseModel, extra="allow"):
    """A picture of the prompt, with what is shown of it."""

    size: Annotated[list[_Pixels], Field(min_length=2, max_length=2)]
    place: _Natural
    data: Annotated[str, Field(pattern=r"^data:image/(png|jpeg);base64,[A-Za-z0-9+/]+=*$")]


class _Images(BaseModel, extra="allow"):
    """The pictures of the prompt; for each unit [picture, left, top, right, bottom], or null."""

    removal: str
    pictures: list[_Picture]
    boxes: list[Annotated[list[_Natural], Field(min_length=5, max_length=5)] | None]


class _Info(BaseModel, extra="allow"):
    """The keys that are read; a method's other results are kept as they are."""

    check: _Check | None = None
    aggregated: _Aggregated | None = None
    first_token: str | None = None
    unfinished: _Natural | None = None
    max_seconds: Annotated[float, Field(ge=0, lt=1e9)] | None = None
    of: str | None = None
    score_units: list[str] | None = None
    fell_back: str | None = None
    images: _Images | None = None
    sources: list[_Source] | None = None
    special_tokens: list[_Natural] = []
    unasked: list[_Natural] = []
    through: list[list[_InfoNumber]] = []
    near_tie: list[bool] = []
    saturated: list[bool] = []
    token_forwards: _Natural | None = None
    passes: _Natural | None = None


def checked_info(info: Mapping[str, Any]) -> dict[str, Any]:
    """The `info` of a file, with NaN where its lists have null.

    Raises ValueError where a key that is read has another form.
    """
    try:
        _Info.model_validate(info, strict=True)
    except ValidationError as error:
        fault = error.errors(include_url=False)[0]
        key = ".".join(map(str, fault["loc"]))
        raise ValueError(f"{key}: {fault['msg']}") from None
    found = with_nan(dict(info))
    if info.get("images"):
        found["images"] = info["images"]  # where null is no box
    if found.get("check"):
        # null is NaN in lists and here; elsewhere in `info` it is None.
        p = found["check"]["p"]
        found["check"]["p"] = math.nan if p is None else p
    return found
