"""The noise vectors: drawn, or given by the caller."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from noiser.errors import ParameterError


def draw_noise(
    samples: int, longest_unit: int, dim: int, generator: torch.Generator
) -> Float[Tensor, "samples longest_unit dim"]:
    """Independent N(0, 1) numbers, drawn on the CPU.

    The first position of every unit gets the first block drawn, the second position the second block, and so on:
    units of one token see the same vectors whatever the longest unit is.
    """
    blocks = [
        torch.randn(samples, dim, generator=generator, device="cpu", dtype=torch.float32) for _ in range(longest_unit)
    ]
    return torch.stack(blocks, dim=1)


def draw_k(generator: torch.Generator) -> float:
    """The k of bounding "random", a U(0, 1) number; drawn before the noise, so that it does not depend on the units."""
    return float(torch.rand((), generator=generator, device="cpu", dtype=torch.float64))


def as_noise(noise: object) -> Tensor:
    """The caller's own noise as a tensor; on a command line, and in what was saved, it is lists.

    Raises:
        ParameterError: it is not an array of numbers.
    """
    try:
        return torch.as_tensor(noise, device="cpu")
    except (TypeError, ValueError, RuntimeError) as error:
        raise ParameterError(
            f"The noise is not an array of numbers ({error}); expected [samples, dim] or [samples, positions, dim]."
        ) from error


def count_samples(noise: Tensor, samples: int | None) -> int:
    """How many samples the caller's noise has.

    Raises:
        ParameterError: `samples` says otherwise.
    """
    found = len(torch.atleast_1d(noise))
    if samples not in (None, found):
        raise ParameterError(
            f"samples is {samples!r} and the noise has {found}; expected the number in the noise. Leave samples out."
        )
    return found


def check_noise(noise: Tensor, longest_unit: int, dim: int) -> Float[Tensor, "samples longest_unit dim"]:
    """The caller's own noise as [samples, positions, dim].

    Raises:
        ParameterError: it is neither [samples, dim] with units of one token, nor [samples, positions, dim] with
            enough positions for the longest unit, it has no sample, or it is not finite.
    """
    got = list(noise.shape)
    if got[:1] == [0]:
        raise ParameterError(f"The noise has shape {got}, no sample at all; expected at least one.")
    if not torch.isfinite(noise).all():
        raise ParameterError(f"The noise {got} has entries that are not finite; expected finite numbers.")
    if noise.ndim == 2 and noise.shape[1] == dim and longest_unit == 1:
        return noise[:, None].float()
    if noise.ndim == 3 and noise.shape[1] >= longest_unit and noise.shape[2] == dim:
        return noise.float()
    raise ParameterError(
        f"The noise has shape {got}; expected [samples, {dim}] for units of one token, or [samples, positions, {dim}] "
        f"with at least {longest_unit} positions, the length of the longest unit here."
    )
