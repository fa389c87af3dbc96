"""A judge on this machine."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from functools import cached_property
from typing import Any, Literal

import torch
from jaxtyping import Int
from torch import Tensor

from noiser.errors import ParameterError, UnknownNameError
from noiser.judges.matching import normal_form
from noiser.judges.parsing import Reading, parse_reply
from noiser.judges.prompts import PAPER_V1, WORDS_V1, render
from noiser.judges.protocol import JudgeRequest, Usage, Verdict
from noiser.model.checkpoint import quiet_transformers
from noiser.model.language_model import LanguageModel
from noiser.model.text import encode
from noiser.spans import word_spans

__all__ = ["LocalJudge", "check_settings"]

Tokens = tuple[int, ...]

_WORD_TOKENS = 8
"""The longest word that a plain completion is waited for, in tokens."""


def check_settings(*, style: str = "auto", max_new_tokens: int = 32) -> None:
    """What can be told of a local judge's settings without its model. Raises what `LocalJudge` does."""
    if style not in ("auto", "chat", "plain"):
        raise UnknownNameError("style", style, ("auto", "chat", "plain"))
    if max_new_tokens < 1:
        raise ParameterError(f"max_new_tokens is {max_new_tokens!r}; expected an integer of at least 1.")


class LocalJudge:
    """A model of one's own as the judge; the same replies every time.

    Style "chat" asks for a single word with the paper's prompt ("paper-v1"), through the model's chat template: one
    answer is decoded greedily; five are the final beams of a beam search, best first. Style "plain" gives the words
    alone as a text to go on with ("words-v1") and takes the first word of what follows: from the most probable first
    token, or for five answers from the most probable ones that lead to different words, each continued greedily.

    The model is left as it was. Replies do not depend on what else is judged.

    Args:
        lm: from `noiser.load_model` or `noiser.wrap`.
        style: "chat", "plain", or "auto": "chat" where the tokenizer has a chat template. Instruction-tuned models of
            less than about a billion parameters often answer in sentences; "plain" can be the better judge there.
        max_new_tokens: the longest reply of style "chat".

    Attributes:
        name: "local:" and the model's name.

    Raises:
        ParameterError: `max_new_tokens` is below 1, or "chat" without a chat template.
        UnknownNameError: another style.
    """

    def __init__(
        self, lm: LanguageModel, *, style: Literal["auto", "chat", "plain"] = "auto", max_new_tokens: int = 32
    ) -> None:
        check_settings(style=style, max_new_tokens=max_new_tokens)
        chats = bool(getattr(lm.tokenizer, "chat_template", None))
        if style == "chat" and not chats:
            raise ParameterError("style is 'chat', but the tokenizer has no chat template; expected 'plain' or 'auto'.")
        self.lm, self.max_new_tokens = lm, max_new_tokens
        self.style: Literal["chat", "plain"] = "chat" if chats and style != "plain" else "plain"

    def __repr__(self) -> str:
        return f"LocalJudge({self.lm!r}, style={self.style!r})"

    @property
    def name(self) -> str:
        """What stands in results."""
        return f"local:{self.lm.identity.name}"

    def judge(self, requests: Sequence[JudgeRequest]) -> list[Verdict]:
        """One verdict a request, in order; equal requests are asked once.

        Requests of equal length in tokens go through the model together, so that nothing is padded. A request whose
        words the model cannot read, because they are too many, is unscored.
        """
        verdicts: dict[JudgeRequest, Verdict] = {}
        groups: dict[tuple[int, int], list[tuple[JudgeRequest, Tokens]]] = {}
        room = self.max_new_tokens if self.style == "chat" else _WORD_TOKENS
        for request in dict.fromkeys(requests):
            tokens = self._encoded(request)
            if tokens and len(tokens) + room <= (self.lm.context_length or len(tokens) + room):
                groups.setdefault((len(tokens), request.count), []).append((request, tokens))
            else:
                problem = f"{len(tokens)} tokens do not fit the model" if tokens else "no words"
                verdicts[request] = self._verdict(request, problem)
        for (length, count), members in groups.items():
            size = max(1, self.lm.batch_tokens // ((length + room) * (count if count == 1 else 2 * count)))
            for start in range(0, len(members), size):
                batch = members[start : start + size]
                ids = torch.tensor([tokens for _, tokens in batch], device=self.lm.device)
                found = self._ask(ids, count) if self.style == "chat" else self._complete(ids, count)
                for (request, _), verdict in zip(batch, found, strict=True):
                    verdicts[request] = self._verdict(request, *verdict)
        return [verdicts[request] for request in requests]

    def _encoded(self, request: JudgeRequest) -> Tokens:
        if self.style == "chat":
            chat = [{"role": "user", "content": render(PAPER_V1, request.words)}]
            return encode(self.lm.tokenizer, chat).token_ids
        text = render(WORDS_V1, request.words)
        return encode(self.lm.tokenizer, text).token_ids if text.strip() else ()

    def _ask(self, ids: Int[Tensor, "batch length"], count: int) -> list[tuple[list[Reading], list[str], Usage]]:
        """What the beams of each prompt say, best first."""
        rows = self._generate(ids, self.max_new_tokens, beams=count)
        found: list[tuple[list[Reading], list[str], Usage]] = []
        for start in range(0, len(rows), count):
            beams = rows[start : start + count]
            replies = [self._decoded(beam) for beam in beams]
            readings = [
                parse_reply(reply, cut=beam[-1] not in self._ends) for reply, beam in zip(replies, beams, strict=True)
            ]
            found.append((readings, replies, Usage(ids.shape[1], sum(map(len, beams)))))
        return found

    def _complete(self, ids: Int[Tensor, "batch length"], count: int) -> list[tuple[list[Reading], list[str], Usage]]:
        """The words that each text goes on with, most probable first token first."""
        width = 1 if count == 1 else 2 * count  # several tokens may begin the same word, or none
        with self.lm.running():
            probabilities = self.lm.probabilities(self.lm.embed(ids), positions=[ids.shape[1] - 1])[:, 0]
        firsts = probabilities.topk(min(width, probabilities.shape[-1])).indices.to(ids.device)
        width = firsts.shape[1]
        begun = torch.cat([ids.repeat_interleave(width, 0), firsts.reshape(-1, 1)], dim=1)
        rest = self._generate(begun, _WORD_TOKENS - 1)
        ended = [int(first) in self._ends for first in firsts.flatten()]  # it says nothing, and what follows is no word
        rows = [
            (int(first), *([] if over else more))
            for first, more, over in zip(firsts.flatten(), rest, ended, strict=True)
        ]
        found: list[tuple[list[Reading], list[str], Usage]] = []
        for start in range(0, len(rows), width):
            readings: dict[str, Reading] = {}
            replies: dict[str, str] = {}
            for row in rows[start : start + width]:
                reply = self._decoded(row)
                reading = _first_word(reply, self._decoded(row[:1]), cut=row[-1] not in self._ends)
                word = normal_form("".join(reading.answers))
                readings.setdefault(word, reading)
                replies.setdefault(word, reply)
            kept = sorted(readings, key=lambda word: not word)[:count]  # what holds no word comes last
            usage = Usage(ids.shape[1], sum(map(len, rows[start : start + width])))
            found.append(([readings[word] for word in kept], [replies[word] for word in kept], usage))
        return found

    def _generate(self, ids: Int[Tensor, "batch length"], longest: int, beams: int = 1) -> list[Tokens]:
        """The new tokens of `beams` rows a prompt, best first, up to and including the one that ends them."""
        with self.lm.running(), quiet_transformers(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about settings of the model's own that are not used here
            out = self.lm.model.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                temperature=1.0,
                top_p=1.0,
                top_k=50,
                repetition_penalty=1.0,
                num_beams=beams,
                num_return_sequences=beams,
                length_penalty=1.0,
                early_stopping=False,
                min_new_tokens=None,
                max_new_tokens=longest,
                eos_token_id=sorted(self._ends) or None,
                pad_token_id=min(self._ends, default=0),
                return_dict_in_generate=False,
            )
        rows: list[list[int]] = out[:, ids.shape[1] :].tolist()
        ends = [next((at for at, token in enumerate(row) if token in self._ends), len(row) - 1) for row in rows]
        return [tuple(row[: end + 1]) for row, end in zip(rows, ends, strict=True)]

    def _decoded(self, tokens: Sequence[int]) -> str:
        return self.lm.tokenizer.decode(list(tokens), skip_special_tokens=True, clean_up_tokenization_spaces=False)

    @cached_property
    def _ends(self) -> frozenset[int]:
        """Tokens with which the model ends a text or its turn."""
        declared: Any = getattr(self.lm.model.generation_config, "eos_token_id", None)
        ids = [*(declared if isinstance(declared, list) else [declared]), self.lm.tokenizer.eos_token_id]
        return frozenset(i for i in ids if isinstance(i, int) and i < self.lm.vocabulary_size)

    def _verdict(
        self,
        request: JudgeRequest,
        found: Sequence[Reading] | str,
        replies: Sequence[str] = (),
        usage: Usage | None = None,
    ) -> Verdict:
        template = PAPER_V1 if self.style == "chat" else WORDS_V1
        readings = [Reading((), found)] if isinstance(found, str) else found
        answers = tuple(dict.fromkeys(answer for reading in readings for answer in reading.answers))
        return Verdict(
            status="answered" if answers else "unscored",
            answers=answers,
            reason=None if answers else readings[0].problem,
            prompt=render(template, request.words),
            prompt_version=template.name,
            replies=tuple(replies),
            model=self.lm.identity.name,
            usage=usage,
        )


def _first_word(text: str, first_token: str, *, cut: bool) -> Reading:
    """The first word of a continuation, on its first line.

    In scripts without spaces, where each character is a word, it is what the first token holds.
    """
    line = text.lstrip(" ").split("\n")[0]
    words = [line[start:end].strip() for start, end in word_spans(line)]
    at = next((at for at, word in enumerate(words) if normal_form(word)), None)
    if at is None:
        return Reading((), "no word in it" if text.strip() else "empty")
    piece = first_token.strip()
    if len(piece) > len(words[at]) and piece.startswith(words[at]):
        return Reading((piece,), None)
    if cut and at == len(words) - 1 and line == text.lstrip(" "):
        return Reading((), "cut off")
    return Reading((words[at],), None)
