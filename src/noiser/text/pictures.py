"""Pictures in chat messages: read, checked, cut into regions, and painted over.

Pillow is imported where a picture is read, so that a prompt of text never needs it.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import io
import os
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, NamedTuple

from noiser.errors import DependencyError, ParameterError, PromptError, UnitError

MARK = "\ufffc"
"""The character that stands for a picture in the text of a prompt."""

MOST_PICTURES = 16
MOST_REGIONS = 400
_MOST_BYTES = 20_000_000
_MOST_PIXELS = 64_000_000
_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
_KEYS = ("image", "path", "base64", "url", "image_url")
_KINDS = ("image", "image_url")

REMOVALS_OF_REGIONS = ("grey", "blur", "rows")

_REFUSED = (
    "has a picture: pictures are explained by noiser.attribute, with methods that remove units, "
    "such as 'joint' or 'occlusion', noiser.rule and noiser.Game."
)


class Region(NamedTuple):
    """A part of a picture: the picture's index, and (left, top, right, bottom) in its pixels."""

    picture: int
    box: tuple[int, int, int, int]


@dataclass(frozen=True, kw_only=True, eq=False)
class Pictures:
    """The pictures of a chat, and where they stand in it.

    Attributes:
        images: of Pillow, RGB and upright, in the order of the chat.
        rendered: the chat as the processor reads it, with a placeholder for each picture.
        places: the character of the shown text that stands for each picture.
        tokens: the positions of the tokens that the processor writes for each picture.
    """

    images: tuple[Any, ...]
    rendered: str
    places: tuple[int, ...]
    tokens: tuple[tuple[int, ...], ...]

    @property
    def all_tokens(self) -> frozenset[int]:
        """The positions of all tokens that stand for pictures."""
        return frozenset(token for tokens in self.tokens for token in tokens)


# ---- messages with pictures ---------------------------------------------------------------------


def is_picture(part: object) -> bool:
    """Whether a part of a message's content is a picture."""
    return isinstance(part, Mapping) and part.get("type") in _KINDS


def count_pictures(message: Mapping[str, Any]) -> int:
    """How many pictures a message has."""
    content: Any = message.get("content")
    return sum(map(is_picture, content)) if isinstance(content, list | tuple) else 0


def has_pictures(prompt: Any) -> bool:
    """Whether a prompt is a chat with a picture in it."""
    if isinstance(prompt, Mapping):
        prompt = prompt.get("messages")
    if isinstance(prompt, str) or not isinstance(prompt, Sequence):
        return False
    contents = [message.get("content") for message in prompt if isinstance(message, Mapping)]
    lists = [content for content in contents if isinstance(content, list | tuple)]
    return any(is_picture(part) for content in lists for part in content)


def check_data_urls(messages: Iterable[Any]) -> None:
    """Raises PromptError for a picture that is no data URL: a server opens no file or address."""
    for index, message in enumerate(messages):
        content: Any = message.get("content") if isinstance(message, Mapping) else None
        for part in filter(is_picture, content if isinstance(content, list | tuple) else ()):
            given = [part[name] for name in _KEYS if name in part]
            urls = [value.get("url") if isinstance(value, Mapping) else value for value in given]
            if not urls or not all(str(url).startswith("data:image/") for url in urls):
                raise PromptError(
                    f"The picture of message {index} is not a data URL; a server opens no file or "
                    "address. Send data:image/png;base64,..."
                )


def refuse_picture(where: str) -> PromptError:
    """The error of everything that reads text alone."""
    return PromptError(f"{where} {_REFUSED}")


def without_data(messages: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The messages with {"type": "image"} alone in place of each picture."""
    plain_messages: list[dict[str, Any]] = []
    for message in messages:
        content: Any = message.get("content")
        if isinstance(content, list | tuple):
            content = [{"type": "image"} if is_picture(part) else part for part in content]
            message = {**message, "content": content}
        plain_messages.append(dict(message))
    return plain_messages


def with_pictures(messages: Iterable[Mapping[str, Any]], images: Iterable[Any]) -> list[Any]:
    """The messages with other pictures, in order."""
    left = iter(images)
    found: list[dict[str, Any]] = []
    for message in messages:
        content: Any = message.get("content")
        if isinstance(content, list | tuple):
            content = [
                {"type": "image", "image": next(left)} if is_picture(part) else part
                for part in content
            ]
            message = {**message, "content": content}
        found.append(dict(message))
    return found


def add_pictures(
    messages: Iterable[Mapping[str, Any]], parts: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """The chat with pictures before the text of the user's last message.

    Raises PromptError where the user says nothing.
    """
    added = [dict(message) for message in messages]
    users = [index for index, message in enumerate(added) if message.get("role") == "user"]
    if not users:
        raise PromptError(
            "The chat has no message of the user's to put pictures in; expected one at least."
        )
    content: Any = added[users[-1]].get("content") or []
    own = content if isinstance(content, list) else [{"type": "text", "text": content}]
    added[users[-1]]["content"] = [*parts, *own]
    return added


def read_pictures(messages: Iterable[Mapping[str, Any]]) -> tuple[Any, ...]:
    """The pictures of a chat, in order.

    Raises:
        PromptError: too many of them, or one that cannot be read.
        DependencyError: Pillow is not installed.
    """
    parts: list[tuple[int, Mapping[str, Any]]] = []
    for index, message in enumerate(messages):
        content: Any = message.get("content")
        if isinstance(content, list | tuple):
            parts += [(index, part) for part in content if is_picture(part)]
    if len(parts) > MOST_PICTURES:
        raise PromptError(
            f"The chat has {len(parts)} pictures; expected at most {MOST_PICTURES}. Leave some out."
        )
    images: list[Any] = []
    for number, (index, part) in enumerate(parts, 1):
        images.append(read_picture(part, f"Picture {number}, of message {index},"))
    return tuple(images)


def read_picture(part: Mapping[str, Any], subject: str) -> Any:
    """The picture of a part: of Pillow, RGB, upright, on white where it is transparent.

    Its value, under "image", "path", "base64", "url" or "image_url", is an image of Pillow, a
    path, bytes, or a data URL. No address is opened. `subject` begins the sentence of an error.
    """
    image = pillow().Image
    given = [part[name] for name in _KEYS if part.get(name) is not None]
    value: Any = given[0] if given else None
    if isinstance(value, Mapping):
        value = value.get("url")
    if isinstance(value, str) and "base64" in part and not value.startswith("data:"):
        value = _decoded(value, subject)
    elif isinstance(value, str):
        value = _bytes_of_text(value, subject)
    elif isinstance(value, os.PathLike):
        value = _bytes_of_file(value, subject)
    if isinstance(value, bytes | bytearray):
        value = _opened(bytes(value), subject)
    if not isinstance(value, image.Image):
        raise PromptError(
            f"{subject} has no picture; expected 'image' with an image of Pillow, a path, bytes or "
            "a data URL."
        )
    _check_pixels(value, subject)
    return _upright(value)


def pillow() -> Any:
    """The modules of Pillow that are needed here."""
    try:
        from PIL import Image, ImageFilter, ImageOps
    except ImportError as error:
        raise DependencyError(
            'Pictures need Pillow. Install it with: pip install "noiser[images]"'
        ) from error
    return SimpleNamespace(Image=Image, ImageFilter=ImageFilter, ImageOps=ImageOps)


def _bytes_of_text(value: str, subject: str) -> bytes:
    """The bytes of a data URL, or of the file of that path."""
    if value.startswith("data:"):
        head, _, body = value.partition(",")
        if not head.endswith(";base64"):
            raise PromptError(
                f"{subject} has a data URL without base64; expected data:image/png;base64,..."
            )
        return _decoded(body, subject)
    if "://" in value[:32]:
        raise PromptError(
            f"{subject} is at {value[:60]!r}, which is not fetched; give a file or a data URL."
        )
    return _bytes_of_file(value, subject)


def _decoded(body: str, subject: str) -> bytes:
    """The bytes that base64 stands for."""
    if len(body) > _MOST_BYTES * 4 // 3 + 4:
        raise _too_large(len(body) * 3 // 4, subject)
    try:
        return base64.b64decode(body, validate=True)
    except (binascii.Error, ValueError) as error:
        raise PromptError(f"{subject} is not valid base64: {error}. Encode it again.") from error


def _bytes_of_file(path: str | os.PathLike[str], subject: str) -> bytes:
    """The content of a file of at most 20 MB."""
    try:
        with open(path, "rb") as file:  # noqa: PTH123 - Path's own raises for names that are too long
            content = file.read(_MOST_BYTES + 1)
    except (OSError, ValueError) as error:
        raise PromptError(
            f"{subject} is the file {os.fspath(path)[:200]!r}, which cannot be read: {error}."
        ) from error
    return content


def _opened(content: bytes, subject: str) -> Any:
    """The image of a file's content, which is decoded only if it is not too large."""
    image = pillow().Image
    if len(content) > _MOST_BYTES:
        raise _too_large(len(content), subject)
    try:
        with warnings.catch_warnings():
            # Pillow warns of pictures that are refused here.
            warnings.simplefilter("ignore", image.DecompressionBombWarning)
            opened = image.open(io.BytesIO(content), formats=_FORMATS)
        _check_pixels(opened, subject)
        opened.load()
    except PromptError:
        raise
    except Exception as error:  # decoders raise what their authors chose
        raise PromptError(
            f"{subject} cannot be read: {error}. Expected one of {', '.join(_FORMATS)}."
        ) from error
    return opened


def _too_large(size: int, subject: str) -> PromptError:
    return PromptError(
        f"{subject} has {size:,} bytes; expected at most {_MOST_BYTES:,}. Make it smaller."
    )


def _check_pixels(value: Any, subject: str) -> None:
    """Raises PromptError for a picture of too many pixels, or of none."""
    pixels = value.width * value.height
    if not 0 < pixels <= _MOST_PIXELS:
        raise PromptError(
            f"{subject} has {value.width} × {value.height} pixels; expected 1 to "
            f"{_MOST_PIXELS:,} in all. Make it smaller."
        )


def _upright(value: Any) -> Any:
    """The picture in RGB, turned as its EXIF says."""
    turned = pillow().ImageOps.exif_transpose(value)
    if turned.mode in ("RGBA", "LA", "PA") or "transparency" in turned.info:
        colours = turned.convert("RGBA")
        # Pillow's own conversion shows the colours that are hidden by full transparency.
        white = pillow().Image.new("RGBA", colours.size, "white")
        turned = pillow().Image.alpha_composite(white, colours)
    return turned.convert("RGB")


# ---- regions ------------------------------------------------------------------------------------


def cut_pictures(pictures: Pictures, unit: Any) -> list[tuple[str, Region]]:
    """The name and the region of each unit of the pictures, in their order.

    Raises:
        UnitError: a box without a pixel, or outside of its picture; more than 400 regions.
        ParameterError: boxes for a picture that is not there, or for none of several.
    """
    found: list[tuple[str, Region]] = []
    count = len(pictures.images)
    if isinstance(unit, list):
        if count > 1:
            raise ParameterError(
                f"image_unit has boxes, and there are {count} pictures; expected {{picture: "
                "boxes}, such as {0: [(0, 0, 100, 50)]}."
            )
        unit = {0: unit}
    if isinstance(unit, Mapping):
        beyond = [index for index in unit if not 0 <= index < count]
        if beyond:
            raise ParameterError(
                f"image_unit has boxes for picture {beyond[0]}; expected 0 to {count - 1}."
            )
    if isinstance(unit, tuple) and unit[0] * unit[1] * count > MOST_REGIONS:
        raise _too_many(unit[0] * unit[1] * count)
    for index, image in enumerate(pictures.images):
        name = f"image {index + 1}" if count > 1 else "image"
        if unit == "image" or unit == (1, 1):
            found.append((name, Region(index, (0, 0, image.width, image.height))))
        elif isinstance(unit, tuple):
            for (row, column), box in _grid(image, *unit).items():
                region_name = f"{name} row {row + 1} column {column + 1}"
                found.append((region_name, _checked_region(image, index, box, region_name)))
        elif isinstance(unit, Mapping):
            for number, box in enumerate(unit.get(index, ()), 1):
                region_name = f"{name} box {number}"
                found.append((region_name, _checked_region(image, index, box, region_name)))
    if len(found) > MOST_REGIONS:
        raise _too_many(len(found))
    return found


def _too_many(count: int) -> UnitError:
    return UnitError(
        f"image_unit cuts {count} regions; expected at most {MOST_REGIONS} in all. Take fewer rows "
        "and columns."
    )


def _grid(image: Any, rows: int, columns: int) -> dict[tuple[int, int], tuple[int, ...]]:
    """The box of each row and column, by row."""
    across = [round(image.width * number / columns) for number in range(columns + 1)]
    down = [round(image.height * number / rows) for number in range(rows + 1)]
    boxes: dict[tuple[int, int], tuple[int, ...]] = {}
    for row, (top, bottom) in enumerate(pairwise(down)):
        for column, (left, right) in enumerate(pairwise(across)):
            boxes[row, column] = (left, top, right, bottom)
    return boxes


def region_of(images: Sequence[Any], picture: int, box: Sequence[int]) -> Region:
    """A box of one of the pictures.

    Raises UnitError for a box without a pixel, or outside of its picture; ParameterError for a
    picture that is not there.
    """
    if not 0 <= picture < len(images):
        raise ParameterError(
            f"There is a box of picture {picture}; expected 0 to {len(images) - 1}."
        )
    return _checked_region(images[picture], picture, box, f"A box of picture {picture}")


def _checked_region(image: Any, index: int, box: Sequence[float], name: str) -> Region:
    """The region of a box in whole pixels."""
    left, top, right, bottom = (round(number) for number in box)
    is_inside = 0 <= left < right <= image.width and 0 <= top < bottom <= image.height
    if not is_inside:
        raise UnitError(
            f"{name}, {tuple(box)}, has no pixel or leaves the picture; expected left, top, right "
            f"and bottom within {image.width} × {image.height} pixels."
        )
    return Region(index, (left, top, right, bottom))


# ---- other pixels -------------------------------------------------------------------------------


def grey_of(processor: Any) -> tuple[int, int, int]:
    """The colour that a processor maps to 0."""
    mean = getattr(processor.image_processor, "image_mean", None) or [0.5] * 3
    red, green, blue = (round(255 * value) for value in mean)
    return red, green, blue


def painted(
    images: Sequence[Any], regions: Iterable[Region], how: str, grey: tuple[int, int, int]
) -> list[Any]:
    """Copies of pictures in which some regions are grey or blurred."""
    changed = list(images)
    for index, box in regions:
        if changed[index] is images[index]:
            changed[index] = images[index].copy()
        if how == "blur":
            # A region is blurred as a part of the whole picture, so that its edge does not show.
            blurred = blur(images[index])
            changed[index].paste(blurred.crop(box), box)
        else:
            changed[index].paste(grey, box)
    return changed


def blur(image: Any) -> Any:
    """The picture, blurred by a tenth of its longer side; colours stay."""
    radius = max(image.size) / 10
    return image.filter(pillow().ImageFilter.GaussianBlur(radius))


def opposite(image: Any) -> Any:
    """A picture whose colours are far from those of `image` wherever one looks: 0 or 255."""
    radius = max(1, max(image.size) / 50)
    smooth = image.filter(pillow().ImageFilter.BoxBlur(radius))
    opposite_of_value = [255] * 128 + [0] * 128
    return smooth.point(opposite_of_value * 3)  # one table for each channel


def preview(image: Any, most: int = 640) -> str:
    """The picture with at most so many pixels a side, as a data URL."""
    small = image.copy()
    small.thumbnail((most, most))
    form = "PNG" if small.width * small.height <= 40_000 else "JPEG"
    content = io.BytesIO()
    small.save(content, form, quality=85)
    encoded = base64.b64encode(content.getvalue()).decode()
    return f"data:image/{form.lower()};base64,{encoded}"


def sha256_of_pixels(image: Any) -> str:
    """The sha256 of the size and of the RGB pixels."""
    size = f"{image.width}x{image.height}:".encode()
    return hashlib.sha256(size + image.tobytes()).hexdigest()
