"""`noiser.diff`: how much each edit between two versions of a prompt changes the answer."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from html import escape
from os import PathLike
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch

from noiser.attribution.display import label, shorten, visible
from noiser.attribution.markdown import escaped, escaped_line, markdown_table
from noiser.attribution.markup import css, page_of_card, sentence_html
from noiser.attribution.relations import WORDS
from noiser.attribution.saved import SavedResult
from noiser.attribution.store import SavedNumber, restored, to_jsonable
from noiser.attribution.summary import Piece, as_markdown, as_text, plain_label
from noiser.checks import check_seed
from noiser.engine import Coalition, Query, StoredGame, prepare, run_one
from noiser.errors import ParameterError, PromptError
from noiser.explain.announce import FIRST, say_calls
from noiser.explain.many import run_many
from noiser.files import write_if
from noiser.html import html_table
from noiser.methods import Joint, KernelShap, ShapleySampling
from noiser.model.language_model import LanguageModel, check_model
from noiser.numbers import number_format, percentage
from noiser.tensors import floats
from noiser.text import as_prompt, check_messages, one_text_each
from noiser.types import Message, Pair, Progress, Prompt, Question

if TYPE_CHECKING:
    from pandas import DataFrame

EXACT = 8
"""Up to this many edits, every mixture of both versions is run."""

CLEAR = 0.1
"""An edit that moves the log-probability by fewer nats has no clear effect: e^0.1 is 10 % more."""

ORDERS = 10
"""With more edits: the number of random orders, each walked forwards and backwards."""

# Characters of an answer or an edit in the sentence.
_LONGEST = 80

# A word with the whitespace before it, or the whitespace at the end: joined, they are the text.
_WORD = re.compile(r"\s*\S+|\s+\Z")


class Edit(NamedTuple):
    """A changed piece of a prompt: the text `before`, at offset `start`, and the text `after`.

    An empty `before` is an insertion, an empty `after` a deletion.

    Attributes:
        message: index of the message in a chat; 0 for a text.
        score: the edit's part in the change of the answer's log-probability, in nats: its Shapley
            value.
        stderr: standard error of the score; 0 where every mixture was run.
    """

    message: int
    start: int
    before: str
    after: str
    score: SavedNumber = torch.nan
    stderr: SavedNumber = 0.0


@dataclass(frozen=True, kw_only=True)
class Diff(SavedResult):
    """The edits between two versions of a prompt, and the effect of each on the answer.

    Attributes:
        answer: the answer that is explained.
        answer_before: the greedy answer to the version before.
        log_p_before: log-probability of `answer` after the version before, in nats.
        log_p_after: log-probability of `answer` after the version after.
        edits: in the order of the text. Their scores add up to `log_p_after - log_p_before`.
            There are none where the versions are equal.
        pairs: edits that act only together, or either of which would do; `units` are indices of
            `edits`.
        texts: for each message (or for the text), its unchanged pieces and the indices of its
            edits, in their order.
    """

    answer: str
    answer_before: str
    log_p_before: SavedNumber
    log_p_after: SavedNumber
    edits: tuple[Edit, ...]
    pairs: tuple[Pair, ...]
    texts: tuple[tuple[str | int, ...], ...]

    def __post_init__(self) -> None:
        count = len(self.edits)
        places: list[int] = []
        for pieces in self.texts:
            places += [piece for piece in pieces if isinstance(piece, int)]
        if places != [*range(count)]:
            raise ParameterError(
                f"texts have the edits {places}; expected each of 0 to {count - 1}, in their order."
            )
        for pair in self.pairs:
            if not all(0 <= edit < count for edit in pair.units):
                raise ParameterError(f"{pair} is of no edit; there are {count} edits.")

    def __str__(self) -> str:
        return self.to_text()

    def to_text(self) -> str:
        """Both versions in one text, the facts, and the edits; safe for a terminal."""
        marks = self._marks()
        numbered = [f"{mark}({number})" for number, mark in enumerate(marks, 1)]
        texts = self._texts(numbered, visible)
        rows: list[str] = []
        for index, score in self._ranked():
            rows.append(f"  ({index + 1}) {score}  {marks[index]}")
        about = as_text(self._about())
        return "\n".join([about, "", *texts, "", *self._facts(), *rows])

    def _marks(self) -> list[str]:
        """Each edit as text."""
        return [_mark(edit) for edit in self.edits]

    def _texts(self, marks: Sequence[str], show: Callable[[str], str]) -> list[str]:
        """Each message, with a mark in the place of each edit."""
        texts: list[str] = []
        for pieces in self.texts:
            shown = [marks[piece] if isinstance(piece, int) else show(piece) for piece in pieces]
            texts.append("".join(shown))
        return texts

    def _ranked(self) -> list[tuple[int, str]]:
        """The index and the score as text of each edit, the largest absolute score first."""
        show = number_format([edit.score for edit in self.edits])
        numbered = sorted(enumerate(self.edits), key=lambda entry: -abs(entry[1].score))
        ranked: list[tuple[int, str]] = []
        for index, edit in numbered:
            score = edit.score
            # A standard error of 0 belongs to an exact score, which is shown without one.
            stderr = edit.stderr or torch.nan
            sign = "+" if score > 0 else ""
            ranked.append((index, sign + show.with_error(score, stderr)))
        return ranked

    def _about(self) -> list[Piece]:
        """One sentence: how the answer's probability changed, because of which edit most of all."""
        answer = Piece(shorten(label(self.answer), _LONGEST), "said")
        if not self.edits:
            return [Piece("Both versions are the same, so that "), answer, Piece(" stays.")]
        change = self.log_p_after - self.log_p_before
        before = "the model said it before as well"
        instead: list[Piece] = []
        if self.answer_before.strip() != self.answer.strip():
            before = "before, the model said "
            instead = [Piece(shorten(label(self.answer_before), _LONGEST), "instead")]
        end = [Piece(f"; {before}"), *instead, Piece(".")]
        if not any(map(_is_clear, self.edits)):
            return [
                answer,
                Piece(" is about as likely as before; no edit has a clear effect"),
                *end,
            ]
        if change > 0:
            direction = "likelier"
            strongest = max(self.edits, key=lambda edit: edit.score)
        else:
            direction = "less likely"
            strongest = max(self.edits, key=lambda edit: -edit.score)
        return [
            answer,
            Piece(f" became {direction} ({self._change_in_words()}), most of all because of "),
            *_change(strongest),
            *end,
        ]

    def _change_in_words(self) -> str:
        """Both probabilities; of long answers, whose probabilities are tiny, the nats."""
        before = percentage(math.exp(self.log_p_before))
        after = percentage(math.exp(self.log_p_after))
        if before == after:
            return f"by {abs(self.log_p_after - self.log_p_before):.1f} nats"
        return f"{before} to {after}"

    def _facts(self) -> Iterator[str]:
        before = self.log_p_before
        after = self.log_p_after
        yield (
            f"log-probability of {self.answer!r}: {before:.3f} before, {after:.3f} after, "
            f"{after - before:+.3f} nats"
        )
        yield f"the answer before: {self.answer_before!r}"
        for pair in self.pairs:
            first, second = pair.units
            heading, _ = WORDS[pair.kind]
            yield f"({first + 1}) and ({second + 1}): {heading}"
        if not self.edits:
            yield "no edits: both versions are the same"
        elif not any(map(_is_clear, self.edits)):
            yield f"no clear effect: no edit moves the log-probability by {CLEAR:g} nats or more"

    def to_dataframe(self) -> DataFrame:
        """One row per edit, in the order of the text."""
        import pandas as pd

        return pd.DataFrame(self.edits)

    def to_dict(self) -> dict[str, Any]:
        """The content of a saved file as plain dicts, lists, texts and numbers."""
        return {"format": "noiser.diff", "schema": 1, **to_jsonable(vars(self))}

    @classmethod
    def from_dict(cls, data: Any) -> Diff:
        """The edits whose `to_dict` gave the data. Raises StoredFileError where `load` does."""
        return restored(cls, Literal["noiser.diff"], data)

    def to_markdown(self) -> str:
        """Both versions in one text, the facts, and a table of the edits, as Markdown."""
        marks = [f"{mark}({index})" for index, mark in enumerate(self._marks(), 1)]
        texts = [text.replace("\n", " ") for text in self._texts(marks, visible)]
        about = as_markdown(self._about(), escaped)
        lines = [about, *map(escaped_line, texts), *map(escaped_line, self._facts())]
        if not self.edits:
            return "\n\n".join(lines) + "\n"
        rows = [["edit", "nats", "before", "after"]]
        for index, score in self._ranked():
            edit = self.edits[index]
            rows.append([str(index + 1), score, label(edit.before), label(edit.after)])
        return "\n\n".join([*lines, markdown_table(rows, (1,))]) + "\n"

    def to_html(self, path: str | PathLike[str] | None = None) -> str:
        """A complete page without network and scripts, also written to `path` if given."""
        title = "Edits and their effect"
        return write_if(page_of_card(self._card(), title, css("explain", "diff.css")), path)

    def _repr_html_(self) -> str:
        return f"<style>{css()}{css('explain', 'diff.css')}</style>{self._card()}"

    def _card(self) -> str:
        scores = dict(self._ranked())
        marks: list[str] = []
        for index, edit in enumerate(self.edits):
            sign = "plus" if edit.score > 0 else "minus"
            marks.append(
                f'<span class={sign} title="{scores[index]}">'
                f"{_marked('del', edit.before)}{_marked('ins', edit.after)}"
                f"<sup>{index + 1}</sup></span>"
            )
        texts = "".join(f"<p class=text dir=auto>{text}</p>" for text in self._texts(marks, escape))
        facts = "".join(f"<p>{escape(fact)}</p>" for fact in self._facts())
        rows: list[list[str]] = []
        for index, score in scores.items():
            rows.append([f"{index + 1}", score, marks[index]])
        table = html_table(["edit", "nats", ""], rows) if rows else ""
        about = sentence_html(self._about())
        body = f"{about}{texts}<details><summary>in numbers</summary>{facts}{table}</details>"
        return f'<div class="noiser-att noiser-diff">{body}</div>'


def _marked(tag: str, text: str) -> str:
    """A changed text in an element; the white space around it is neither struck out nor lined."""
    words = text.strip()
    if not words:
        return escape(text)
    space, end = text.split(words, 1)
    marked = f"<{tag}>{escape(words)}</{tag}>"
    return f"{escape(space)}{marked}{escape(end)}"


def diff(
    lm: LanguageModel,
    before: Prompt,
    after: Prompt,
    *,
    target: str | None = None,
    max_new_tokens: int = 16,
    seed: int = 0,
    progress: Progress | None = None,
) -> Diff:
    """The part of each edit of a prompt in the change of the answer's log-probability.

    The words that differ are edits. They are the players of a game whose inputs are mixtures of
    both versions, and an edit's score is its Shapley value. With up to 8 edits all mixtures are
    run, with more only those along random orders.

    Args:
        lm: from `noiser.load_model` or `noiser.wrap`.
        before: a text, or chat messages.
        after: the same with edits; a chat keeps the number and the roles of its messages.
        target: the answer to explain. None: the greedy answer to `after`.
        max_new_tokens: the most tokens of a greedy answer.
        seed: of the random orders.
        progress: called with (done, expected) mixtures.

    Raises:
        PromptError: the versions are chats of other messages.

    Example:
        >>> before = "Paris is the capital of"
        >>> print(noiser.diff(lm, before, "Rome is the capital of"))  # doctest: +SKIP
    """
    check_model(lm)
    before = as_prompt(lm.tokenizer, before)
    after = as_prompt(lm.tokenizer, after)
    chats = (_messages(before), _messages(after))
    if isinstance(before, str) != isinstance(after, str):
        raise PromptError(
            "One version is a text and the other a chat; expected two texts, or two chats."
        )
    # Before the texts are aligned, whose time grows with the square of their lengths.
    encoding_before = lm.encode(before)
    encoding = lm.encode(after)
    texts, edits = _find_edits(*chats)
    options: Any = {"max_new_tokens": max_new_tokens, "target_unit": "all"}
    if lm.is_text_only:
        options["unit"] = "turn"  # nothing is asked about units
        _announce(lm, len(edits))
    question = Question(prompt=after, target=target, **options)
    query = run_one(lm, prepare(lm, question, encoding))
    question_before = Question(prompt=before, **options)
    query_before = run_one(lm, prepare(lm, question_before, encoding_before))
    objective = query.objective("logprob")
    if not edits:
        value = float(query.read_clean(objective))
        return Diff(
            answer=query.target_texts[0],
            answer_before=query_before.target_texts[0],
            log_p_before=value,
            log_p_after=value,
            edits=(),
            pairs=(),
            texts=texts,
        )
    plan = _plan(lm, query, query_before, len(edits))
    mixed_options: dict[str, Any] = {**options, "target": query.target_ids}
    if lm.is_text_only:
        chat: Any = lm
        lm = chat.asking(query.context.samples)
        mixed_options["target"] = query.target_texts[0]

    async def log_p(kept: bytes) -> float:
        """The log-probability of the answer after a mixture of both versions."""
        messages = _mixture(chats, texts, edits, kept)
        prompt = messages[0]["content"] if isinstance(after, str) else messages
        question = Question(prompt=prompt, **mixed_options)
        mixed = await prepare(lm, question)
        return float(mixed.read_clean(objective))

    async def evaluate(keys: Sequence[Coalition]) -> Mapping[Coalition, float]:
        values = run_many(lm, [log_p(kept) for _, kept in keys], progress)
        return dict(zip(keys, values, strict=True))

    count = len(edits)
    rng = torch.Generator().manual_seed(check_seed(seed))
    players = torch.ones(1, count, dtype=torch.bool)
    game = StoredGame(players, query.read_clean(objective), "logprob", evaluate=evaluate)
    shapley = run_one(lm, plan.method.score_game(game, rng))
    pairs: tuple[Pair, ...] = ()
    if plan.finds_pairs:
        joint = Joint(objective="logprob", samples=2**count if 1 < count <= EXACT else None)
        pairs = run_one(lm, joint.score_game(game, rng)).pairs
    scores = floats(shapley.scores[0])
    errors = [0.0] * count if shapley.stderr is None else floats(shapley.stderr[0])
    scored: list[Edit] = []
    for edit, score, error in zip(edits, scores, errors, strict=True):
        scored.append(edit._replace(score=score, stderr=error))
    return Diff(
        answer=query.target_texts[0],
        answer_before=query_before.target_texts[0],
        log_p_before=game.table[0, bytes(count)],
        log_p_after=float(game.whole),
        edits=tuple(scored),
        pairs=pairs,
        texts=texts,
    )


def prompt_edits(before: Prompt, after: Prompt) -> list[str]:
    """The edits between two versions as text, such as "[-Lisbon-]{+Rome+}", in their order.

    Raises PromptError: the versions are equal, or chats of other messages.
    """
    _, edits = _find_edits(_messages(before), _messages(after))
    return [_mark(edit) for edit in edits]


def prompt_with_edits(before: Prompt, after: Prompt, *, leave_out: int) -> Prompt:
    """The version after, without one edit: its index among `prompt_edits`."""
    chats = (_messages(before), _messages(after))
    texts, edits = _find_edits(*chats)
    kept = bytes(index != leave_out for index in range(len(edits)))
    messages = _mixture(chats, texts, edits, kept)
    return messages[0]["content"] if isinstance(after, str) else messages


def _change(edit: Edit) -> list[Piece]:
    """An edit as a part of a sentence."""
    before = Piece(plain_label(edit.before), "instead")
    after = Piece(plain_label(edit.after), "cause")
    if not edit.before:
        return [Piece("the new "), after]
    if not edit.after:
        return [Piece("the missing "), before]
    return [after, Piece(" in place of "), before]


def _mark(edit: Edit) -> str:
    """An edit as text, such as "[-Lisbon-]{+Rome+}"."""
    before = f"[-{visible(edit.before)}-]" if edit.before else ""
    after = f"{{+{visible(edit.after)}+}}" if edit.after else ""
    return before + after


class _Plan(NamedTuple):
    """How the edits are scored."""

    method: KernelShap | ShapleySampling
    finds_pairs: bool = True


def _plan(lm: LanguageModel, query: Query, query_before: Query, edits: int) -> _Plan:
    """All mixtures where they are few; else random orders, as many as a chat model may ask.

    Raises ParameterError where a chat model's `max_calls` are too few for one order.
    """
    exact = KernelShap(objective="logprob")
    if not lm.is_text_only:
        sampled = ShapleySampling(objective="logprob", permutations=ORDERS)
        return _Plan(exact if edits <= EXACT else sampled)
    chat: Any = lm
    samples = query.context.samples
    most = chat.max_calls
    calls_after = int(query.context.facts["calls"])
    calls_before = int(query_before.context.facts["calls"])
    left = most - calls_after - calls_before
    if 2**edits * samples <= left:
        return _Plan(exact)
    inputs_of_order = 2 * (edits + 1) * samples  # each order is walked forwards and backwards
    orders = min(ORDERS, left // inputs_of_order)
    if orders < 1:
        raise ParameterError(
            f"{edits} edits take at least {inputs_of_order} requests, and max_calls={most} leave "
            f"{left}. Load the model with more, or join the edits."
        )
    return _Plan(ShapleySampling(objective="logprob", permutations=orders), finds_pairs=False)


def _announce(chat: Any, edits: int) -> None:
    """Says how many requests an endpoint gets, if its answers repeat."""
    samples = chat.repeats or 1
    versions = 2 * (samples if chat.repeats else FIRST)
    mixtures = 2**edits * samples
    if versions + mixtures > chat.max_calls:
        of_order = 2 * (edits + 1) * samples
        mixtures = min(ORDERS, (chat.max_calls - versions) // of_order) * of_order
    say_calls(chat, versions + max(0, mixtures), chat.max_calls)


def _is_clear(edit: Edit) -> bool:
    """Whether an edit has an effect that is large enough, and more than two standard errors."""
    size = abs(edit.score)
    return size >= CLEAR and size > 2 * edit.stderr


def _messages(prompt: Prompt) -> Sequence[Message]:
    """The messages of a chat; a text becomes a single message without a role."""
    if isinstance(prompt, str):
        return [{"content": prompt}]
    return one_text_each(check_messages(prompt))


def _mixture(
    chats: tuple[Sequence[Message], Sequence[Message]],
    texts: Sequence[Sequence[str | int]],
    edits: Sequence[Edit],
    kept: bytes,
) -> list[Message]:
    """The messages with some of the edits: edit i is made where `kept[i]` is 1."""
    choices: list[str] = []
    for edit, is_kept in zip(edits, kept, strict=True):
        choices.append(edit.after if is_kept else edit.before)
    messages: list[Message] = []
    for old, new, pieces in zip(*chats, texts, strict=True):
        text = "".join(choices[piece] if isinstance(piece, int) else piece for piece in pieces)
        # A message that is equal to one of the versions is taken as it is, also where its content
        # is missing and not an empty text.
        if (new.get("content") or "") == text:
            messages.append(new)
        elif (old.get("content") or "") == text:
            messages.append(old)
        else:
            messages.append({**new, "content": text})
    return messages


def _find_edits(
    before: Sequence[Message], after: Sequence[Message]
) -> tuple[tuple[tuple[str | int, ...], ...], list[Edit]]:
    """The pieces of each message (unchanged texts, and indices of edits), and the edits."""
    # Example: "Paris is the capital of" becomes "Rome is the capital of".
    #   pieces: (0, " is the capital of")
    #   edits: [Edit(message=0, start=0, before="Paris", after="Rome")]
    roles_before = [message.get("role") for message in before]
    roles_after = [message.get("role") for message in after]
    if roles_before != roles_after:
        raise PromptError(
            f"The chats have the roles {roles_before} and {roles_after}; "
            "expected the same messages, edited."
        )
    edits: list[Edit] = []
    texts: list[tuple[str | int, ...]] = []
    for index, (old, new) in enumerate(zip(before, after, strict=True)):
        if {**old, "content": ""} != {**new, "content": ""}:
            raise PromptError(
                f"Message {index} differs in more than its content. Edit contents alone."
            )
        texts.append(_find_edits_of_message(index, old, new, edits))
    return tuple(texts), edits


def _find_edits_of_message(
    index: int, old: Message, new: Message, edits: list[Edit]
) -> tuple[str | int, ...]:
    """The pieces of a message; its edits are appended to `edits`."""
    old_words: list[str] = _WORD.findall(old.get("content") or "")
    new_words: list[str] = _WORD.findall(new.get("content") or "")
    matcher = SequenceMatcher(None, old_words, new_words, autojunk=False)
    pieces: list[str | int] = []
    for kind, old_start, old_stop, new_start, new_stop in matcher.get_opcodes():
        removed = "".join(old_words[old_start:old_stop])
        added = "".join(new_words[new_start:new_stop])
        if kind == "equal":
            pieces.append(removed)
        else:
            pieces.append(len(edits))
            edits.append(Edit(index, len("".join(old_words[:old_start])), removed, added))
    return tuple(pieces)
