"""The noise vectors: drawn, or the caller's own."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from noiser.errors import ParameterError


def draw_noise(samples: int, longest: int, dim: int, rng: torch.Generator) -> Float[Tensor, "samples longest dim"]:
    """Independent N(0, 1) numbers, drawn on the CPU.

    The first position of every unit gets the first block drawn, the second position the second block, and so on:
    units of one token see the same vectors whatever the longest unit is.
    """
    blocks = [torch.randn(samples, dim, generator=rng, device="cpu", dtype=torch.float32) for _ in range(longest)]
    return torch.stack(blocks, dim=1)


def draw_k(rng: torch.Generator) -> float:
    """The k of bounding "random", a U(0, 1) number; drawn before the noise, so that it does not depend on the units."""
    return float(torch.rand((), generator=rng, device="cpu", dtype=torch.float64))


def as_noise(noise: object) -> Tensor:
    """The caller's own noise as a tensor; on a command line, and in a saved file, it is lists."""
    try:
        return torch.as_tensor(noise, device="cpu")
    except (TypeError, ValueError, RuntimeError) as error:
        raise ParameterError(f"noise is not an array of numbers: {error}. Pass a tensor [samples, dim].") from error


def check_noise(noise: Tensor, longest: int, dim: int) -> Float[Tensor, "samples longest dim"]:
    """The caller's own noise as [samples, positions, dim].

    Raises:
        ParameterError: it is neither [samples, dim] with units of one token, nor [samples, positions, dim] with
            enough positions for the longest unit, it has no sample, or it is not finite.
    """
    whole = noise[:, None] if noise.ndim == 2 and longest == 1 else noise
    fits = whole.ndim == 3 and len(whole) and whole.shape[1] >= longest and whole.shape[2] == dim
    if not fits or not torch.isfinite(whole).all():
        raise ParameterError(
            f"noise has shape {list(noise.shape)}; expected finite numbers, [samples, {dim}] for units of one token, "
            f"or [samples, positions, {dim}] with at least {longest} positions, the length of the longest unit here."
        )
    return whole.float()
