"""A model's own answer, piece by piece, by `generate()`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from noiser.errors import NoiserError, UnsupportedModelError
from noiser.model.generation import generate_failed, reading_options, text_settings
from noiser.model.language_model import LanguageModel
from noiser.model.packing import continued
from noiser.model.runtime import twin
from noiser.text.tokens import continuation


def write(
    lm: LanguageModel,
    prompt_ids: Sequence[int],
    hear: Callable[[str, Sequence[int]], bool],
    *,
    max_new_tokens: int,
    temperature: float | None = None,
    top_p: float | None = None,
    seed: int | None = None,
) -> str:
    """The reason why an answer ended: "stop", or "length" where it has as many tokens as it may.

    `hear` is called with each piece of text and its tokens, and says whether to go on. Settings
    that are None are the model's own; temperature 0 is greedy. A copy of the network writes, with
    the same weights in the same memory and the same hooks, so it waits for no pass that explains;
    its keys and values of the prompt are known to the model then.
    """
    if not lm.needs_internals:
        raise UnsupportedModelError(
            f"{lm.identity.name} runs elsewhere. Name its server as --upstream."
        )
    read = [*prompt_ids]
    waiting = list[int]()
    goes_on = True
    count = len(prompt_ids)

    def tell(most: int) -> None:
        """Passes on the text of new tokens; those that end within a character, up to `most`, wait
        for the next.
        """
        nonlocal goes_on
        piece, _ = continuation(lm.tokenizer, read, waiting)
        if waiting and (not piece.endswith("\ufffd") or len(waiting) > most):
            goes_on = hear(piece, [*waiting])
            read.extend(waiting)
            waiting.clear()

    def take(tokens: Sequence[int]) -> None:
        """Passes on tokens of the text, one after the other."""
        for token in tokens:
            if goes_on and token not in lm.end_tokens:
                waiting.append(token)
                tell(most=4)

    def ended(ids: Tensor, _scores: object) -> Tensor:
        """Called after new tokens, which have yet to run."""
        nonlocal count
        if (
            not lm.known
            and len(grown.layers) == lm.model.config.get_text_config().num_hidden_layers
        ):
            lm.known[tuple(prompt_ids)] = {
                i: (each.keys, each.values) for i, each in enumerate(grown.layers)
            }
        take(ids[0, count:].tolist())
        count = ids.shape[1]
        return torch.full(ids.shape[:1], not goes_on, device=ids.device)

    given = {
        name: value
        for name, value in (("temperature", temperature), ("top_p", top_p))
        if value is not None
    }
    sampling: dict[str, Any] = (
        {"do_sample": False} if temperature == 0 else {"do_sample": True, **given}
    )
    ids = torch.tensor([[*prompt_ids]], device=lm.device)
    network = twin(lm.model)
    own = network.generation_config
    settings = text_settings(own)
    asked: dict[str, Any] = {
        "attention_mask": torch.ones_like(ids),
        "max_new_tokens": max_new_tokens,
        **reading_options(lm.tokenizer, settings),
    }
    own.return_dict_in_generate = False
    own.num_return_sequences = None
    in_beams = "num_beams" in settings  # which text wins is known at its end
    if not in_beams:
        asked["stopping_criteria"] = [ended]
    caching = continued({})
    grown: Any = next(iter(caching.values()))
    if lm.packing(len(prompt_ids) + max_new_tokens).supports_cached_prefix and not in_beams:
        own.cache_implementation = None
        asked |= caching
    with torch.random.fork_rng(enabled=seed is not None):
        if seed is not None:
            torch.manual_seed(seed)
        try:
            found = network.generate(ids, **asked, **(sampling if given else {}))
        except (ValueError, TypeError, AssertionError, ImportError, IndexError) as error:
            if isinstance(error, NoiserError):
                raise
            raise generate_failed(lm, settings, f"{type(error).__name__}: {error}") from error
    if found[0, : len(prompt_ids)].tolist() != [*prompt_ids]:
        raise generate_failed(lm, settings, "it changes the last tokens of the prompt.")
    written = found[0, len(prompt_ids) :].tolist()
    if in_beams:
        take(written)
    tell(most=0)
    return "stop" if len(written) < max_new_tokens or written[-1] in lm.end_tokens else "length"
