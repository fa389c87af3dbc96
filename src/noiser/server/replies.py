"""The answers of the API as OpenAPI has them. They describe; nothing is computed from them.

Tests hold every answer of the server against them, with no key more or less.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from noiser.explain.citations_record import Origin

_START = "Offset of the first character, counted as the request's `offsets` say."
_END = "Offset after the last character."

Start = Annotated[int, Field(description=_START)]
End = Annotated[int, Field(description=_END)]
StandardError = Annotated[
    float | None, Field(description="Standard error of the score; null without one.")
]
Infinite = Literal["Infinity", "-Infinity"]


class Reply(BaseModel):
    """An object of an answer."""


class ErrorText(Reply):
    """What went wrong, and what to do."""

    type: str = Field(description="The name of the error's class.")
    message: str


class ErrorReply(Reply):
    """The answer to a question that cannot be answered."""

    error: ErrorText


class WarnedReply(Reply):
    """The keys of every answer."""

    warnings: list[str] = Field(description="The library's warnings, to be shown to the reader.")


class ModelIdentityReply(Reply):
    """What is needed to load the same model again."""

    name: str
    revision: str | None
    dtype: str
    architecture: str


class UnitReply(Reply):
    """A piece of the prompt that has a score; a column of the tables."""

    text: str
    start: Start
    end: End
    token_indices: list[int] = Field(description="Its tokens in the model's input.")


class TargetReply(Reply):
    """What a row of the tables explains."""

    text: str
    token_id: int
    probability: float = Field(description="Of a span the geometric mean over its tokens.")
    rank: int = Field(description="1 for the most probable token; of a span the largest.")
    rest: list[int] = Field([], description="Ids of a span's tokens after the first.")
    before: list[int] = Field([], description="Ids of the tokens since the target before.")


class PairReply(Reply):
    """Two units that decide only together, or either of which would do."""

    target: int = Field(description="The row.")
    units: list[int] = Field(description="The two columns.")
    score: float
    stderr: StandardError
    kind: Literal["together", "either"]


class WithoutReply(Reply):
    """What the model says without a unit."""

    probability: float = Field(description="The target's then.")
    leader: str = Field(description="The most probable token then.")
    leader_probability: float


class AttributionFields(Reply):
    """The saved file of an attribution."""

    format: Literal["noiser.attribution"]
    schema_: Literal[1] = Field(alias="schema")
    method: str = Field(description="With its version.")
    parameters: dict[str, Any]
    seed: int
    model: ModelIdentityReply
    versions: dict[str, str]
    prompt: str | list[dict[str, Any]]
    text: str = Field(description="The prompt as the model read it, followed by the continuation.")
    prompt_length: int = Field(description="Characters of `text` that are the prompt.")
    unit: str
    units: list[UnitReply]
    target_unit: str
    targets: list[TargetReply]
    foil: TargetReply | None
    scores: list[list[float | None]] = Field(
        description="A row per target, a column per unit; null where the unit is not before it."
    )
    stderr: list[list[float | None]] | None
    thresholds: list[list[float | Infinite | None]] | None
    k_min: list[float | Infinite | None] | None
    pairs: list[PairReply]
    without: list[list[WithoutReply | None]] | None
    info: dict[str, Any] = Field(description="What else the method reports.")


class AttributionReply(AttributionFields, WarnedReply):
    """The answer to `/v1/attribute`."""


class QuoteReply(Reply):
    """A part of a source that a sentence was written from."""

    text: str
    start: int = Field(description="Offset in `attribution.text`.")
    end: int = Field(description=_END)
    score: float
    start_in_source: int = Field(description="Offset in the source's text as it was given.")
    end_in_source: int = Field(description=_END)


class CitationReply(Reply):
    """A source that a sentence was written from."""

    number: int = Field(description="Of the source, from 1 on.")
    score: float = Field(description="What the sentence loses without it, in nats by default.")
    stderr: StandardError
    share: float = Field(description="Of all positive scores of the sentence, 0 to 1.")
    quotes: list[QuoteReply] = Field(description="The best first.")


class SourcePairReply(Reply):
    """Two sources that act on a sentence as a pair."""

    numbers: list[int]
    score: float
    stderr: StandardError
    kind: Literal["together", "either"]


class AlternativeReply(Reply):
    """A source that takes the place of those that a sentence cites."""

    number: int
    says: str = Field(description="The token with which the model leaves the sentence then.")
    probability: float = Field(description="Of that token.")
    loss: float = Field(description="Of its log-probability without this source too, in nats.")


class SentenceReply(Reply):
    """A sentence of the answer."""

    text: str = Field(description="Without whitespace around it.")
    start: int = Field(description="Offset in `answer`.")
    end: int = Field(description=_END)
    log_probability: float = Field(description="In nats, given everything before it.")
    loss: float = Field(description="What it loses without all sources, in nats.")
    verdict: Origin
    citations: list[CitationReply] = Field(description="The best first.")
    pairs: list[SourcePairReply]
    alternatives: list[AlternativeReply]
    rule: str | None = Field(description="As text; `rules` has the objects.")


class SourceReply(Reply):
    """A source as it stands in the prompt."""

    title: str
    text: str
    start: int = Field(description="Offset in `attribution.text`.")
    end: int = Field(description=_END)
    lead: int = Field(description="Whitespace in front of the text as it was given.")


class TrialReply(Reply):
    """What the model says of a prompt that was written anew."""

    claim: Literal["enough", "changes"]
    units: list[int]
    stays: bool
    answer: str


class HeadingReply(Reply):
    """A piece of a chat template in the prompt."""

    start: int
    end: int
    words: str = Field(description="What is shown in its place.")


class RuleFields(Reply):
    """The saved file of a rule."""

    format: Literal["noiser.rule"]
    schema_: Literal[1] = Field(alias="schema")
    answer: str
    foil: str | None
    text: str
    units: list[UnitReply]
    unit: str
    terms: list[list[int]] = Field(
        description="Numbers of units from 1 on; a negative one for unless."
    )
    best: list[list[int]]
    same: str
    hits: int
    tries: int
    fresh: bool
    base: int
    control: str
    memory: bool | None
    always_there: list[int]
    trials: list[TrialReply]
    inputs: int
    seed: int
    model: ModelIdentityReply | None
    headings: list[HeadingReply]
    rule: str = Field(description="The rule in words.")
    interval: list[float]


class RuleReply(RuleFields, WarnedReply):
    """The answer to `/v1/rule`."""


class CitationsReply(WarnedReply):
    """The answer to `/v1/cite`."""

    format: Literal["noiser.citations"]
    schema_: Literal[1] = Field(alias="schema")
    question: str | list[dict[str, Any]]
    answer: str
    answer_without: str | None = Field(description="The model's answer without the sources.")
    memory: float | Infinite
    least_share: float
    decisive: list[list[int]] = Field(
        description="Of each sentence the sources without which it is no longer said; 0: all."
    )
    repeats: list[list[SourcePairReply]] = Field(
        description="Of each sentence the pairs of sources of which either would do."
    )
    alternatives: list[list[AlternativeReply]]
    losses: list[float]
    sentences: list[SentenceReply]
    sources: list[SourceReply]
    rules: list[RuleFields | None]
    attribution: AttributionFields


class EditReply(Reply):
    """A changed piece of a prompt."""

    message: int
    start: int = Field(description="Offset in the text or message before.")
    before: str
    after: str
    score: float | None = Field(description="Its part in the change of log-probability, in nats.")
    stderr: StandardError


class DiffReply(WarnedReply):
    """The answer to `/v1/diff`."""

    format: Literal["noiser.diff"]
    schema_: Literal[1] = Field(alias="schema")
    answer: str
    answer_before: str
    log_p_before: float | Infinite | None
    log_p_after: float | Infinite | None
    edits: list[EditReply]
    pairs: list[PairReply]
    texts: list[list[str | int]] = Field(
        description="Per message, unchanged pieces and indices of edits."
    )


class EstimateReply(Reply):
    """A number over all prompts."""

    number: str
    value: float | None
    low: float | None
    high: float | None
    p: float | None
    n: int
    chance_level: float | None
    better: str | None
    meaning: str
    reason: str


class EvaluationReply(WarnedReply):
    """The answer to `/v1/evaluate`."""

    format: Literal["noiser.evaluation"]
    schema_: Literal[1] = Field(alias="schema")
    method: str
    model: ModelIdentityReply
    metrics: list[str]
    settings: dict[str, Any]
    confidence: float
    skipped: list[dict[str, Any]] = Field(description="What could not be measured, and why.")
    summary: list[EstimateReply]
    rows: list[dict[str, Any]] = Field(description="One per prompt, with what was measured.")


class DocumentQuote(Reply):
    """A part of a document that a sentence was written from."""

    text: str
    start: int = Field(description="Offset in the document's text as it was given.")
    end: int = Field(description=_END)
    score: float


class DocumentCitation(Reply):
    """A document that a sentence was written from."""

    id: str
    number: int = Field(description="In the order of the request, from 1 on.")
    score: float = Field(description="With accurate scores what the sentence loses, in nats.")
    stderr: StandardError
    share: float = Field(description="Of all positive scores of the sentence, 0 to 1.")
    quotes: list[DocumentQuote] = Field(description="The best first.")


class DocumentPair(Reply):
    """Two documents that act on a sentence as a pair."""

    ids: list[str]
    kind: Literal["together", "either"]
    score: float
    stderr: StandardError


class DocumentAlternative(Reply):
    """A document that takes the place of those that a sentence cites."""

    id: str
    number: int
    says: str = Field(description="The token with which the model leaves the sentence then.")
    probability: float = Field(description="Of that token.")
    loss: float = Field(description="Of its log-probability without this document too, in nats.")


class SentenceCheck(Reply):
    """Whether fast scores of a sentence predict measured losses."""

    lds: float | None
    low: float | None
    high: float | None
    p: float | None
    predicts: bool


class CitedSentence(Reply):
    """A sentence of the answer, with the documents it was written from."""

    start: int = Field(description="Offset in the message's content.")
    end: int = Field(description=_END)
    text: str = Field(description="Without whitespace around it.")
    log_probability: float = Field(description="In nats, given everything before it.")
    loss: float = Field(description="What it loses without all documents, in nats.")
    sources: list[DocumentCitation] = Field(description="The best first.")
    pairs: list[DocumentPair]
    alternatives: list[DocumentAlternative]
    verdict: Origin
    method: str
    check: SentenceCheck | None


class MessageReply(Reply):
    """The answer as a message."""

    role: Literal["assistant"]
    content: str


class ChoiceReply(Reply):
    """The only choice."""

    index: Literal[0]
    message: MessageReply
    finish_reason: str


class UsageReply(Reply):
    """The number of tokens."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class CompletionReply(WarnedReply):
    """The answer to `/v1/chat/completions`, in OpenAI's form with citations."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChoiceReply]
    citations: list[CitedSentence]
    usage: UsageReply | None = Field(None, description="Missing where tokens are not known.")


class DeltaReply(Reply):
    """A piece of the answer."""

    role: Literal["assistant"] | None = None
    content: str | None = None


class ChunkChoiceReply(Reply):
    """The only choice of a chunk."""

    index: Literal[0]
    delta: DeltaReply
    finish_reason: str | None


class ChunkReply(Reply):
    """A chunk of a stream; one with citations follows each sentence, the last one has all."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChunkChoiceReply]
    citations: list[CitedSentence] | None = None
    usage: UsageReply | None = None
    warnings: list[str] | None = Field(None, description="Of the last chunk.")


class ModelReply(Reply):
    """A model that can be asked."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str


class ModelsReply(Reply):
    """The answer to `/v1/models`."""

    object: Literal["list"]
    data: list[ModelReply]


class MethodReply(Reply):
    """A method that can score."""

    id: str
    summary: str


class MethodsReply(Reply):
    """The answer to `/v1/methods`."""

    data: list[MethodReply]
