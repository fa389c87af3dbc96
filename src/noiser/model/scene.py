"""Pictures as the text model reads them, and the tokens of each region of them.

No family is known by name. One call of the whole model, stopped at the door of its text model,
tells everything: the embeddings with the features of pictures in place, positions (also of several
axes), blocks of tokens that see each other, and features that early layers add (DeepStack).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from inspect import signature
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from noiser.errors import UnitError, UnsupportedModelError
from noiser.model.abilities import logits_agree
from noiser.model.attention import set_attention
from noiser.model.layout import Layout
from noiser.model.packing import Branch, Context
from noiser.model.runtime import add_hook, put, running
from noiser.text.pictures import Pictures, Region, cut_pictures, grey_of, opposite, painted
from noiser.types import Span

AT_ONCE = 8
"""The most pictures that the vision tower reads at once."""

_LEAST_CHANGE = 1e-4
"""A token that changes by a smaller share of the largest change belongs to no region."""


@dataclass(frozen=True, eq=False)
class Handed:
    """What the text model gets for a chat: embeddings, and how they stand."""

    inputs: Float[Tensor, "length dim"]
    layout: Layout


class Scene:
    """The pictures of a prompt, and what the model makes of them.

    Attributes:
        pictures: as they stand in the chat.
        clean: what the text model gets for them.
        runs: how many times the vision tower has read all pictures of the chat.
    """

    def __init__(self, lm: Any, pictures: Pictures, token_ids: Sequence[int]) -> None:
        self._lm = lm
        self.pictures = pictures
        self._ids = torch.tensor([[*token_ids]])
        self.runs = 0
        find_door(lm.model)
        (self.clean,) = self._hand([pictures.images])

    @cached_property
    def tokens(self) -> tuple[tuple[int, ...], ...]:
        """For each picture the positions of the tokens that hold its features."""
        is_picture = self.clean.layout.is_picture
        return tuple(
            tuple(token for token in tokens if is_picture[token]) for tokens in self.pictures.tokens
        )

    @property
    def grey(self) -> tuple[int, int, int]:
        """The colour that the processor maps to 0."""
        return grey_of(self._lm.processor)

    def without(self, removed: Sequence[frozenset[Region]], how: str) -> list[Handed]:
        """What the text model gets without each group of regions, whose pixels are changed."""
        return self.hand([self.painted(regions, how) for regions in removed])

    def painted(self, regions: Iterable[Region], how: str) -> list[Any]:
        """The pictures with other pixels in some regions."""
        return painted(self.pictures.images, regions, how, self.grey)

    def hand(self, chats: Sequence[Sequence[Any]], *, alone: bool = False) -> list[Handed]:
        """What the text model gets for other pictures, each as large as the chat's own.

        With `alone` no patch of a picture sees another.
        """
        size = max(1, AT_ONCE // len(self.pictures.images))
        handed: list[Handed] = []
        for first in range(0, len(chats), size):
            handed += self._hand(chats[first : first + size], alone=alone)
        return handed

    @cached_property
    def _patches_alone(self) -> Handed:
        """The pictures as they are, where no patch sees another."""
        (handed,) = self.hand([self.pictures.images], alone=True)
        return handed

    def units(self, image_unit: Any) -> dict[Span, Region]:
        """The units of the pictures, with their regions.

        Raises UnitError for a region that holds no token of the model.
        """
        cut = cut_pictures(self.pictures, image_unit)
        units: dict[Span, Region] = {}
        for number, tokens in enumerate(self.tokens):
            own = [(name, region) for name, region in cut if region.picture == number]
            owned = self._owned(number, [region for _, region in own])
            place = self.pictures.places[number]
            for (name, region), indices in zip(own, owned, strict=True):
                if not indices:
                    raise UnitError(
                        f"{name} holds no token: the picture has {len(tokens)} tokens, or its "
                        "preprocessing crops it; take a coarser grid."
                    )
                units[Span(name, place, place + 1, indices)] = region
        return units

    def processed(self, chats: Sequence[Sequence[Any]]) -> dict[str, Any]:
        """The model's arguments for other pictures in the chat, without an attention mask.

        Raises UnsupportedModelError where the processor cuts other pixels into other tokens.
        """
        processor = self._lm.processor
        out = processor(
            text=[self.pictures.rendered] * len(chats),
            images=[list(images) for images in chats],
            return_tensors="pt",
            add_special_tokens=False,
        )
        if not torch.equal(out["input_ids"], self._ids.expand(len(chats), -1)):
            raise UnsupportedModelError(
                f"{type(processor).__name__} writes other tokens when pixels of a picture change, "
                "so its regions cannot be compared. Take another model."
            )
        arguments: dict[str, Any] = {}
        for name, value in out.items():
            if name not in ("attention_mask", "labels"):
                arguments[name] = value.to(self._lm.device) if hasattr(value, "to") else value
        return arguments

    def _hand(self, chats: Sequence[Sequence[Any]], *, alone: bool = False) -> list[Handed]:
        """As `hand`, in one call of the model."""
        arguments = self.processed(chats)
        given = _stopped_at_door(self._lm.model, arguments, alone=alone)
        self.runs += len(chats)
        embeddings: Tensor = given["inputs_embeds"].detach()
        table = self._lm.embed(self._ids)[0]
        of_pictures = torch.zeros(embeddings.shape[1], dtype=torch.bool)
        of_pictures[sorted(self.pictures.all_tokens)] = True
        handed: list[Handed] = []
        for number, inputs in enumerate(embeddings):
            if alone:
                handed.append(Handed(inputs, Layout(of_pictures)))
                continue
            # A token of a picture's text, such as one that ends a row, keeps its own embedding.
            differs = (inputs != table.to(inputs)).any(-1).cpu()
            layout = _layout_of(given, number, differs & of_pictures)
            handed.append(Handed(inputs, layout))
        return handed

    def _owned(self, picture: int, regions: Sequence[Region]) -> list[tuple[int, ...]]:
        """The tokens of a picture that belong to each of its regions.

        A region is painted over, and the tower runs with every patch attending to itself alone. A
        token belongs to the region that changes it most. The regions of a grid are found by its
        rows and columns.
        """
        tokens = list(self.tokens[picture])
        boxes = [region.box for region in regions]
        image = self.pictures.images[picture]
        if boxes == [(0, 0, image.width, image.height)]:
            return [tuple(tokens)]
        if not boxes:
            return []
        rows = sorted({(top, bottom) for _, top, _, bottom in boxes})
        columns = sorted({(left, right) for left, _, right, _ in boxes})
        is_grid = len(rows) * len(columns) == len({*boxes})
        if not is_grid:
            owner = self._most_changed(picture, boxes)
            return [_at(tokens, owner, number) for number in range(len(boxes))]
        row_of = self._most_changed(picture, [(0, top, image.width, low) for top, low in rows])
        column_of = self._most_changed(
            picture, [(left, 0, right, image.height) for left, right in columns]
        )
        owned: list[tuple[int, ...]] = []
        for left, top, right, bottom in boxes:
            in_row = row_of == rows.index((top, bottom))
            in_column = column_of == columns.index((left, right))
            owned.append(_at(tokens, (in_row & in_column).long(), 1))
        return owned

    def _most_changed(
        self, picture: int, boxes: Sequence[tuple[int, int, int, int]]
    ) -> Int[Tensor, " tokens"]:
        """For each token of a picture the box whose pixels change it most; -1 for none."""
        tokens = list(self.tokens[picture])
        other = opposite(self.pictures.images[picture])
        chats: list[list[Any]] = []
        for box in boxes:
            images = list(self.pictures.images)
            images[picture] = images[picture].copy()
            images[picture].paste(other.crop(box), box)
            chats.append(images)
        clean = self._patches_alone.inputs[tokens].float()
        changed = [handed.inputs[tokens].float() for handed in self.hand(chats, alone=True)]
        changes = torch.stack([(each - clean).norm(dim=-1) for each in changed])
        largest, owner = changes.max(0)
        owner[largest <= _LEAST_CHANGE * largest.max()] = -1
        return owner.cpu()


def _at(tokens: Sequence[int], numbers: Tensor, wanted: int) -> tuple[int, ...]:
    """The tokens whose number is the wanted one."""
    return tuple(
        token for token, number in zip(tokens, numbers.tolist(), strict=True) if number == wanted
    )


def check_packed(lm: Any, scene: Scene) -> None:
    """Raises UnsupportedModelError unless a packed pass gives the logits of the model itself.

    The pass goes on after the pictures' keys and values, with two more tokens of text.
    """
    arguments = scene.processed([scene.pictures.images])
    ids: Tensor = arguments["input_ids"]
    length = ids.shape[1]
    more = ids[:, -2:]
    for name, value in arguments.items():
        if isinstance(value, Tensor) and value.shape == (1, length):
            added = more if name == "input_ids" else torch.zeros_like(more)
            arguments[name] = torch.cat([value, added.to(value)], 1)
    if "logits_to_keep" in signature(lm.model.forward).parameters:
        arguments["logits_to_keep"] = 3
    with running(lm.model):
        keep_deltas(lm.model)
        expected = lm.model(**arguments, use_cache=False).logits[0, -3:]
        inputs = torch.cat([scene.clean.inputs, lm.embed(more)[0].to(scene.clean.inputs)])
    context = Context(inputs, 1.0, supports_packing=True, layout=scene.clean.layout)
    layout = scene.clean.layout.grown(length + 2)
    prompt = Branch(
        context, 0, inputs[None, :length], [length - 1], record=True, layout=scene.clean.layout
    )
    rest = Branch(context, length, inputs[None, length:], [length, length + 1], layout=layout)
    found = [lm.run([branch])[0][0] for branch in (prompt, rest)]
    if not logits_agree(torch.cat(found), expected, lm.dtype):
        raise UnsupportedModelError(
            f"{type(lm.model).__name__} predicts otherwise after a picture when its prompt is run "
            "in parts, so its pictures are not explained. Take another model."
        )


def keep_deltas(model: Any) -> None:
    """Puts back, when what is running ends, what a model keeps of the positions of a prompt."""
    for module in model.modules():
        if "rope_deltas" in vars(module):
            put(model, vars(module), "rope_deltas", vars(module)["rope_deltas"])


# ---- the door of the text model -----------------------------------------------------------------


class _AtDoor(BaseException):
    """Raised where the text model begins."""


def find_door(model: Any) -> Any:
    """The text model inside of a model. Raises UnsupportedModelError where there is none."""
    find = getattr(model, "get_decoder", None)
    door = None if find is None else find()
    if door is None or door is model:
        raise UnsupportedModelError(
            f"{type(model).__name__} does not say which part of it reads embeddings of pictures "
            "and text, so its pictures are not explained. Take another model."
        )
    return door


def _stopped_at_door(model: Any, arguments: Mapping[str, Any], *, alone: bool) -> dict[str, Any]:
    """The arguments with which a model calls its text model."""
    given: dict[str, Any] = {}

    def stop(_module: Any, _args: Any, kwargs: dict[str, Any]) -> None:
        given.update(kwargs)
        raise _AtDoor

    def see_itself(
        _own: Any, _module: Any, _query: Tensor, _key: Tensor, value: Tensor, *_: Any, **__: Any
    ) -> Any:
        return value.transpose(1, 2).contiguous(), None

    with running(model):
        add_hook(model, find_door(model), stop, before=True, with_kwargs=True)
        if alone:
            set_attention(model, see_itself, masked=False)
        keep_deltas(model)
        with suppress(_AtDoor):
            model(**arguments, use_cache=False)
    if not isinstance(given.get("inputs_embeds"), Tensor):
        raise UnsupportedModelError(
            f"{type(model).__name__} does not hand embeddings to its text model, so its pictures "
            "are not explained. Take another model."
        )
    return given


def _layout_of(given: Mapping[str, Any], number: int, is_picture: Tensor) -> Layout:
    """How the tokens of one of the chats stand."""
    length = len(is_picture)
    positions: Tensor | None = None
    places = given.get("position_ids")
    if isinstance(places, Tensor):
        of_all = places if places.ndim == 3 else places[None]  # [axes, chats, length]
        positions = of_all[:, min(number, of_all.shape[1] - 1)].cpu()
        if torch.equal(positions, torch.arange(length)[None]):
            positions = None
    deep: list[Tensor] = []
    at: Any = given.get("visual_pos_masks")
    for features in given.get("deepstack_visual_embeds") or ():
        whole = features.new_zeros(*at.shape, features.shape[-1])
        whole[at] = features
        deep.append(whole[number])
    return Layout(is_picture, positions, _blocks_of(given, number), tuple(deep))


def _blocks_of(given: Mapping[str, Any], number: int) -> Tensor | None:
    """The blocks of tokens that see each other, from a mask in which some see later ones.

    Raises UnsupportedModelError where the mask shows anything but blocks.
    """
    mask: Any = given.get("attention_mask")
    if isinstance(mask, Mapping):
        mask = mask.get("full_attention", next(iter(mask.values())))
    if not isinstance(mask, Tensor) or mask.ndim != 4:
        return None
    shown = mask[min(number, len(mask) - 1), 0]
    seen = (shown if shown.dtype == torch.bool else shown == 0).cpu()
    length = len(seen)
    places = torch.arange(length)
    last_seen = torch.where(seen, places, -1).amax(1)
    blocks = torch.full((length,), -1)
    end = 0
    count = 0
    for query, last in enumerate(last_seen.tolist()):
        if query >= end and last > query:
            end = last + 1
            blocks[query:end] = count
            count += 1
    same_block = (blocks[:, None] == blocks) & (blocks[:, None] >= 0)
    implied = same_block | (places[:, None] >= places)
    if not torch.equal(implied, seen):
        raise UnsupportedModelError(
            "The tokens of a picture do not see each other in blocks, so a pass that shares the "
            "beginning of the prompt would differ from the model's own. Take another model."
        )
    return blocks if count else None
