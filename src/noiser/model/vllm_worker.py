"""Logits of the next token, kept by vLLM's workers, which import this module; vLLM would send them
token by token.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor  # pyright: ignore

from noiser.model.remote import ROW

_kept: dict[int, torch.Tensor] = {}


class KeepLogits(AdapterLogitsProcessor):  # pyright: ignore
    """Keeps the logits of requests that have a `ROW`, on the device, and changes nothing."""

    def is_argmax_invariant(self) -> bool:
        """False, although it changes nothing: what is invariant is left out of greedy sampling."""
        return False

    def new_req_logits_processor(self, params: Any) -> Any:
        """The function that keeps a request's logits, or None."""
        row: Any = (params.extra_args or {}).get(ROW)

        def keep(_generated: list[int], logits: torch.Tensor) -> torch.Tensor:
            _kept[row] = (
                logits.clone()
            )  # vLLM uses the buffer again; of a prompt in chunks the last logits stay
            return logits

        return None if row is None else keep


class TakeLogits:
    """A method that every worker gets."""

    def take_logits(self) -> tuple[list[int], bytes]:
        """Row numbers and their logits as float32; nothing from workers that have none, or the same
        as the first.
        """
        from vllm.distributed import get_tensor_model_parallel_rank  # pyright: ignore

        rows = dict(sorted(_kept.items()))
        _kept.clear()
        if not rows or get_tensor_model_parallel_rank():
            return [], b""
        return list(rows), torch.stack(list(rows.values())).float().cpu().numpy().tobytes()
