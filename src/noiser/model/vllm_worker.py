"""The logits of the next token, kept by vLLM's workers; vLLM itself would send them token by token.

vLLM imports this module by name in every worker; it needs nothing else of this package.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.sample.logits_processor import LogitsProcessor, MoveDirectionality  # pyright: ignore

KEY = "noiser_row"
"""In a request's `extra_args`: the number of the row that its logits become."""

_kept: dict[int, torch.Tensor] = {}


class KeepLogits(LogitsProcessor):  # pyright: ignore
    """Keeps the logits of requests that have a `KEY`, on the device, and changes nothing.

    A prompt that is read in chunks has logits after each of them; the last, those of its end, remain.
    """

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:  # noqa: ARG002
        self._rows: dict[int, int] = {}  # by the request's position in the batch

    def is_argmax_invariant(self) -> bool:
        """False, although it changes nothing: what is invariant is left out of greedy sampling."""
        return False

    def update_state(self, batch_update: Any) -> None:
        """Follows requests that join, leave or move within the batch."""
        if batch_update is None:
            return
        for index in batch_update.removed:
            self._rows.pop(index, None)
        for index, params, *_ in batch_update.added:
            self._rows.pop(index, None)
            if params.extra_args and KEY in params.extra_args:
                self._rows[index] = params.extra_args[KEY]
        for source, destination, direction in batch_update.moved:
            moved, replaced = self._rows.pop(source, None), self._rows.pop(destination, None)
            if moved is not None:
                self._rows[destination] = moved
            if replaced is not None and direction == MoveDirectionality.SWAP:
                self._rows[source] = replaced

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """Keeps copies, since vLLM uses the buffer again."""
        for index, row in self._rows.items():
            _kept[row] = logits[index].clone()
        return logits


class TakeLogits:
    """A method that every worker gets."""

    def take_logits(self) -> tuple[list[int], bytes]:
        """Row numbers, and their logits as float32 one after another; nothing from workers that have none.

        All workers of a tensor-parallel group have the same logits: the first one sends them.
        """
        from vllm.distributed import get_tensor_model_parallel_rank  # pyright: ignore

        rows = dict(sorted(_kept.items()))
        _kept.clear()
        if not rows or get_tensor_model_parallel_rank():
            return [], b""
        return list(rows), torch.stack(list(rows.values())).float().cpu().numpy().tobytes()
