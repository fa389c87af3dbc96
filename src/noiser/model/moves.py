"""How much of each position's residual stream attention moves there, layer by layer, in one pass.

A layer adds to the residual x_i of a position what attention moves there: y_i = x_i + Σ_j Σ_h f_ij^h, where
f_ij^h = α_ij^h W_h v_j^h is the value of position j at the weight that head h gives it. The part of y_i along y_i
itself that f_ij^h makes is f_ij^h · y_i / ‖y_i‖², and all parts add up to 1. In the form (W_h^T y_i) · v_j^h it needs
no vector for each edge. (Ferrando and Voita 2024, arXiv 2403.00824, weigh edges by a distance in place of the product.)
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from noiser.errors import UnsupportedModelError
from noiser.model.packing import Context
from noiser.model.runtime import Attention, eager_of, held


class _Watch:
    """A pass that computes the shares; `shares` has [rows, length] for each layer with attention, first to last."""

    def __init__(self, context: Context, begin: int, first: int) -> None:
        self.context, self.begin, self.first = context, begin, first
        self.shares: list[Float[Tensor, "rows length"]] = []
        self.layer = _Layer(0)

    def attend(
        self,
        own: Any,  # noqa: ARG002 - its weights are needed, which only eager attention returns
        module: nn.Module,
        query: Float[Tensor, "one heads tokens dim"],
        key: Float[Tensor, "one kv_heads tokens dim"],
        value: Float[Tensor, "one kv_heads tokens dim_v"],
        attention_mask: Tensor | None,  # noqa: ARG002 - the registry's signature
        sliding_window: int | None = None,
        **options: Any,
    ) -> tuple[Float[Tensor, "one tokens heads dim_v"], None]:
        """Causal attention of the last tokens to all, as a function of transformers' registry."""
        key, value, mask, _ = continued(self.context, self.begin, module, query, key, value, sliding_window)
        mixed, weights = eager_of(module)(module, query, key, value, mask, **options)
        groups = query.shape[1] // value.shape[1]
        self.layer.weights = weights[0, :, self.first - self.begin :].float()
        self.layer.values = value[0].float().repeat_interleave(groups, 0)
        self.layer.mixed = mixed
        return mixed, None

    def watch(self, model: nn.Module) -> list[Any]:
        """Hooks on every module that holds attention; what they return takes them out again."""
        found: list[Any] = []
        for layer in model.modules():
            parts = [] if isinstance(layer, nn.ModuleList) else [*layer.children()]
            for attention in (part for part in parts if isinstance(getattr(part, "layer_idx", None), int)):
                found.append(layer.register_forward_pre_hook(self._enter, with_kwargs=True))
                found += [part.register_forward_hook(self._project) for part in attention.children()]
                found.append(attention.register_forward_hook(self._leave))
                found += [part.register_forward_hook(self._after) for part in parts if part is not attention]
                found.append(layer.register_forward_hook(self._end))
        return found

    def _enter(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.layer = _Layer(self.first - self.begin, x=args[0] if args else kwargs.get("hidden_states"))

    def _project(self, part: nn.Module, args: tuple[Any, ...], _: Any) -> None:
        layer = self.layer
        if layer.mixed is not None and layer.projection is None and args and args[0].numel() == layer.mixed.numel():
            layer.projection, layer.projected = part, args[0]

    def _leave(self, _: nn.Module, __: Any, output: Any) -> None:
        if self.layer.weights is not None and self.layer.moved is None:
            self.layer.moved = output[0] if isinstance(output, tuple) else output

    def _after(self, _: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        layer = self.layer
        if layer.moved is None or not args:
            return
        if layer.added is None and args[0] is layer.moved:
            layer.added = output
        elif layer.y is None:
            layer.y = args[0]

    def _end(self, *_: Any) -> None:
        layer, self.layer = self.layer, _Layer(0)
        if layer.weights is not None:
            self.shares.append(layer.shares(self.first))


class _Layer:
    """What a layer computes, as far as it has come; rows before `skip` are not followed."""

    def __init__(self, skip: int, x: Any = None) -> None:
        self.skip, self.x = skip, x
        self.weights: Any = None  # [heads, rows, length]
        self.values: Any = None  # [heads, length, dim_v]
        self.mixed: Any = None  # weights times values, as attention returns it
        self.projection: Any = None
        self.projected: Any = None  # its input: `mixed`, after a gate or norm where there is one
        self.moved: Any = None  # the output of attention
        self.added: Any = None  # the same after a norm, where one follows
        self.y: Any = None  # the residual stream after attention, where a module reads it

    def shares(self, first: int) -> Float[Tensor, "rows length"]:
        """Parts of each row's residual after attention, from every position; they add up to 1."""
        if any(part is None for part in (self.x, self.projection, self.moved)):
            raise UnsupportedModelError("")
        x, moved = self._rows(self.x), self._rows(self.moved)
        added = moved if self.added is None else self._rows(self.added)
        y, scale = x + added, 1.0
        if self.y is not None and self.y.numel() == self.x.numel():
            step = self._rows(self.y.view_as(self.x)) - x  # some models multiply what attention adds
            factor = float((step * added).sum() / (added * added).sum().clamp_min(1e-30))
            if (step - factor * added).norm() <= 0.05 * step.norm():
                y, scale = x + step, factor
        along = y / y.square().sum(-1, keepdim=True)
        back = self._back(along * scale * _ratio(added, moved)).unflatten(-1, (len(self.weights), -1))
        parts = (torch.einsum("rhe,hje->hrj", back, self.values) * self.weights).clamp_min(0).sum(0)
        rows = torch.arange(len(x))
        parts[rows, rows + first] += (along * x).sum(-1).clamp_min(0)
        return parts / parts.sum(-1, keepdim=True).clamp_min(1e-30)

    def _rows(self, tensor: Tensor) -> Float[Tensor, "rows dim"]:
        return tensor.flatten(0, -2)[self.skip :].float()

    def _back(self, direction: Float[Tensor, "rows dim"]) -> Float[Tensor, "rows mixed"]:
        """The direction through the transposed projection, in the coordinates of `mixed`."""
        projected = self.projected.flatten(0, -2)[self.skip :].detach().requires_grad_()
        with torch.enable_grad():
            out = self.projection(projected)
        (gradient,) = torch.autograd.grad(out, projected, direction.to(out))
        mixed = self._rows(self.mixed.reshape(self.projected.shape))
        return gradient.float() * _ratio(projected.float(), mixed)


def continued(
    context: Context, begin: int, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, window: int | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Keys and values with the cached ones before `begin`; the mask; and how far each query is after each key."""
    key, value = context.after(0, begin, int(module.layer_idx), key, value)  # pyright: ignore
    distance = torch.arange(begin, begin + query.shape[-2])[:, None] - torch.arange(key.shape[-2])
    seen = (distance >= 0) & (distance < (window or len(context.inputs)))
    mask = torch.where(seen, 0.0, torch.finfo(query.dtype).min).to(query)[None, None]
    return key, value, mask, distance.to(query.device)


def _ratio(after: Tensor, before: Tensor) -> Tensor:
    """The factor of each number in a step that multiplies them."""
    return torch.where(before == 0, 1.0, after / torch.where(before == 0, 1.0, before)).detach()


def moved_shares(
    lm: Any, context: Context, first: int, positions: Sequence[int]
) -> tuple[list[Float[Tensor, "rows length"]], Float[Tensor, "positions vocab"], int]:
    """The shares of the rows from `first` on, for each layer; logits at some positions; how many tokens were run.

    Tokens before them are not run again where the model packs and has cached them.

    Raises:
        UnsupportedModelError: no attention of the model runs through transformers' AttentionInterface, or its layers
            are built in a way that the shares do not describe.
    """
    begin = min(first, context.done) if lm.abilities.packs else 0
    moves = _Watch(context, begin, first)
    own = {"position_ids": torch.arange(begin, len(context.inputs), device=context.inputs.device)[None]}
    with lm.running(attention=Attention(moves.attend, masked=not lm.abilities.packs)):
        undo = held(lm.model).undo
        undo += [handle.remove for handle in moves.watch(lm.model)]
        out = None
        with suppress(UnsupportedModelError):
            rows = [row - begin for row in positions]
            out = lm.output(context.inputs[None, begin:], positions=rows, **(own if begin else {}))
    if out is None or not moves.shares:
        raise UnsupportedModelError(
            f"{type(lm.model).__name__} has no attention that runs through transformers' AttentionInterface and adds "
            "to a residual stream, which 'flow' follows. Take another method, such as 'occlusion'."
        )
    return moves.shares, out.logits[0], len(context.inputs) - begin
