"""Networks small enough to work out by hand, behind what `noiser.wrap` asks of a model."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import torch
import transformers
from torch import nn

import noiser
from tiny import tiny_tokenizer

DIM, HIDDEN, VOCABULARY = 8, 12, 384


class Network(nn.Module):
    """Embedding, mean over all tokens so far, then `body`, then the head."""

    dtype = torch.float32

    def __init__(self, seed=0):
        super().__init__()
        self.config = transformers.LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=DIM,
            num_attention_heads=1,
            eos_token_id=1,
            bos_token_id=0,
            pad_token_id=1,
        )
        self.generation_config = transformers.GenerationConfig()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.table = nn.Embedding(VOCABULARY, DIM)
            self.build()
        self.eval()

    def build(self):
        self.head = nn.Linear(DIM, VOCABULARY, bias=False)

    def body(self, mean):
        return mean

    def get_input_embeddings(self):
        return self.table

    def get_output_embeddings(self):
        return self.head

    def forward(self, inputs_embeds=None, input_ids=None, **options):
        x = self.table(input_ids) if inputs_embeds is None else inputs_embeds
        mean = x.cumsum(1) / torch.arange(1, x.shape[1] + 1)[:, None]
        return SimpleNamespace(logits=self.head(self.body(mean)))


class Chain(Network):
    """Two activation functions after one another, with biases, and no product."""

    def build(self):
        self.layers = nn.Sequential(nn.Linear(DIM, HIDDEN), nn.SiLU(), nn.Linear(HIDDEN, HIDDEN), nn.Tanh())
        self.head = nn.Linear(HIDDEN, VOCABULARY)

    def body(self, mean):
        return self.layers(mean)


class RMSNorm(nn.Module):
    """x * weight / sqrt(mean(x^2) + eps)."""

    eps = 1e-3

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(DIM) + 0.5)

    def forward(self, x):
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps))


class Gate(nn.Module):
    """silu(gate(x)) * up(x)."""

    def __init__(self):
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(DIM, HIDDEN, bias=False), nn.Linear(DIM, HIDDEN, bias=False)
        self.act_fn = nn.SiLU()

    def forward(self, x):
        return self.act_fn(self.gate_proj(x)) * self.up_proj(x)


class Gated(Network):
    """RMSNorm, then a gate: head(silu(gate(n)) * up(n))."""

    def build(self):
        self.norm, self.gate = RMSNorm(), Gate()
        self.head = nn.Linear(HIDDEN, VOCABULARY, bias=False)

    def body(self, mean):
        return self.gate(self.norm(mean))


class GatedByHand:
    """The same network and its backward pass in numpy, one step at a time."""

    def __init__(self, network):
        self.w, self.gate, self.up, self.head = (
            p.detach().double().numpy()
            for p in (
                network.norm.weight,
                network.gate.gate_proj.weight,
                network.gate.up_proj.weight,
                network.head.weight,
            )
        )
        self.eps = network.norm.eps

    def forward(self, x):
        self.mean = x.mean(0)
        self.factor = 1 / np.sqrt((self.mean**2).mean() + self.eps)
        n = self.w * self.mean * self.factor
        self.g, self.u = self.gate @ n, self.up @ n
        self.silu = self.g / (1 + np.exp(-self.g))
        return self.head @ (self.silu * self.u)

    def backward(self, slope, slope_of_gate):
        """From the slope of the logits to the slope of the mean."""
        h = self.head.T @ slope
        n = self.gate.T @ (h * self.u * slope_of_gate) + self.up.T @ (h * self.silu)
        scaled = n * self.w * self.factor
        return scaled - self.mean * (scaled @ self.mean) * self.factor**2 / len(self.mean)


def wrapped(network):
    return noiser.wrap(network, tiny_tokenizer())
