"""A judge on this machine."""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Mapping, Sequence
from functools import partial
from typing import Any, Literal

import torch
from jaxtyping import Int
from torch import Tensor

from noiser.checks import check_choice, check_count
from noiser.errors import ParameterError, PromptError
from noiser.judges import prompts
from noiser.judges.prompts import PromptTemplate, prompt_of
from noiser.judges.protocol import JudgeRequest, Verdict
from noiser.judges.reading import ParsedReply, normal_form, parse_reply
from noiser.model.language_model import LanguageModel, check_finite
from noiser.text import bare_words

TokenIds = tuple[int, ...]
_Reply = tuple[ParsedReply, str | None]

_WORD_TOKENS = 8
"""The longest word of a plain completion, in tokens."""


class LocalJudge:
    """A model in this process as the judge; the same replies every time, whatever else is judged.

    Style "chat" asks for a single word with the paper's prompt ("paper-v1"), through the model's
    chat template: one answer is decoded greedily; five are the final beams of a beam search. Style
    "plain" gives the words alone as a text to continue ("words-v1") and takes the first word of
    what follows: from the most probable first token, or for five answers from the most probable
    ones that lead to different words, each continued greedily.

    Args:
        lm: from `noiser.load_model` or `noiser.wrap`.
        style: "chat", "plain" (often better for models of less than about a billion parameters,
            which answer in sentences), or "auto": "chat" where the tokenizer has a chat template.
        max_new_tokens: the longest reply of style "chat".
        prompt: a template in place of the style's own: its registered name, its text, its fields,
            or a `PromptTemplate`. It is asked as the style says, as a chat or as a text to
            continue. One that asks for several answers has one reply, decoded greedily.

    Raises:
        ParameterError: `max_new_tokens` is below 1, or "chat" without a chat template; or `prompt`
            has a system message, or asks for several answers, in style "plain".
        UnknownNameError: another style.
    """

    def __init__(
        self,
        lm: LanguageModel,
        *,
        style: Literal["auto", "chat", "plain"] = "auto",
        max_new_tokens: int = 32,
        prompt: str | Mapping[str, Any] | PromptTemplate | None = None,
    ) -> None:
        check_choice("style", style, ("auto", "chat", "plain"))
        check_count("max_new_tokens", max_new_tokens)
        if not lm.needs_internals:
            needs = (
                f"The local judge needs a model in this process, and {lm.identity.name} runs "
                f"outside of it"
            )
            raise ParameterError(
                f"{needs}; expected judge='local:NAME', or an endpoint, as judge='openai:NAME'."
            )
        if style == "chat" and not lm.chats:
            raise ParameterError(
                "style is 'chat', but the tokenizer has no chat template; expected 'plain' or "
                "'auto'."
            )
        self.lm = lm
        self.max_new_tokens = max_new_tokens
        self.name = f"local:{lm.identity.name}"
        self.style: Literal["chat", "plain"] = "chat" if lm.chats and style != "plain" else "plain"
        own = prompts.PAPER_V1 if self.style == "chat" else prompts.WORDS_V1
        self.prompt = prompt_of(own if prompt is None else prompt)
        if self.style == "plain" and (self.prompt.system or self.prompt.answers):
            raise ParameterError(
                "The judge's prompt has a system message or asks for several answers, and style "
                "'plain' continues a text. Use style='chat', or a template with text alone."
            )

    def judge(self, requests: Sequence[JudgeRequest]) -> list[Verdict]:
        """One verdict per request, in order; those of equal length go through the model together,
        without padding.
        """
        verdicts: dict[JudgeRequest, Verdict] = {}
        groups: dict[tuple[int, int], list[tuple[JudgeRequest, TokenIds]]] = {}
        room = self.max_new_tokens if self.style == "chat" else _WORD_TOKENS
        for request in dict.fromkeys(requests):
            try:
                tokens = self._encode(request, room)
                groups.setdefault((len(tokens), request.count), []).append((request, tokens))
            except PromptError as error:
                verdicts[request] = self._verdict(request, [(ParsedReply((), str(error)), None)])
        for (length, count), members in groups.items():
            width = 1 if count == 1 else 2 * count
            size = max(1, self.lm.batch_tokens // ((length + room) * width))
            for start in range(0, len(members), size):
                batch = members[start : start + size]
                ids = torch.tensor([tokens for _, tokens in batch], device=self.lm.device)
                if self.style == "chat":
                    width = 1 if self.prompt.answers else count
                    rows = self._generate(ids, self.max_new_tokens, beams=width)
                else:  # several tokens may begin the same word, or none
                    rows = self._continue(ids, width)
                for i, (request, _) in enumerate(batch):
                    verdicts[request] = self._read(request, rows[i * width : (i + 1) * width])
        return [verdicts[request] for request in requests]

    def _encode(self, request: JudgeRequest, room: int) -> TokenIds:
        """The tokens of the question. Raises PromptError when there are none, or too many for the
        model.
        """
        if not "".join(request.words).strip():
            raise PromptError("no words")
        messages = self.prompt.messages(request)
        chat = self.style == "chat"
        tokens = self.lm.encode(messages if chat else messages[0]["content"]).token_ids
        if self.lm.context_length and len(tokens) + room > self.lm.context_length:
            raise PromptError(f"{len(tokens)} tokens do not fit the model")
        return tokens

    def _continue(self, ids: Int[Tensor, "batch length"], width: int) -> list[TokenIds]:
        """The beginnings of `width` continuations per text, each from one of the most probable
        first tokens.
        """
        with self.lm.running():
            logits = (
                self.lm.output(self.lm.embed(ids), positions=[ids.shape[1] - 1])
                .logits[:, 0]
                .float()
            )
        check_finite(self.lm, logits.softmax(-1))
        firsts = logits.topk(width).indices.to(ids.device)
        begun = torch.cat([ids.repeat_interleave(width, 0), firsts.reshape(-1, 1)], dim=1)
        rest = self._generate(begun, _WORD_TOKENS - 1)
        return [  # after the end of a text comes another text
            (first, *(() if first in self.lm.end_tokens else more))
            for first, more in zip(firsts.flatten().tolist(), rest, strict=True)
        ]

    def _generate(
        self, ids: Int[Tensor, "batch length"], longest: int, beams: int = 1
    ) -> list[TokenIds]:
        """The new tokens of `beams` rows per prompt, best first, up to and including the one that
        ends them.
        """
        stops = self.lm.end_tokens
        with self.lm.running(), _default_generation(self.lm.model):
            out = self.lm.model.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                num_beams=beams,
                num_return_sequences=beams,
                max_new_tokens=longest,
                eos_token_id=sorted(stops) or None,
                pad_token_id=min(stops, default=0),
            )
        rows: list[list[int]] = out[:, ids.shape[1] :].tolist()
        ends = [
            next((at for at, token in enumerate(row) if token in stops), len(row) - 1)
            for row in rows
        ]
        return [tuple(row[: end + 1]) for row, end in zip(rows, ends, strict=True)]

    def _read(self, request: JudgeRequest, rows: Sequence[TokenIds]) -> Verdict:
        """The verdict of replies, best first; of plain ones those that lead to different words."""
        decode = partial(
            self.lm.tokenizer.decode, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        replies: list[_Reply] = []
        for tokens in rows:
            reply = decode(list(tokens))
            cut = tokens[-1] not in self.lm.end_tokens
            chat = self.style == "chat"
            reading = (
                parse_reply(reply, self.prompt.answers or 1, cut=cut)
                if chat
                else _first_word(reply, decode([tokens[0]]), cut=cut)
            )
            replies.append((reading, reply))
        if self.style == "plain":
            distinct = {
                normal_form("".join(reply[0].answers)): reply for reply in reversed(replies)
            }
            replies = sorted(
                distinct.values(), key=lambda reply: (not reply[0].answers, replies.index(reply))
            )
        return self._verdict(request, replies[: request.count])

    def _verdict(self, request: JudgeRequest, replies: Sequence[_Reply]) -> Verdict:
        answers = tuple(
            dict.fromkeys(answer for reading, _ in replies for answer in reading.answers)
        )
        return Verdict(
            status="answered" if answers else "unscored",
            answers=answers,
            reason=None if answers else replies[0][0].problem,
            prompt=self.prompt.shown(request),
            prompt_version=self.prompt.name,
            replies=tuple(text for _, text in replies if text is not None),
            model=self.lm.identity.name,
        )


@contextlib.contextmanager
def _default_generation(model: Any) -> Generator[None]:
    """Keeps a model's own settings out of `generate`, which takes from them whatever it is not
    told.
    """
    own = model.generation_config
    model.generation_config = type(own)()
    try:
        yield
    finally:
        model.generation_config = own


def _first_word(text: str, first_token: str, *, cut: bool) -> ParsedReply:
    """The first word of a continuation, on its first line; in scripts without spaces, what the
    first token holds.
    """
    line = text.lstrip(" ").split("\n")[0]
    words = bare_words(line)
    at = next((at for at, word in enumerate(words) if normal_form(word)), None)
    if at is None:
        return ParsedReply((), "no word in it" if text.strip() else "empty")
    piece = first_token.strip()
    if len(piece) > len(words[at]) and piece.startswith(words[at]):
        return ParsedReply((piece,), None)
    if cut and at == len(words) - 1 and line == text.lstrip(" "):
        return ParsedReply((), "cut off")
    return ParsedReply((words[at],), None)
