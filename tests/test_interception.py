"""Elementwise functions are recognised however they are spelled, and everything else is left alone."""

from __future__ import annotations

import copy
import math

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from transformers.activations import ACT2FN

from noiser.engine.elementwise import Expression
from noiser.engine.interception import Interception, divide_gradient


def slopes(function, x, slope, rules=None):
    """What comes back to x from a 1 behind every number, and the value that was computed."""
    leaf = x.clone().requires_grad_()
    with Interception(slope, rules):
        out = function(leaf + 0.0)
    (gradient,) = torch.autograd.grad(out.sum(), leaf)
    return gradient, out.detach()


def secant_from_zero(x, f):
    wide = x.double()
    return (f(wide) - f(wide.new_zeros(()))) / wide


def points():
    return torch.randn(64, generator=torch.Generator().manual_seed(0)) * 3


@pytest.mark.parametrize("name", sorted(set(ACT2FN) - {"xielu"}))
def test_every_activation_of_transformers_is_one_function(name):
    module = ACT2FN[name].requires_grad_(False)
    x = points()
    found, out = slopes(module, x, secant_from_zero)
    assert torch.equal(out, module(x)), "the forward pass must not change"
    exact = copy.deepcopy(module).double()
    zero = exact(torch.zeros(1, dtype=torch.float64))
    torch.testing.assert_close(found, ((exact(x.double()) - zero) / x).float(), atol=1e-6, rtol=1e-5)


def test_xielu_is_one_function():
    module = ACT2FN["xielu"].float().requires_grad_(False)
    x = points()
    found, out = slopes(module, x, secant_from_zero)
    assert torch.equal(out, module(x))
    torch.testing.assert_close(found * x, module(x) - module(torch.zeros(1)), atol=1e-5, rtol=1e-4)


SPELLINGS = {
    "relu by comparison": lambda x: torch.where(x > 0, x, 0.0),
    "relu by maximum": lambda x: torch.maximum(x, torch.tensor(0.0)),
    "relu by clamp": lambda x: x.clamp(min=0),
    "relu in place": lambda x: F.relu(x, inplace=True),
    "relu by method in place": lambda x: x.relu_(),
    "sigmoid by exp": lambda x: 1 / (1 + torch.exp(-x)),
    "silu by reciprocal": lambda x: x * torch.reciprocal(1 + (-x).exp()),
    "swish with a learned slope": lambda x: x * torch.sigmoid(torch.tensor([1.5]) * x),
    "tanh in place": lambda x: torch.tanh_(x),
    "soft cap": lambda x: 5 * torch.tanh(x / 5),
    "mish": lambda x: x * torch.tanh(F.softplus(x)),
    "squared relu": lambda x: F.relu(x) ** 2,
}


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_a_function_spelled_out_is_one_function(spelling):
    function, x = SPELLINGS[spelling], points()
    expected = function(x.double().clone())
    found, out = slopes(function, x, secant_from_zero)
    torch.testing.assert_close(out, expected.float(), atol=1e-5, rtol=1e-4)
    zero = function(torch.zeros(1, dtype=torch.float64))
    torch.testing.assert_close(found, ((expected - zero) / x).float(), atol=1e-5, rtol=1e-4)


def test_two_tensors_or_none_activation_are_left_alone():
    never = {"called": False}

    def slope(x, f):
        never["called"] = True
        return x

    y, weights = torch.randn(64), torch.randn(64)
    for function in (
        lambda x: x * weights + 3,
        lambda x: x.pow(2).mean() * x,
        lambda x: torch.softmax(x, 0) @ y,
        lambda x: x.max() + x.min(),
        lambda x: torch.tanh(weights) * x,
        lambda x: F.linear(x, torch.ones(2, 64)),
    ):
        leaf = points().requires_grad_()
        plain = torch.autograd.grad(function(leaf).sum(), leaf)[0]
        found, _ = slopes(function, points(), slope)
        torch.testing.assert_close(found, plain)
    assert not never["called"]


def test_a_gate_bends_only_its_own_side():
    def function(x):
        return torch.tanh(2 * x) * x.roll(1)  # rolled, x is another tensor

    x = points()
    found, _ = slopes(function, x, lambda x, f: torch.full_like(x, 7.0))
    torch.testing.assert_close(found, 7.0 * 1 * x.roll(1) + torch.tanh(2 * x).roll(-1))


def test_a_value_that_was_written_to_loses_its_recipe():
    def function(x):
        half = x * 0.5
        half[0] = 9.0
        return torch.tanh(half)

    seen = []

    def slope(x, f):
        seen.append(x[0].item())
        return f.derivative(x)

    slopes(function, points(), slope)
    assert seen == [9.0], "the root of tanh is what was written, not what it was computed from"


def test_constants_that_differ_between_numbers_end_a_recipe():
    mask = torch.zeros(64)
    mask[3] = -math.inf
    found, _ = slopes(lambda x: (5 * torch.tanh(x / 5) + mask).softmax(0)[:3], points(), secant_from_zero)
    assert found.isfinite().all()


def test_slopes_are_found_once_for_several_backward_passes():
    calls = []

    def slope(x, f):
        calls.append(1)
        return f.derivative(x)

    leaf = points().requires_grad_()
    with Interception(slope):
        out = F.silu(leaf * 1)
    for keep in (True, False):
        torch.autograd.grad(out.sum(), leaf, retain_graph=keep)
    assert len(calls) == 1


def test_rules_replace_functions_by_their_plain_names_also_in_place():
    def share(func, *args, **kwargs):
        return func(*(divide_gradient(a, 2) if isinstance(a, torch.Tensor) else a for a in args), **kwargs)

    def in_place(x):
        y = x.flip(0)
        y *= x.roll(1)
        return y

    for function in (lambda x: x.flip(0) * x.roll(1), lambda x: torch.mul(x.flip(0), x.roll(1)), in_place):
        leaf = points().requires_grad_()
        plain = torch.autograd.grad(function(leaf).sum(), leaf)[0]
        halved, out = slopes(function, points(), secant_from_zero, {"mul": share})
        torch.testing.assert_close(halved, plain / 2)
        torch.testing.assert_close(out, function(points()))


def test_derivatives_of_expressions():
    x = points().double()
    f = Expression(x, torch.tanh, (x,), {}, True, 0)
    assert torch.equal(Expression(x, torch.gt, (x, 0), {}, True, 0).derivative(x), torch.zeros_like(x))
    assert f.derivative(x).shape == x.shape


def test_nothing_stays_entered_after_an_error():
    def fail(func, *args, **kwargs):
        raise KeyError("inside")

    with pytest.raises(KeyError, match="inside"), Interception(secant_from_zero, {"matmul": fail}):
        torch.ones(2, 2) @ torch.ones(2, 2)
    torch.testing.assert_close(torch.ones(2, 2) @ torch.ones(2, 2), torch.full((2, 2), 2.0))
