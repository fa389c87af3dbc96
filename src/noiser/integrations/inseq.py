"""Our methods inside Inseq: `import noiser.integrations.inseq`, then use the method "noiser".

    import inseq
    import noiser.integrations.inseq

    model = inseq.load_model("gpt2", "noiser")
    model.attribute("The capital of France is", samples=20, score="hellinger").show()

Inseq finds a method by its class, so the import is all that is needed. All other methods are there with "noiser_"
before their names, such as "noiser_occlusion", so that Inseq's own keep theirs. From Inseq's command line, with the
import made: `python -m noiser.integrations.inseq attribute --attribution_method noiser ...`.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from noiser.engine import LocalEngine, Query, complete
from noiser.errors import ParameterError, UnsupportedModelError
from noiser.integrations.inseq_method import InseqMethod, factory, import_inseq, inseq_methods
from noiser.methods import METHODS, Method, Scores, make_method
from noiser.model.language_model import LanguageModel
from noiser.model.query import query_of
from noiser.text import Encoding, extend, make_units

import_inseq()

from inseq.attr.feat.perturbation_attribution import PerturbationAttributionRegistry  # noqa: E402
from inseq.data import (  # noqa: E402
    CoarseFeatureAttributionStepOutput,
    DecoderOnlyBatch,
    get_batch_from_inputs,
)
from inseq.data.batch import slice_batch_from_position  # noqa: E402

__all__ = ["InseqMethod", "NoiserAttribution", "factory", "inseq_methods"]


class NoiserAttribution(PerturbationAttributionRegistry):
    """Noiser as a method of Inseq, for decoder-only models; the base class of all other methods of ours.

    The method's hyper-parameters, `seed` and `special_tokens` are keyword arguments of Inseq's `attribute`. Every
    generated token is a run of its own over the prompt and the tokens before it, with random numbers of the same seed:
    the scores are those of `noiser.attribute` for the same tokens. Special tokens are not perturbed and have the score
    NaN. Where several tokens make up one character, each has an equal share of the character's score.

    `attributed_fn` may be "probability" (the default) or "contrast_prob_diff", whose contrastive token is the foil.
    """

    method_name = "noiser"
    registry_name = "noiser"

    def __init__(self, attribution_model: Any, **kwargs: Any) -> None:
        super().__init__(attribution_model, **kwargs)
        if attribution_model.is_encoder_decoder:
            raise UnsupportedModelError(
                f"{type(attribution_model.model).__name__} is an encoder-decoder model; expected a decoder-only "
                "(causal) language model."
            )
        self._lm: LanguageModel | None = None

    def get_attribution_args(self, **kwargs: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        """Keywords that are the method's, with its name for `Attribution.from_inseq`, and all others."""
        entry = METHODS.get(self.registry_name)
        cls = entry.factory if isinstance(entry.factory, type) else type(entry.factory())
        keywords = {*inspect.signature(cls).parameters, "seed", "special_tokens"}
        ours = {key: value for key, value in kwargs.items() if key in keywords}
        others = {key: value for key, value in kwargs.items() if key not in keywords}
        return {"noiser_method": entry.versioned_name, **ours}, others

    def attribute_step(self, attribute_fn_main_args: dict[str, Any], attribution_args: dict[str, Any] = {}) -> Any:  # noqa: B006 - Inseq's signature
        """Scores of the tokens before one generated token, for each sequence of a batch; called by Inseq."""
        ids, targets, explained, mask, _, names, *values = attribute_fn_main_args["additional_forward_args"]
        given = dict(attribution_args)
        given.pop("noiser_method", None)
        seed, special_tokens = given.pop("seed", 0), given.pop("special_tokens", None)
        method = self._method(explained, dict(zip(names, values, strict=True)), given)
        foils = self._foils(explained, dict(zip(names, values, strict=True)), ids.shape[1])
        frozen = special_tokens or getattr(method, "special_tokens", "frozen")
        scores = torch.full(ids.shape, torch.nan)
        for row, (line, target) in enumerate(zip(ids.cpu(), targets.flatten().tolist(), strict=True)):
            present = mask[row].bool().cpu()
            foil = None if foils is None else foils[row]
            if foil != target:
                query = _query(self.lm, line[present], target, foil, frozen)
                scores[row, present] = _token_scores(self.lm, query, method, seed)
            else:  # where the contrastive text says the same there is nothing to tell apart
                scores[row, present] = 0.0
        return CoarseFeatureAttributionStepOutput(source_attributions=None, target_attributions=scores)

    @property
    def lm(self) -> LanguageModel:
        """The model as Noiser sees it; what is measured about it is measured once."""
        theirs: Any = self.attribution_model
        if self._lm is None or self._lm.model is not theirs.model:
            self._lm = LanguageModel(theirs.model, theirs.tokenizer)
        return self._lm

    def _method(self, explained: Any, settings: Mapping[str, Any], given: dict[str, Any]) -> Method:
        name = getattr(explained, "__name__", str(explained))
        if name not in ("probability_fn", "contrast_prob_diff_fn"):
            raise ParameterError(
                f"attributed_fn is {name!r}; expected 'probability' or 'contrast_prob_diff'. Noiser's methods explain "
                "the probability of the token; score='logprob' or 'hellinger' reads it differently."
            )
        if settings.get("logprob"):
            given.setdefault("score", "logprob")
        return make_method(self.registry_name, **given)

    def _foils(self, explained: Any, settings: Mapping[str, Any], length: int) -> list[int] | None:
        """The contrastive token of each sequence at this step, as Inseq aligns it."""
        if getattr(explained, "__name__", "") != "contrast_prob_diff_fn":
            return None
        texts = settings.get("contrast_targets")
        if texts is None:
            raise ParameterError("contrast_prob_diff got no contrast_targets; expected the contrastive text.")
        batch = DecoderOnlyBatch.from_batch(get_batch_from_inputs(self.attribution_model, inputs=texts))
        _, foils = slice_batch_from_position(batch, length, settings.get("contrast_targets_alignments"))
        return foils.flatten().tolist()


def _adapted(name: str) -> type[NoiserAttribution]:
    """A method of ours as a class for Inseq."""
    words = {"__doc__": f"{METHODS.get(name).summary}.", "__module__": __name__}
    names = {"registry_name": name, "method_name": f"noiser_{name.removeprefix('noiser_')}"}
    return type(f"{''.join(part.title() for part in name.split('_'))}Attribution", (NoiserAttribution,), words | names)


OTHER_METHODS = tuple(_adapted(name) for name in METHODS.names() if name != "noiser")
"""Inseq knows a class as long as somebody holds it."""


def _query(lm: LanguageModel, ids: Int[Tensor, " length"], target: int, foil: int | None, frozen: Any) -> Query:
    """The question of one step: Inseq gives tokens, not a text."""
    nothing = Encoding(text="", token_ids=(), offsets=(), frozen=(), regions=())
    encoding = extend(lm.tokenizer, nothing, ids.tolist())
    units = make_units(encoding, "token", special_tokens=frozen)
    spans = [[len(ids)]]
    return query_of(
        lm, encoding.text, encoding, (target,), spans, target_unit="token", unit="token", units=units, foil_id=foil
    )


def _token_scores(lm: LanguageModel, query: Query, method: Method, seed: int) -> Float[Tensor, " length"]:
    tokens = torch.full((len(query.token_ids),), torch.nan)
    if query.units:
        engine = LocalEngine(lm)
        result: Scores = complete(engine, engine.answer(query, method(query, torch.Generator().manual_seed(seed))))
        for unit, score in zip(query.units, result.scores[0], strict=True):
            tokens[list(unit.token_indices)] = score / len(unit.token_indices)
    return tokens


if __name__ == "__main__":
    from inseq.commands.cli import main

    main()
