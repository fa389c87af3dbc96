"""The library's questions as JSON, for programs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from noiser.errors import ParameterError
from noiser.server.bounds import (
    EXAMPLES,
    INPUTS,
    Body,
    BoundedChat,
    BoundedImageUnit,
    BoundedName,
    BoundedParameters,
    BoundedSources,
    BoundedText,
    Names,
    Spans,
    items,
)
from noiser.server.jobs import Models, QuestionJob
from noiser.server.offsets import Offsets, code_point_spans, in_utf16
from noiser.types import (
    Accuracy,
    AutoUnit,
    CitedUnit,
    ImageRemoval,
    SameName,
    SpanUnit,
    TargetUnitName,
    TorchSeed,
    UnitName,
)

if TYPE_CHECKING:
    from noiser.model import LanguageModel


def bounded_method(name: str, **parameters: Any) -> Any:
    """The method. Raises ParameterError for so many inputs that no stop would be noticed while they
    are made.
    """
    from noiser.methods import make_method

    method = make_method(name, **parameters)
    for parameter, value in vars(method).items():
        if isinstance(value, int) and value > INPUTS:
            raise ParameterError(f"{parameter} is {value}; this server takes at most {INPUTS}.")
    return method


class QuestionBody(Body):
    """The fields of every question.

    `function` is the library's that answers it, and the end of its path.
    """

    function: ClassVar[str]

    model: BoundedName = Field("", description="A model of /v1/models; empty for the first.")
    seed: TorchSeed = Field(0, description="Of all random numbers.")
    offsets: Offsets = "code_points"

    def run(self, models: Models, job: QuestionJob) -> dict[str, Any]:
        """The answer of the library's function, as `save` writes it."""
        import noiser

        own = {"model", "offsets"}
        arguments = {field: getattr(self, field) for field in type(self).model_fields.keys() - own}
        method = arguments.pop("method", None)
        parameters = arguments.pop("parameters", {})
        if parameters and method is None:
            raise ParameterError("parameters are a method's; expected the method's name as well.")
        if method is not None:
            arguments["method"] = bounded_method(method, **parameters)
        with models.use(self.model, job) as lm:
            job.step(self.function)
            if self.offsets == "utf16":
                arguments |= self._spans_in_code_points(lm)
            result = getattr(noiser, self.function)(lm, **arguments, progress=job.progress)
            answer = result.to_dict()
            return in_utf16(answer) if self.offsets == "utf16" else answer

    def _spans_in_code_points(self, lm: LanguageModel) -> dict[str, Any]:
        """The fields that are spans of a text, from UTF-16 code units."""
        found: dict[str, Any] = {}
        unit = getattr(self, "unit", None)
        if isinstance(unit, list):
            text = lm.encode(getattr(self, "prompt"), pictures=True).text  # noqa: B009 - of those with spans
            found["unit"] = code_point_spans(unit, text, "unit")
        target_unit = getattr(self, "target_unit", None)
        if isinstance(target_unit, list):
            target = getattr(self, "target", None)
            if not isinstance(target, str):
                raise ParameterError(
                    "target_unit has spans in UTF-16 code units, and target is no text; expected "
                    "the target as a text."
                )
            found["target_unit"] = code_point_spans(target_unit, target, "target_unit")
        return found


class Scored(QuestionBody):
    """The fields of questions that a method answers."""

    method: BoundedName | None = Field(
        None, description="A method of /v1/methods; null for the library's default."
    )
    parameters: BoundedParameters = Field({}, description="The method's hyper-parameters.")


class Attribute(Scored):
    """Which parts of the prompt made the model say that? The arguments of `noiser.attribute`."""

    function = "attribute"

    prompt: BoundedText | BoundedChat = Field(
        description="A text, or chat messages with role and content; pictures as data URLs."
    )
    target: BoundedText | int | None = Field(
        None, description="A continuation or a token id; null for the greedy one."
    )
    foil: BoundedText | int | None = Field(None, description="Why the target rather than this?")
    max_new_tokens: int | None = Field(
        None, description="Tokens of the greedy continuation; null: 1, of a chat 40."
    )
    target_unit: TargetUnitName | Spans | None = Field(
        None, description="What each row explains; null: one row."
    )
    unit: UnitName | AutoUnit | Spans = Field(
        "word", description="What gets a score, or character spans."
    )
    sources: BoundedSources | None = Field(None, description="Documents that stand in the prompt.")
    continuation_units: bool | None = Field(
        None,
        description="Whether earlier tokens of the continuation are units; null: not of fields.",
    )
    check: bool | Annotated[int, Field(ge=0, le=INPUTS)] = Field(
        False,
        description="Test the scores on so many further inputs; true: on as many as the test "
        "needs.",
    )
    max_seconds: float | None = Field(
        None, gt=0, description="What is there after so many seconds is the answer."
    )
    image_unit: BoundedImageUnit = Field(
        (4, 4),
        description="Parts of a picture of the chat: rows and columns, image (one each), boxes of "
        "pixels, boxes by the index of the picture, or null.",
    )
    image_removal: ImageRemoval = Field(
        "grey", description="How a part of a picture is removed: its pixels, or as words are."
    )


class Cite(Scored):
    """An answer from sources, and which of them each sentence was written from: the arguments of
    `noiser.cite`.
    """

    function = "cite"

    question: BoundedText | BoundedChat = Field(
        description="A text, or chat messages, whose last one gets the sources."
    )
    sources: BoundedSources = Field(description="Texts, or (title, text) pairs.")
    answer: BoundedText | None = Field(
        None, description="A text to cite in place of the model's answer."
    )
    max_new_tokens: int = Field(128, description="The longest answer.")
    unit: CitedUnit = Field("auto", description="What is cited.")
    accuracy: Accuracy = Field("accurate", description="Fast: in one pass, with a check.")
    rule: bool = Field(False, description="Give each sentence the rule of the sources it needs.")
    check: bool | Annotated[int, Field(ge=0, le=INPUTS)] = Field(
        False,
        description="Test the scores on so many further inputs; true: on as many as the test "
        "needs.",
    )
    max_seconds: float | None = Field(
        None, gt=0, description="What is there after so many seconds is the answer."
    )


class RuleBody(QuestionBody):
    """Which parts of a prompt does its answer need, as a rule? The arguments of `noiser.rule`."""

    function = "rule"

    prompt: BoundedText | BoundedChat = Field(
        description="A text, or chat messages with role and content; pictures as data URLs."
    )
    target: BoundedText | int | None = Field(
        None, description="The answer: a continuation or a token id; null for the greedy one."
    )
    foil: BoundedText | int | None = Field(
        None, description="When is the target likelier than this?"
    )
    max_new_tokens: int | None = Field(
        None, description="Tokens of the greedy answer; null: 1, of a chat 40."
    )
    target_unit: Literal["all"] | Spans = Field(
        "all", description="The whole answer, or one span of its characters."
    )
    unit: UnitName | Spans | None = Field(
        None, description="The parts; null: sources, or else sentences."
    )
    sources: BoundedSources | None = Field(
        None, description="Documents that stand in the prompt; if none does, they are placed there."
    )
    same: SameName | None = Field(
        None, description="When answers are the same; null: tokens, of long answers logprob."
    )
    fresh: int = Field(40, le=INPUTS, description="Inputs that the rule is tried on.")
    image_unit: BoundedImageUnit = Field(
        (2, 2), description="Parts of a picture of the chat, as of attribute."
    )
    image_removal: ImageRemoval = Field(
        "grey", description="How a part of a picture is removed: grey or blurred pixels."
    )


class DiffBody(QuestionBody):
    """Which edit of a prompt changed the answer? The arguments of `noiser.diff`."""

    function = "diff"

    before: BoundedText | BoundedChat = Field(description="A text, or chat messages.")
    after: BoundedText | BoundedChat = Field(description="The same with edits.")
    target: BoundedText | None = Field(
        None, description="The answer to explain; null for the greedy one."
    )
    max_new_tokens: int = Field(16, description="The longest answer.")


class ExampleBody(Body):
    """A prompt with its expected answer."""

    prompt: BoundedText | BoundedChat
    target: BoundedText | int | None = None
    sources: BoundedSources | None = None


class Evaluate(Scored):
    """Whether attributions of prompts can be believed: arguments of `noiser.evaluate`."""

    function = "evaluate"

    examples: Annotated[list[BoundedText | BoundedChat | ExampleBody], *items(EXAMPLES)] = Field(
        description="Texts, chats, or prompts with a target."
    )
    metrics: Names = Field(["faithfulness"], description="Names of metrics that need no judge.")
    unit: UnitName | AutoUnit | SpanUnit = Field("word", description="What gets a score.")
    max_new_tokens: int = Field(1, description="Tokens to explain where an example has no target.")
    target_unit: TargetUnitName = Field("token", description="What each row explains.")
    masks: int | None = Field(None, le=INPUTS, description="Mask samples per prompt.")
    removal: BoundedName = Field("zero", description="How metrics remove whole units.")


class Document(Body):
    """A document of a chat completion; a text is one without an id and a title."""

    id: str = Field("", max_length=200, description="Empty: its number, from 1 on.")
    text: BoundedText
    title: BoundedName = ""

    @model_validator(mode="before")
    @classmethod
    def _of_text(cls, data: Any) -> Any:
        return {"text": data} if isinstance(data, str) else data
