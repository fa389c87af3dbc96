"""When memory runs out, on any device; and what a run will take, where nothing says so but the end of the process."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from noiser.errors import ModelError

if TYPE_CHECKING:
    from noiser.model.language_model import LanguageModel

COPIES = 6
"""How many arrays of float32 [target tokens, vocabulary] are in memory at a time, at most: the clean run's logits and
probabilities, and those of one perturbed sequence with what is read of them."""

LEAST_CHECKED = 2**29
"""Bytes for which it is not worth asking how much memory is free."""

CGROUP = Path("/sys/fs/cgroup")
"""Where Linux says what a container may take."""

_SAID = ("out of memory", "not enough memory", "can't allocate memory", "cannot allocate memory", "alloc_failed")
"""What PyTorch's allocators, the operating system and cuBLAS say."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory ran out, on any device."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    text = str(error).lower()
    return isinstance(error, RuntimeError | OSError) and any(said in text for said in _SAID)


def free_memory() -> None:
    """Gives back what the accelerator's allocator keeps for later; a CPU's keeps nothing."""
    with contextlib.suppress(AttributeError, RuntimeError):
        torch.get_device_module().empty_cache()


def available_memory() -> float:
    """Bytes of main memory that this process may still take; infinite where the system does not say.

    Linux kills a process that takes more, without an error.
    """
    room = [float("inf")]
    with contextlib.suppress(OSError, ValueError, TypeError):
        text = Path("/proc/meminfo").read_text(encoding="ascii")
        room += [1024.0 * int(kib) for kib in re.findall(r"MemAvailable: +(\d+) kB", text)]
    with contextlib.suppress(OSError, ValueError):  # a container's own limit
        names = ("memory.max", "memory.current", "memory.stat")
        limit, used, details = ((CGROUP / name).read_text(encoding="ascii") for name in names)
        files = re.search(r"^inactive_file (\d+)$", details, re.MULTILINE)  # given back as soon as it is wanted
        room.append(float(limit) - float(used) + float(files[1] if files else 0))
    return min(room)


def check_answer(lm: LanguageModel, targets: int) -> None:
    """Raises ModelError when the next-token distributions of so many target tokens do not fit into main memory."""
    _check(
        lm,
        COPIES * 4.0 * targets * lm.vocabulary_size,
        f"{targets} target tokens need about {{}} for distributions over the model's {lm.vocabulary_size:,} tokens",
        "Explain a shorter answer: lower max_new_tokens, or name a part of it as the target and put the rest into the "
        "prompt.",
    )


def check_prompt(lm: LanguageModel, length: int) -> None:
    """Raises ModelError when keys and values of so many tokens, and one layer's activations, do not fit."""
    sizes = _Sizes(lm)
    _check(
        lm,
        length * lm.dtype.itemsize * (sizes.layers * sizes.keys + sizes.activations),
        f"A prompt of {length} tokens needs about {{}} for the keys and values of {sizes.layers} layers",
        "Shorten the prompt, or load the model in a smaller dtype, such as bfloat16.",
    )


def check_backward(lm: LanguageModel, tokens: int, squares: float = 0.0) -> None:
    """Raises ModelError when the activations that a backward pass goes back through do not fit.

    Args:
        lm: the model.
        tokens: of one pass.
        squares: sum of the squared lengths of its sequences, where attention weights are kept; else 0.
    """
    sizes = _Sizes(lm)
    _check(
        lm,
        sizes.layers * lm.dtype.itemsize * (tokens * sizes.activations + 2 * sizes.heads * squares),
        f"A backward pass through {tokens} tokens needs about {{}} for the activations of {sizes.layers} layers",
        "Shorten the prompt, or take a method that only predicts, such as 'occlusion'.",
    )


def check_maps(lm: LanguageModel, length: int) -> None:
    """Raises ModelError when the attention weights of every layer do not fit."""
    sizes = _Sizes(lm)
    _check(
        lm,
        4.0 * length**2 * (sizes.layers + sizes.heads),
        f"Attention weights between {length} tokens need about {{}} in {sizes.layers} layers",
        "Shorten the prompt, or take a method that does not read attention, such as 'occlusion'.",
    )


class _Sizes:
    """Of a model, as its configuration says; 0 where it does not.

    Attributes:
        layers: how many.
        heads: of a layer's attention.
        keys: numbers in a token's key and value in one layer.
        activations: numbers that one layer makes of a token, about.
    """

    def __init__(self, lm: LanguageModel) -> None:
        config: Any = lm.model.config

        def size(*names: str) -> int:
            return next((value for name in names if isinstance(value := getattr(config, name, None), int)), 0)

        config = config.get_text_config() if hasattr(config, "get_text_config") else config
        hidden = size("hidden_size", "n_embd")
        self.layers, self.heads = size("num_hidden_layers", "n_layer"), size("num_attention_heads", "n_head")
        head = size("head_dim") or hidden // max(1, self.heads)
        self.keys = 2 * head * (size("num_key_value_heads") or self.heads)
        self.activations = 8 * hidden + 3 * (size("intermediate_size", "ffn_dim") or 4 * hidden)


def _check(lm: LanguageModel, needed: float, what: str, advice: str) -> None:
    """On an accelerator the allocator says so itself; here the system would end the process without a word."""
    if lm.device.type == "cpu" and needed > LEAST_CHECKED and needed > (free := available_memory()):
        gib = f"{needed / 2**30:.1f} GiB"
        raise ModelError(f"{what.format(gib)}; {free / 2**30:.1f} GiB of memory are free. {advice}")
