"""What things are called in tables and figures."""

from __future__ import annotations

from collections.abc import Mapping

from noiser.bench.plan import DataEntry
from noiser.registry import unversioned

__all__ = ["METHODS", "data_title", "method_title"]

METHODS: Mapping[str, str] = {
    "noiser": "Noiser",
    "noiser_relative": "Noiser, relative noise",
    "random": "Random",
    "last_attention": "Last attention",
    "attention_rollout": "Attention rollout",
    "input_x_gradient": "Input × gradient",
    "integrated_gradients": "Integrated gradients",
    "gradient_shap": "Gradient SHAP",
    "deeplift": "DeepLIFT",
    "sequential_integrated_gradients": "Sequential IG",
    "lime": "LIME",
    "occlusion": "Occlusion",
    "kernel_shap": "Kernel SHAP",
    "shapley_sampling": "Shapley sampling",
    "context_cite": "ContextCite",
    "attn_lrp": "AttnLRP",
}

_DATA = {
    "known": "KNOWN",
    "longra": "LongRA",
    "wikitext": "Wikipedia sentences",
    "wikibio": "WikiBio",
}


def method_title(label: str) -> str:
    """A method's title; a label that is no registry name stands as it is."""
    return METHODS.get(unversioned(label), label)


def data_title(entry: DataEntry) -> str:
    """A data set's title, with the label that a plan has given it."""
    title = _DATA.get(unversioned(entry.name or ""), entry.name or entry.label)
    return title if entry.name in (None, entry.label) else f"{title} ({entry.label})"
