"""The question that a user asks, and the small frozen records that every room shares."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from typing import Annotated, Any, Literal, NamedTuple, get_args

from pydantic import Field

from noiser.checks import check_choice, check_count, check_image_unit, plain
from noiser.errors import ParameterError

TorchSeed = Annotated[int, Field(ge=-(2**63), lt=2**64)]
"""An integer that torch takes as a seed."""

Place = Annotated[int, Field(ge=0, lt=2**31)]
"""An index, an offset or an id, as a saved file may hold it."""

Message = Mapping[str, Any]
"""One chat message: `{"role": ..., "content": ...}`, two texts, and what else the model's template
reads.
"""

Prompt = str | Sequence[Message]
"""A text, or chat messages."""

Prompts = list[str] | tuple[str, ...] | list[Prompt] | Sequence[Sequence[Message]]
"""Several prompts: texts, chats, or both."""

Sources = Sequence[str | tuple[str, str]]
"""Documents in a prompt: texts, or (title, text) pairs."""

Documents = Sources | Mapping[str, str] | PathLike[str] | Sequence[Any]
"""Sources, {title: text}, a folder or paths of text files, or documents of LangChain or
LlamaIndex.
"""

TextUnitName = Literal["token", "word", "field", "sentence", "line", "paragraph"]
UnitName = Literal["token", "word", "field", "sentence", "line", "paragraph", "turn", "source"]
Unit = UnitName | Sequence[tuple[int, int]]
"""What one score belongs to: a named segmentation, or the caller's (start, end) character spans."""

AutoUnit = Literal["auto"]
"""Coarse units first, then smaller ones inside those that carry the score."""

SpanUnit = Literal["spans"]
"""The spans that an example names are its units."""

ImageUnit = (
    Literal["image"]
    | tuple[int, int]
    | Sequence[tuple[float, float, float, float]]
    | Mapping[int, Sequence[tuple[float, float, float, float]]]
    | None
)
"""The parts of a picture that have one score each: all of it, (rows, columns), boxes (left, top,
right, bottom) in its pixels, {picture: boxes}, or none.
"""

ImageRemoval = Literal["grey", "blur", "rows"]
"""How a region of a picture is removed."""

Accuracy = Literal["fast", "accurate"]
CitedUnit = Literal["auto", "source", "sentence"]
"""What is cited: sources, sentences of them, or sources first and then sentences of those that
matter.
"""

Baseline = Literal["zero", "pad", "unk", "mean"]
"""A row that stands for nothing: zeros, the row of the padding or unknown token, or the mean row of
the table.
"""

Profile = Literal["paper", "authors"]
"""Whose definitions: the paper's, or those of the script that its authors published."""

SpecialTokens = Literal["frozen", "perturbed"]
"""Whether special tokens are perturbed and scored."""

SameName = Literal["tokens", "logprob", "text"]
"""When an answer is the same: each token is the most probable one, its log-probability hardly
falls, or its text.
"""

Progress = Callable[[float, float], None]
"""Called with the work done and the work expected: token-forwards, prompts, bytes, or what else is
counted.
"""

Objective = Callable[[Any, Any], Any]
"""A caller's own number: from log-probabilities under a change, and without one, to [samples]."""

ASKED = 2.0
"""A call that loses at least so many nats without the user's words was asked for by the user."""

STAYS = 3.0
"""An answer that loses fewer nats than this stays."""

WHOLE_ANSWER = 40
"""Tokens of a chat's answer that are explained by default."""

TargetUnitName = Literal["token", "word", "field", "sentence", "line", "paragraph", "all"]
TargetUnit = TargetUnitName | Sequence[tuple[int, int]]
"""What one row explains: a named part of the continuation, all of it, or (start, end) characters of
its text.
"""


class Span(NamedTuple):
    """A unit: a piece of the input that has one score.

    Attributes:
        text: the characters `start` to `end` of the text, leading whitespace included.
        start: offset of the first character, in characters of the text (for chat: of the rendered
            chat).
        end: offset after the last character.
        token_indices: positions of its tokens in the model's input, ascending.
    """

    text: str
    start: Place
    end: Place
    token_indices: tuple[Place, ...]

    def overlaps(self, start: int, end: int) -> bool:
        """Whether it has a character in common with the characters `start` to `end`."""
        return self.start < end and start < self.end


class Source(NamedTuple):
    """A document in the prompt: its title or "", and its text there, characters `start` to `end`
    (of a rendered chat).

    The text begins with the title's line if that is in the prompt. It is without the whitespace
    around the document, `lead` characters of which stood in front of it.
    """

    title: str
    text: str
    start: Place
    end: Place
    lead: Place = 0


class Target(NamedTuple):
    """The explained piece of a row: a token of the continuation, or a span of several.

    The tokens of all targets in order, each after its `before`, are the continuation.

    Attributes:
        text: the target as text; of a token, the character where several byte-level tokens make up
            one.
        token_id: id of the (first) token in the vocabulary.
        probability: the model's probability for it, given everything before it; of a span the
            geometric mean of its tokens' probabilities.
        rank: 1 for the most probable token at its position, 2 for the next, and so on; of a span
            the largest of its tokens' ranks.
        rest: ids of a span's tokens after the first.
        before: ids of the continuation's tokens between the target before (or the prompt) and this
            one.
    """

    text: str
    token_id: Place
    probability: Annotated[float, Field(ge=0, lt=2)]
    rank: Place
    rest: tuple[Place, ...] = ()
    before: tuple[Place, ...] = ()

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Ids of all its tokens, in order."""
        return (self.token_id, *self.rest)


class Pair(NamedTuple):
    """Two units that need each other, or repeat each other.

    Attributes:
        target: the row of the scores.
        units: the columns of the two units.
        score: the Banzhaf interaction index: what both units do beyond the sum of what each does
            alone. Positive for "together", negative for "either", in the unit of the method's
            values.
        stderr: its standard error; 0 if every input was run.
        kind: "together" or "either".
    """

    target: Place
    units: tuple[Place, Place]
    score: float
    stderr: float
    kind: Literal["together", "either"]


ANOTHER_ANSWER = "another answer"
"""The `leader` where a model gives text only, and no token is known."""


class Without(NamedTuple):
    """What the model says to the prompt without one unit.

    Attributes:
        probability: the target's then; of a span the geometric mean of its tokens' probabilities.
        leader: the token that is the most probable one then, at the first token of the target that
            is not; the target's own text where each of its tokens still is.
        leader_probability: the leader's probability.
    """

    probability: float
    leader: str
    leader_probability: float


class ModelIdentity(NamedTuple):
    """The facts needed to load the same model again.

    Attributes:
        name: built-in name, hub id, path, or the class name of a model the caller wrapped.
        revision: commit on the hub, or sha256 of a GGUF file or of the files that a folder's model
            is loaded from.
        dtype: for example "float32".
        architecture: class name of the model.
    """

    name: str
    revision: str | None
    dtype: str
    architecture: str


@dataclass(frozen=True, kw_only=True)
class Question:
    """Which parts of a prompt made a model say that?

    Args:
        sources_begin: the character from which sources are looked for.
        stop: text with which a greedy continuation ends.
        is_answer: whether a target of text is an answer as it stands, also where it reads as the
            name of an action.
        max_calls: the most requests to a chat model; None for the model's own limit.
        prompt, others: as for `noiser.attribute`, of one prompt; a target may also be a tuple of
            token ids.

    Raises:
        ParameterError: a value has the wrong type. UnknownNameError: an unknown name.

    >>> Question(prompt="The capital of France is", max_new_tokens=2).unit
    'word'
    """

    prompt: Prompt
    target: str | int | tuple[int, ...] | None = None
    foil: str | int | None = None
    max_new_tokens: int | None = None
    target_unit: TargetUnit | None = None
    unit: Unit | AutoUnit = "word"
    sources: Sources | None = None
    sources_begin: int = 0
    continuation_units: bool | None = None
    special_tokens: SpecialTokens | None = None
    of: Objective | None = None
    stop: str | None = None
    is_answer: bool = False
    max_calls: int | None = None
    image_unit: ImageUnit = (4, 4)
    image_removal: ImageRemoval = "grey"

    def __post_init__(self) -> None:
        for name in ("target", "foil", "target_unit", "unit"):
            object.__setattr__(self, name, plain(getattr(self, name)))
        if self.max_new_tokens is not None:
            object.__setattr__(
                self, "max_new_tokens", check_count("max_new_tokens", self.max_new_tokens)
            )
        if self.max_calls is not None:
            object.__setattr__(self, "max_calls", check_count("max_calls", self.max_calls))
        object.__setattr__(self, "image_unit", check_image_unit(plain(self.image_unit)))
        check_choice("image_removal", self.image_removal, get_args(ImageRemoval))
        if self.special_tokens is not None:
            check_choice("special_tokens", self.special_tokens, get_args(SpecialTokens))
        if self.of is not None and not callable(self.of):
            raise ParameterError(
                f"of is {self.of!r}; expected a function, such as noiser.objectives.entropy."
            )
        if self.of is not None and self.foil is not None:
            raise ParameterError("foil= and of= cannot be combined; pass one of them.")
