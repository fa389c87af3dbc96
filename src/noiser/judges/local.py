"""A judge on this machine."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch

from noiser.errors import ParameterError
from noiser.judges.parsing import parse_reply
from noiser.judges.prompts import PAPER_V1, render
from noiser.judges.protocol import JudgeRequest, Usage, Verdict
from noiser.model.language_model import LanguageModel
from noiser.model.quiet import quiet_transformers
from noiser.model.text import encode

__all__ = ["LocalJudge"]

_COMPLETION = "\n\n# Completion:\n"


class LocalJudge:
    """A model of one's own as the judge; the same replies every time.

    It is asked for a single word with the paper's prompt: through its chat template if it has one, else as a text to
    go on with, up to the end of the line. One answer is decoded greedily; several are the final beams of a beam
    search, best first. The model is left as it was.

    Args:
        lm: from `noiser.load_model` or `noiser.wrap`.
        max_new_tokens: the longest reply.

    Attributes:
        name: "local:" and the model's name.

    Raises:
        ParameterError: `max_new_tokens` is below 1.
    """

    def __init__(self, lm: LanguageModel, *, max_new_tokens: int = 16) -> None:
        if max_new_tokens < 1:
            raise ParameterError(f"max_new_tokens is {max_new_tokens!r}; expected an integer of at least 1.")
        self.lm, self.max_new_tokens = lm, max_new_tokens
        self._chats = bool(getattr(lm.tokenizer, "chat_template", None))

    def __repr__(self) -> str:
        return f"LocalJudge({self.lm!r})"

    @property
    def name(self) -> str:
        """What stands in results."""
        return f"local:{self.lm.identity.name}"

    def judge(self, requests: Sequence[JudgeRequest]) -> list[Verdict]:
        """One verdict a request, in order; equal requests are asked once.

        Requests of equal length in tokens go through the model together, so that nothing is padded.

        Raises:
            PromptError: the words do not fit the model's context.
        """
        prompts = {request: self._prompt(request) for request in requests}
        groups: dict[tuple[int, int], list[JudgeRequest]] = {}
        tokens = {request: encode(self.lm.tokenizer, prompt).token_ids for request, prompt in prompts.items()}
        for request, ids in tokens.items():
            groups.setdefault((len(ids), request.count), []).append(request)
        verdicts: dict[JudgeRequest, Verdict] = {}
        for (length, count), members in groups.items():
            size = max(1, self.lm.batch_tokens // ((length + self.max_new_tokens) * count))
            for start in range(0, len(members), size):
                batch = members[start : start + size]
                replies = self._generate([tokens[request] for request in batch], count)
                for request, beams in zip(batch, replies, strict=True):
                    verdicts[request] = self._verdict(request, length, beams)
        return [verdicts[request] for request in requests]

    def _prompt(self, request: JudgeRequest) -> Any:
        text = render(PAPER_V1, request.words)
        return [{"role": "user", "content": text}] if self._chats else text + _COMPLETION

    def _generate(self, prompts: Sequence[tuple[int, ...]], count: int) -> list[list[tuple[int, ...]]]:
        """For each prompt the tokens of `count` replies, best first, up to and including the one that ends them."""
        ids = torch.tensor(prompts, device=self.lm.device)
        options: dict[str, Any] = {"num_beams": count, "num_return_sequences": count}
        if count > 1:
            options |= {"early_stopping": False, "length_penalty": 1.0}
        with self.lm.running(), quiet_transformers(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # on settings of the model's own that greedy decoding does not use
            out = self.lm.model.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                temperature=1.0,
                top_p=1.0,
                top_k=50,
                repetition_penalty=1.0,
                min_new_tokens=None,
                max_new_tokens=self.max_new_tokens,
                eos_token_id=sorted(self._ends),
                pad_token_id=min(self._ends),
                use_cache=True,
                **options,
            )
        new: list[list[int]] = out[:, ids.shape[1] :].tolist()
        whole = [tuple(self._until_the_end(row)) for row in new]
        return [whole[start : start + count] for start in range(0, len(whole), count)]

    def _until_the_end(self, row: Sequence[int]) -> Sequence[int]:
        end = next((at for at, token in enumerate(row) if token in self._ends), len(row) - 1)
        return row[: end + 1]

    @cached_property
    def _ends(self) -> frozenset[int]:
        """Tokens that end a reply: the model's own, and line breaks where it does not know when a turn is over."""
        declared = getattr(self.lm.model.generation_config, "eos_token_id", None)
        ids = [*(declared if isinstance(declared, list) else [declared]), self.lm.tokenizer.eos_token_id]
        ends = {i for i in ids if isinstance(i, int)}
        if not self._chats or not ends:
            names: dict[str, int] = self.lm.tokenizer.get_vocab()
            ends |= {i for name, i in names.items() if "\n" in name or "Ċ" in name or name == "<0x0A>"}
        return frozenset(i for i in ends if i < self.lm.vocabulary_size)

    def _verdict(self, request: JudgeRequest, length: int, beams: Sequence[tuple[int, ...]]) -> Verdict:
        decode = self.lm.tokenizer.decode
        replies = tuple(decode(list(beam), skip_special_tokens=True) for beam in beams)
        readings = [
            parse_reply(reply, cut=beam[-1] not in self._ends) for reply, beam in zip(replies, beams, strict=True)
        ]
        answers = tuple(dict.fromkeys(answer for reading in readings for answer in reading.answers))
        return Verdict(
            status="answered" if answers else "unscored",
            answers=answers,
            reason=None if answers else readings[0].problem,
            prompt=render(PAPER_V1, request.words),
            prompt_version=PAPER_V1.name,
            replies=replies,
            model=self.lm.identity.name,
            usage=Usage(length, sum(map(len, beams))),
        )
