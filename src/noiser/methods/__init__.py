"""Methods: generators that ask an engine and return scores; one file per method or family."""

from __future__ import annotations

from functools import partial

from noiser.methods.attention import AttentionRollout as AttentionRollout
from noiser.methods.attention import LastAttention as LastAttention
from noiser.methods.attn_lrp import AttnLrp as AttnLrp
from noiser.methods.deeplift import DeepLift as DeepLift
from noiser.methods.gates import AttentionGradient as AttentionGradient
from noiser.methods.gradients import GradientShap as GradientShap
from noiser.methods.gradients import InputXGradient as InputXGradient
from noiser.methods.gradients import IntegratedGradients as IntegratedGradients
from noiser.methods.gradients import SequentialIntegratedGradients as SequentialIntegratedGradients
from noiser.methods.joint import Joint as Joint
from noiser.methods.noiser import Noiser as Noiser
from noiser.methods.occlusion import Added as Added
from noiser.methods.occlusion import Occlusion as Occlusion
from noiser.methods.protocol import METHODS as METHODS
from noiser.methods.protocol import Method as Method
from noiser.methods.protocol import Scores as Scores
from noiser.methods.protocol import check_answers as check_answers
from noiser.methods.protocol import describe as describe
from noiser.methods.protocol import make_method as make_method
from noiser.methods.protocol import scored as scored
from noiser.methods.random import Position as Position
from noiser.methods.random import Random as Random
from noiser.methods.shapley import KernelShap as KernelShap
from noiser.methods.shapley import ShapleySampling as ShapleySampling
from noiser.methods.surrogates import ContextCite as ContextCite
from noiser.methods.surrogates import Lime as Lime

METHODS.register("joint", Joint, summary="units removed alone, last and first, and in random halves; copies are found")
METHODS.register("noiser", partial(Noiser, search="bisection"), version=1, summary="bounded noise, always by bisection")
METHODS.register("noiser", Noiser, version=2, summary="bounded noise on one unit at a time (the paper's method)")
# The Hellinger distance does not say why the model said this token: what moves other tokens' probabilities scores too.
METHODS.register(
    "noiser_relative",
    partial(Noiser, bounding="relative", score="hellinger"),
    summary="noise in proportion to each embedding, no search; what the whole distribution depends on (Hellinger)",
)
METHODS.register("occlusion", Occlusion, summary="one unit at a time replaced by a baseline; the prediction's drop")
METHODS.register(
    "added", Added, summary="what each unit adds where it first appears, later ones replaced by a baseline"
)
METHODS.register("random", Random, summary="softmax of uniform random numbers: the reference")
METHODS.register("position", Position, summary="1 to n along the text: the reference that knows only the place")
METHODS.register("last_attention", LastAttention, summary="attention of the last layer, mean over heads")
METHODS.register("attention_rollout", AttentionRollout, summary="attention multiplied through all layers")
METHODS.register(
    "attention_gradient", AttentionGradient, summary="slope of the prediction as attention to a unit opens; one pass"
)
METHODS.register("input_x_gradient", InputXGradient, summary="gradient times embedding")
METHODS.register("integrated_gradients", IntegratedGradients, summary="gradient integrated from a baseline")
METHODS.register("gradient_shap", GradientShap, summary="gradient at random points between a baseline and the input")
METHODS.register("deeplift", DeepLift, summary="difference from a baseline, by the rescale rule at nonlinearities")
METHODS.register(
    "sequential_integrated_gradients",
    SequentialIntegratedGradients,
    summary="gradient integrated for one unit at a time, the others unchanged",
)
METHODS.register("lime", Lime, summary="weighted linear surrogate on inputs with random units missing")
METHODS.register("kernel_shap", KernelShap, summary="Shapley values by weighted regression on coalitions of units")
METHODS.register("shapley_sampling", ShapleySampling, summary="Shapley values by random orders, with standard errors")
METHODS.register("context_cite", ContextCite, summary="sparse surrogate of the log-odds over sources (sentences)")
METHODS.register("attn_lrp", AttnLrp, summary="relevance of the logit passed back layer by layer, attention included")

METHODS.register_family(
    "inseq", "noiser.integrations.inseq_method:factory", summary="any method of Inseq, such as inseq:saliency"
)
METHODS.register_family(
    "captum",
    "noiser.integrations.captum:factory",
    summary="a method of Captum that takes embeddings, such as captum:ShapleyValueSampling",
)
METHODS.register_family(
    "shapiq",
    "noiser.integrations.shapiq:factory",
    summary="an estimator of Shapley values of shapiq, such as shapiq:KernelSHAP",
)
