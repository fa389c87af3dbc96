"""What passes cost beside the usual way: seconds, the host's work, kernels in a pass.

Two workloads: short prompts as one list, and one long prompt by sentence with an answer of a
sentence. The usual way is what a user writes with transformers: each input whole, in padded
batches. `devices.py` runs them.

Kernels are counted by PyTorch's dispatcher: operations that make new numbers, from the changes of a
pass to its logits, which on a card are at least as many launches. Beside them are those of the
model's own forward pass of one prompt.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.utils._python_dispatch import TorchDispatchMode

import noiser
from measuring import TEXT, ForwardClock, operations
from noiser.methods import Method
from noiser.model import LanguageModel

SHORT: dict[str, tuple[Method, str]] = {
    "joint": (noiser.Joint(), "token"),
    "occlusion": (noiser.Occlusion(), "token"),
    "attention_gradient": (noiser.AttentionGradient(), "sentence"),
    "input_x_gradient": (noiser.InputXGradient(), "token"),
    "attn_lrp": (noiser.AttnLrp(), "token"),
}
"""Methods of short prompts, and what they score."""

LONG: dict[str, Method] = {
    "occlusion": noiser.Occlusion(),
    "attention_gradient": noiser.AttentionGradient(),
}

BATCH = 32  # inputs of a padded batch, short prompts
LONG_BATCH = 4
MOST_INPUTS = 16  # of the usual way with a long prompt; its seconds are scaled up to all sentences
ANSWER = " The keeper climbed the stairs of the lighthouse every evening before sunset"


class KernelCount(TorchDispatchMode):
    """Counts operations that make new numbers while it is entered."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        returned = func._schema.returns
        is_view = any(each.alias_info and not each.alias_info.is_write for each in returned)
        self.count += not is_view
        return func(*args, **(kwargs or {}))


def word_tokenizer(texts: Sequence[str]) -> Any:
    """A tokenizer whose tokens are the words of some texts."""
    splits = pre_tokenizers.Whitespace()
    words = sorted({word for text in texts for word, _ in splits.pre_tokenize_str(text)})
    vocabulary = {word: number for number, word in enumerate(["<unk>", "</s>", *words])}
    raw = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    raw.pre_tokenizer = splits
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=raw, eos_token="</s>", unk_token="<unk>"
    )


def long_prompt(tokenizer: Any, tokens: int) -> tuple[str, list[str]]:
    """A prompt of notes with at least so many tokens, and its notes."""
    words = TEXT.split(" ")
    notes: list[str] = []
    while len(tokenizer(" ".join(notes))["input_ids"]) < tokens:
        first = 7 * len(notes) % 60
        note = " ".join(words[first : first + 22]).capitalize().strip(",")
        notes.append(f"Note {len(notes)}: {note}.")
    question = "Question: who climbed the stairs in note 7?"
    return " ".join(notes) + f"\n{question}\nAnswer:", notes


@contextmanager
def counted_passes(lm: LanguageModel, count: KernelCount) -> Generator[None]:
    """Within it the kernels of passes are counted."""
    run = lm.run_packed

    def counted(*args: Any, **options: Any) -> Any:
        with count:
            return run(*args, **options)

    with patch.object(lm, "run_packed", counted):
        yield


def kernels_of_model(lm: LanguageModel, tokens: int = 64) -> int:
    """The kernels of the model's own forward pass."""
    inputs = lm.embed(torch.arange(tokens)[None] % lm.vocabulary_size)
    with torch.no_grad(), KernelCount() as count:
        lm.model(inputs_embeds=inputs, use_cache=False, logits_to_keep=1)
    return count.count


def finish(lm: LanguageModel) -> None:
    """Waits for the device."""
    if lm.device.type == "cuda":
        torch.cuda.synchronize(lm.device)


def cost(
    lm: LanguageModel, run: Callable[[], object], top: float, *, counts_kernels: bool
) -> dict[str, Any]:
    """Seconds, passes, kernels and the share of the peak of a call, after one that warms up."""
    run()
    finish(lm)
    with ForwardClock(lm) as clock:
        begin, host = time.perf_counter(), time.process_time()
        run()
        finish(lm)
        took, work = time.perf_counter() - begin, time.process_time() - host
    row = {
        "seconds": took,
        "host seconds": work,
        "passes": clock.passes,
        "token-forwards": clock.tokens,
        "share of peak, %": 100 * operations(lm, clock.tokens, clock.rows) / took / top,
    }
    if counts_kernels:
        count = KernelCount()
        with counted_passes(lm, count):
            run()
        kernels = count.count / max(1, clock.passes)
        row |= {"kernels a pass": kernels, "beside the model's": kernels / kernels_of_model(lm)}
    return row


def short_rows(
    lm: LanguageModel, prompts: Sequence[str], top: float, *, compiles: bool = False
) -> list[dict[str, Any]]:
    """A row for each method of short prompts as one list, and the usual way.

    Where attention compiles, kernels cannot be counted; the usual way, which is the same, is not
    run again.
    """
    rows: list[dict[str, Any]] = []
    for name, (method, unit) in SHORT.items():
        run = partial(noiser.attribute, lm, list(prompts), method=method, unit=unit)
        measured = cost(lm, run, top, counts_kernels=not compiles)
        rows.append({"workload": f"{len(prompts)} short prompts", "method": name} | measured)
    if compiles:
        return rows
    begin = time.perf_counter()
    tokens = sum(leave_one_out(lm, prompt) for prompt in prompts)
    finish(lm)
    rows.append(
        {
            "workload": f"{len(prompts)} short prompts",
            "method": "occlusion, the usual way",
            "seconds": time.perf_counter() - begin,
            "token-forwards": tokens,
        }
    )
    return rows


@torch.no_grad()
def leave_one_out(lm: LanguageModel, prompt: str) -> int:
    """Each token's row set to zero in turn, in batches; the tokens that ran."""
    ids = lm.tokenizer(prompt, return_tensors="pt")["input_ids"].to(lm.device)
    inputs = lm.embed(ids)
    length = inputs.shape[1]
    target = int(lm.model(inputs_embeds=inputs).logits[0, -1].argmax())
    changed = inputs.repeat(length, 1, 1)
    changed[torch.arange(length), torch.arange(length)] = 0
    found: list[torch.Tensor] = []
    for part in changed.split(BATCH):
        logits = lm.model(inputs_embeds=part).logits[:, -1]
        found.append(logits.float().log_softmax(-1)[:, target])
    torch.cat(found).cpu()
    return length * (length + 1)


def long_rows(
    lm: LanguageModel, tokens: int, top: float, *, compiles: bool = False
) -> list[dict[str, Any]]:
    """The same of one long prompt by sentence."""
    prompt, notes = long_prompt(lm.tokenizer, tokens)
    asked: dict[str, Any] = {"target": ANSWER, "target_unit": "all", "unit": "sentence"}
    rows: list[dict[str, Any]] = []
    for name, method in LONG.items():

        def run(method: Method = method) -> object:
            return noiser.attribute(lm, prompt, method=method, **asked)

        measured = cost(lm, run, top, counts_kernels=not compiles)
        rows.append({"workload": f"{tokens} tokens", "method": name} | measured)
    if compiles:
        return rows
    begin = time.perf_counter()
    ran = delete_sentences(lm, prompt, notes[:MOST_INPUTS])
    finish(lm)
    took = (time.perf_counter() - begin) * len(notes) / min(len(notes), MOST_INPUTS)
    usual = {"workload": f"{tokens} tokens", "method": "occlusion, the usual way"}
    rows.append(usual | {"seconds": took, "token-forwards": ran})
    return rows


@torch.no_grad()
def delete_sentences(lm: LanguageModel, prompt: str, notes: Sequence[str]) -> int:
    """The answer's log p without each sentence, in padded batches; the tokens that ran."""
    answer = lm.tokenizer(ANSWER, add_special_tokens=False)["input_ids"]
    wanted = torch.tensor(answer, device=lm.device)
    sequences = [
        lm.tokenizer(prompt.replace(f"{note} ", "", 1))["input_ids"] + answer for note in notes
    ]
    ran = 0
    for first in range(0, len(sequences), LONG_BATCH):
        batch = sequences[first : first + LONG_BATCH]
        longest = max(map(len, batch))
        ids = torch.tensor([[0] * (longest - len(row)) + row for row in batch])
        mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in batch])
        logits = lm.model(
            input_ids=ids.to(lm.device),
            attention_mask=mask.to(lm.device),
            logits_to_keep=len(answer) + 1,
        ).logits
        log_p = logits[:, :-1].float().log_softmax(-1)
        log_p.gather(-1, wanted[None, :, None].expand(len(batch), -1, 1)).sum((1, 2)).cpu()
        ran += ids.numel()
    return ran
