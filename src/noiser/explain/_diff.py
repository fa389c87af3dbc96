"""`noiser.diff`: two versions of a prompt in, the part of each edit in the change of the answer out."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from html import escape
from os import PathLike
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch

from noiser.attribution.display import label, visible
from noiser.attribution.markdown import escaped_line, markdown_table
from noiser.attribution.markup import css
from noiser.attribution.relations import WORDS
from noiser.attribution.saved import SavedResult
from noiser.attribution.store import SavedNumber, restored, to_jsonable
from noiser.checks import check_seed
from noiser.engine import Key, StoredGame, prepare, run_one
from noiser.errors import ParameterError, PromptError
from noiser.explain.many import run_many
from noiser.files import written
from noiser.html import html_page, html_table
from noiser.methods import Joint, KernelShap, ShapleySampling
from noiser.model.language_model import LanguageModel, check_model
from noiser.numbers import number_format
from noiser.text import as_prompt, check_messages, one_text_each
from noiser.types import Message, Pair, Progress, Prompt, Question

if TYPE_CHECKING:
    from pandas import DataFrame

EXACT = 8  # edits up to which every mixture of both versions is run
ORDERS = 10  # random orders of more edits, each walked forwards and backwards

_WORD = re.compile(r"\s*\S+|\s+\Z")


class Edit(NamedTuple):
    """A piece `before`, at offset `start` of the text before, and the text `after` in its place; "" for nothing.

    Attributes:
        message: index of the message in a chat; 0 of a text.
        score: the edit's part in the change of the answer's log-probability, in nats: its Shapley value.
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
        pairs: edits that act only together, or of which either would do; `units` are indices of `edits`.
        texts: for each message (or for the text) what stands between the edits: texts, and indices of edits.
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
        places = [piece for text in self.texts for piece in text if isinstance(piece, int)]
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
        texts = self._texts([f"{mark}({index})" for index, mark in enumerate(marks, 1)], visible)
        rows = (f"  ({index + 1}) {score}  {marks[index]}" for index, score in self._ranked())
        return "\n".join([*texts, "", *self._facts(), *rows])

    def _marks(self) -> list[str]:
        """Each edit as text, such as "[-Lisbon-]{+Rome+}"."""
        marks: list[str] = []
        for edit in self.edits:
            before = f"[-{visible(edit.before)}-]" if edit.before else ""
            after = f"{{+{visible(edit.after)}+}}" if edit.after else ""
            marks.append(before + after)
        return marks

    def _texts(self, marks: Sequence[str], show: Callable[[str], str]) -> list[str]:
        """Each message, with a mark in the place of each edit."""
        return [
            "".join(marks[piece] if isinstance(piece, int) else show(piece) for piece in t)
            for t in self.texts
        ]

    def _ranked(self) -> list[tuple[int, str]]:
        """The index and score of each edit, the largest first."""
        show = number_format([edit.score for edit in self.edits])
        signed = [
            f"{'+' * (e.score > 0)}{show.with_error(e.score, e.stderr or torch.nan)}"
            for e in self.edits
        ]
        return sorted(enumerate(signed), key=lambda pair: -abs(self.edits[pair[0]].score))

    def _facts(self) -> Iterator[str]:
        one, other = self.log_p_before, self.log_p_after
        yield f"log-probability of {self.answer!r}: {one:.3f} before, {other:.3f} after, {other - one:+.3f} nats"
        yield f"the answer before: {self.answer_before!r}"
        for pair in self.pairs:
            first, second = (unit + 1 for unit in pair.units)
            yield f"({first}) and ({second}): {WORDS[pair.kind][0]}"

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
        rows = [["edit", "nats", "before", "after"]]
        for index, score in self._ranked():
            edit = self.edits[index]
            rows.append([str(index + 1), score, label(edit.before), label(edit.after)])
        lines = [*map(escaped_line, texts), *map(escaped_line, self._facts())]
        return "\n\n".join([*lines, markdown_table(rows, (1,))]) + "\n"

    def to_html(self, path: str | PathLike[str] | None = None) -> str:
        """A complete page without network and scripts, written to `path` if given."""
        style = "body { margin: 1.5rem auto; max-width: 48rem; padding: 0 1rem; }"
        return written(
            html_page("Edits and their effect", style, f"<main>{self._repr_html_()}</main>"), path
        )

    def _repr_html_(self) -> str:
        scores = dict(self._ranked())
        marks = [
            f'<span class={"plus" if edit.score > 0 else "minus"} title="{scores[index]}"><del>{escape(edit.before)}'
            f"</del><ins>{escape(edit.after)}</ins><sup>{index + 1}</sup></span>"
            for index, edit in enumerate(self.edits)
        ]
        texts = "".join(f"<p class=text dir=auto>{text}</p>" for text in self._texts(marks, escape))
        facts = "".join(f"<p>{escape(fact)}</p>" for fact in self._facts())
        rows = [[f"{index + 1}", score, marks[index]] for index, score in scores.items()]
        body = f"{texts}{facts}{html_table(['edit', 'nats', ''], rows)}"
        return f'<style>{css("explain", "diff.css")}</style><div class="noiser-diff">{body}</div>'


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

    The words that differ are edits, the players of a game whose inputs are mixtures of both versions; an edit's score
    is its Shapley value. Up to 8 edits all mixtures are run; of more, random orders are.

    Args:
        lm: from `noiser.load_model` or `noiser.wrap`.
        before: a text, or chat messages.
        after: the same with edits; of a chat as many messages, with the same roles.
        target: the answer to explain. None: the greedy answer to `after`.
        max_new_tokens: the most tokens of a greedy answer.
        seed: of the random orders.
        progress: called with (done, expected) mixtures.

    Raises:
        PromptError: the versions are equal, or chats of other messages.

    Example:
        >>> print(noiser.diff(lm, "Paris is the capital of", "Rome is the capital of"))  # doctest: +SKIP
    """
    check_model(lm)
    before, after = (as_prompt(lm.tokenizer, prompt) for prompt in (before, after))
    if isinstance(before, str) != isinstance(after, str):
        raise PromptError(
            "One version is a text and the other a chat; expected two texts, or two chats."
        )
    chats = [
        [{"content": each}] if isinstance(each, str) else one_text_each(check_messages(each))
        for each in (before, after)
    ]
    texts, edits = _pieces(*chats)
    asked: Any = {"max_new_tokens": max_new_tokens, "target_unit": "all"}
    query = run_one(lm, prepare(lm, Question(prompt=after, target=target, **asked)))
    former = run_one(lm, prepare(lm, Question(prompt=before, **asked)))

    def mixture(kept: bytes) -> Prompt:
        """The prompt with some of the edits."""
        chosen = [
            edit.after if is_kept else edit.before
            for edit, is_kept in zip(edits, kept, strict=True)
        ]
        messages: list[Message] = []
        for old, new, pieces in zip(*chats, texts, strict=True):
            text = "".join(chosen[piece] if isinstance(piece, int) else piece for piece in pieces)
            same = (one for one in (new, old) if (one.get("content") or "") == text)
            messages.append(next(same, {**new, "content": text}))
        return messages[0]["content"] if isinstance(after, str) else messages

    async def log_p(kept: bytes) -> float:
        mixed = await prepare(
            lm, Question(prompt=mixture(kept), target=query.target_ids, target_unit="all")
        )
        return float(mixed.read_clean(read))

    async def play(wanted: Sequence[Key]) -> Mapping[Key, float]:
        return dict(
            zip(wanted, run_many(lm, [log_p(kept) for _, kept in wanted], progress), strict=True)
        )

    count, rng, read = (
        len(edits),
        torch.Generator().manual_seed(check_seed(seed)),
        query.score("logprob"),
    )
    game = StoredGame(
        torch.ones(1, count, dtype=torch.bool), query.read_clean(read), "logprob", play=play
    )
    exact = count <= EXACT
    method = (
        KernelShap(score="logprob")
        if exact
        else ShapleySampling(score="logprob", permutations=ORDERS)
    )
    found = run_one(lm, method.play(game, rng))
    pairs = run_one(
        lm,
        Joint(score="logprob", samples=2**count if exact and count > 1 else None).play(game, rng),
    ).pairs
    errors = torch.zeros(count) if found.stderr is None else found.stderr[0]
    numbers = zip(edits, found.scores[0].tolist(), errors.tolist(), strict=True)
    return Diff(
        answer=query.target_texts[0],
        answer_before=former.target_texts[0],
        log_p_before=game.table[0, bytes(count)],
        log_p_after=float(game.whole),
        edits=tuple(edit._replace(score=score, stderr=error) for edit, score, error in numbers),
        pairs=pairs,
        texts=texts,
    )


def _pieces(
    before: Sequence[Message], after: Sequence[Message]
) -> tuple[tuple[tuple[str | int, ...], ...], list[Edit]]:
    """Texts and indices of edits, for each message, and the edits."""
    roles = [[message.get("role") for message in chat] for chat in (before, after)]
    if roles[0] != roles[1]:
        raise PromptError(
            f"The chats have the roles {roles[0]} and {roles[1]}; expected the same messages, edited."
        )
    edits, texts = list[Edit](), list[tuple[str | int, ...]]()
    for index, (old, new) in enumerate(zip(before, after, strict=True)):
        if {**old, "content": ""} != {**new, "content": ""}:
            raise PromptError(
                f"Message {index} differs in more than its content. Edit contents alone."
            )
        pieces: list[str | int] = []
        one, other = (_WORD.findall(message.get("content") or "") for message in (old, new))
        for kind, a, b, c, d in SequenceMatcher(None, one, other, autojunk=False).get_opcodes():
            gone, come = "".join(one[a:b]), "".join(other[c:d])
            pieces.append(gone if kind == "equal" else len(edits))
            if kind != "equal":
                edits.append(Edit(index, len("".join(one[:a])), gone, come))
        texts.append(tuple(pieces))
    if not edits:
        raise PromptError("Both versions of the prompt are the same. Give two that differ.")
    return tuple(texts), edits
