"""Our methods inside Inseq: `import noiser.integrations.inseq`, then use the method "noiser".

    import inseq
    import noiser.integrations.inseq

    model = inseq.load_model("gpt2", "noiser")
    model.attribute("The capital of France is", samples=20, score="hellinger").show()
    model.attribute("The capital of France is", noiser_method="occlusion").show()

Inseq's command line, with the import made: `python -m noiser.integrations.inseq attribute --attribution_method noiser`.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch

from noiser.errors import ParameterError
from noiser.integrations.common import imported
from noiser.integrations.engine import token_scores
from noiser.integrations.inseq_method import InseqMethod, factory
from noiser.methods import METHODS, make_method
from noiser.model.language_model import LanguageModel

imported("inseq", "inseq")

from inseq.attr.feat.perturbation_attribution import PerturbationAttributionRegistry  # noqa: E402
from inseq.data import CoarseFeatureAttributionStepOutput, DecoderOnlyBatch, get_batch_from_inputs  # noqa: E402
from inseq.data.batch import slice_batch_from_position  # noqa: E402

__all__ = ["InseqMethod", "NoiserAttribution", "factory"]


class NoiserAttribution(PerturbationAttributionRegistry):
    """A method of Noiser as a method of Inseq, for decoder-only models.

    `noiser_method` (a name such as "occlusion"), the method's hyper-parameters, `seed` and `special_tokens` are keyword
    arguments of Inseq's `attribute`. Every generated token is a run of its own over the tokens before it,
    with the same seed: the scores are those of `noiser.attribute` for the same tokens. Special tokens have the score
    NaN. Where several tokens make up one character, each has an equal share of the character's score.

    `attributed_fn` may be "probability" (the default) or "contrast_prob_diff", whose contrastive token is the foil.
    """

    method_name = "noiser"

    _lm: LanguageModel | None = None

    def get_attribution_args(self, **kwargs: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        """The method's keywords, and all others; called by Inseq."""
        make = METHODS.get(kwargs.get("noiser_method", "noiser")).factory
        names = {*inspect.signature(make if isinstance(make, type) else type(make())).parameters}
        names |= {"noiser_method", "seed", "special_tokens"}
        return {k: v for k, v in kwargs.items() if k in names}, {k: v for k, v in kwargs.items() if k not in names}

    def attribute_step(self, attribute_fn_main_args: dict[str, Any], attribution_args: dict[str, Any] = {}) -> Any:  # noqa: B006 - Inseq's signature
        """Scores of the tokens before one generated token, for each sequence of a batch; called by Inseq."""
        ids, targets, explained, mask, _, names, *values = attribute_fn_main_args["additional_forward_args"]
        given, settings = dict(attribution_args), dict(zip(names, values, strict=True))
        seed, special_tokens = given.pop("seed", 0), given.pop("special_tokens", None)
        foils = self._foils(explained, settings, ids.shape[1])
        if settings.get("logprob"):
            given.setdefault("score", "logprob")
        method = make_method(given.pop("noiser_method", "noiser"), **given)
        frozen = special_tokens or getattr(method, "special_tokens", "frozen")
        theirs: Any = self.attribution_model
        self._lm = self._lm or LanguageModel(theirs.model, theirs.tokenizer)
        scores = torch.full(ids.shape, torch.nan)
        for row, (line, target) in enumerate(zip(ids.cpu(), targets.flatten().tolist(), strict=True)):
            present = mask[row].bool().cpu()
            foil = foils[row] if foils else None
            scores[row, present] = 0.0  # the score where the contrastive text has the same token
            if foil != target:
                scores[row, present] = token_scores(self._lm, line[present], target, foil, method, seed, frozen)
        return CoarseFeatureAttributionStepOutput(source_attributions=None, target_attributions=scores)

    def _foils(self, explained: Any, settings: Mapping[str, Any], length: int) -> list[int]:
        """The contrastive token of each sequence at this step, as Inseq aligns it; none without a contrast."""
        name = getattr(explained, "__name__", str(explained))
        if name == "probability_fn":
            return []
        if name != "contrast_prob_diff_fn" or settings.get("contrast_targets") is None:
            raise ParameterError(
                f"attributed_fn is {name!r}; expected 'probability', or 'contrast_prob_diff' with contrast_targets. "
                "score='logprob' or 'hellinger' reads the probability differently."
            )
        inputs = get_batch_from_inputs(self.attribution_model, inputs=settings["contrast_targets"])
        alignments = settings.get("contrast_targets_alignments")
        _, foils = slice_batch_from_position(DecoderOnlyBatch.from_batch(inputs), length, alignments)
        return foils.flatten().tolist()


if __name__ == "__main__":
    from inseq.commands.cli import main

    main()
