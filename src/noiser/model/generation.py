"""The settings in `generation_config` that make a model's greedy text other than its most probable
tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from noiser.errors import ModelError
from noiser.model.memory import is_out_of_memory
from noiser.model.runtime import put, running

_SAMPLING = {
    "do_sample",
    "temperature",
    "top_k",
    "top_p",
    "top_h",
    "min_p",
    "typical_p",
    "epsilon_cutoff",
    "eta_cutoff",
}
_OF_BEAMS = {  # without several beams they do nothing
    "early_stopping",
    "length_penalty",
    "diversity_penalty",
    "num_beam_groups",
    "num_return_sequences",
    "low_memory",
}
_TOKENS = {"bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id"}
_LENGTH = {"max_length", "max_new_tokens"}  # the caller's own
_OUTPUT = {
    "output_attentions",
    "output_hidden_states",
    "output_logits",
    "output_scores",
    "return_dict_in_generate",
}
_SPEED = {  # how the same tokens are found
    "assistant_confidence_threshold",
    "assistant_early_exit",
    "assistant_ensemble_weight",
    "assistant_lookbehind",
    "cache_config",
    "cache_implementation",
    "compile_config",
    "continuous_batching_config",
    "disable_compile",
    "is_assistant",
    "max_cache_len",
    "max_matching_ngram_size",
    "num_assistant_tokens",
    "num_assistant_tokens_schedule",
    "prefill_chunk_size",
    "prompt_lookup_num_tokens",
    "speculation_type",
    "target_lookbehind",
    "use_cache",
    "use_mtp",
}
_NUMBERS = {"remove_invalid_values", "renormalize_logits"}  # the most probable token stays the same
_SAME_TEXT = frozenset(
    _SAMPLING
    | _OF_BEAMS
    | _TOKENS
    | _LENGTH
    | _OUTPUT
    | _SPEED
    | _NUMBERS
    | {"transformers_version"}
)

_OFF: dict[str, float] = {
    "num_beams": 1,
    "repetition_penalty": 1,
    "encoder_repetition_penalty": 1,
    "guidance_scale": 1,
    "no_repeat_ngram_size": 0,
    "encoder_no_repeat_ngram_size": 0,
    "min_length": 0,
    "min_new_tokens": 0,
    "penalty_alpha": 0,
}
"""Values with which a setting does nothing, besides None, False and empty ones."""

_PLAIN: dict[str, Any] = {
    "cache_implementation": None,
    "return_dict_in_generate": False,
    "prompt_lookup_num_tokens": None,
    "num_return_sequences": None,
}
"""Settings that are put aside while `generate()` runs: they change no text, and may not fit the
machine or the call.
"""


def text_settings(config: Any) -> dict[str, Any]:
    """The settings of a `GenerationConfig` with which greedy text is not just the most probable
    tokens.
    """
    from transformers import GenerationConfig

    if config is None:
        return {}
    found: dict[str, Any] = {}
    for name, default in vars(GenerationConfig()).items():
        value = getattr(config, name, None)
        is_off = value is None or value is False or value == default
        if name in _OFF:
            is_off = is_off or value == _OFF[name]
        elif isinstance(value, list | tuple | dict | str):
            is_off = is_off or not value
        if not (is_off or name in _SAME_TEXT or name.startswith("_")):
            found[name] = value
    return found


def describe_settings(settings: dict[str, Any]) -> str:
    """Settings as text, such as "num_beams=3"."""
    return ", ".join(f"{name}={value!r:.60}" for name, value in settings.items())


def set_aside(model: Any) -> None:
    """Puts settings aside that change no text, until what is `running` ends."""
    state = vars(model.generation_config)
    for name, value in _PLAIN.items():
        if state.get(name, value) != value:
            put(model, state, name, value)


def reading_options(tokenizer: Any, settings: dict[str, Any]) -> dict[str, Any]:
    """The arguments that `generate()` needs to read text, where some of its settings are text."""
    return {"tokenizer": tokenizer} if {"stop_strings", "token_healing"} & {*settings} else {}


def greedy_text(
    lm: Any, token_ids: Sequence[int], count: int, settings: dict[str, Any]
) -> list[int]:
    """The tokens of the model's own `generate()` without sampling.

    Raises:
        ModelError: `generate()` fails with these settings, or changes the prompt.
    """
    ids = torch.tensor([token_ids], device=lm.device)
    options = {"attention_mask": torch.ones_like(ids), "do_sample": False, "max_new_tokens": count}
    options |= reading_options(lm.tokenizer, settings)
    try:
        with running(lm.model):
            set_aside(lm.model)
            found: list[int] = lm.model.generate(ids, **options)[0].tolist()
    except Exception as error:
        if is_out_of_memory(error):
            raise
        raise generate_failed(lm, settings, f"{type(error).__name__}: {error}") from error
    if found[: len(token_ids)] != [*token_ids]:
        raise generate_failed(lm, settings, "it changes the last tokens of the prompt.")
    return found[len(token_ids) :]


def generate_failed(lm: Any, settings: dict[str, Any], reason: str) -> ModelError:
    """The error for settings with which `generate()` gives no continuation of a prompt."""
    named = describe_settings(settings) or "its settings"
    return ModelError(
        f"generate() of {lm.identity.name} gives no continuation of this prompt with {named}: "
        f"{reason:.300} "
        "Name a target, or change these settings in model.generation_config."
    )
