"""Methods: coroutines that ask an engine and return scores; one file per method or family."""

from __future__ import annotations

from functools import partial

from noiser.methods.attention import AttentionRollout as AttentionRollout
from noiser.methods.attention import LastAttention as LastAttention
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
from noiser.methods.protocol import check_removes as check_removes
from noiser.methods.protocol import describe as describe
from noiser.methods.protocol import for_text as for_text
from noiser.methods.protocol import make_method as make_method
from noiser.methods.protocol import reads_old_names
from noiser.methods.protocol import run_method as run_method
from noiser.methods.references import Constant as Constant
from noiser.methods.references import Length as Length
from noiser.methods.references import Overlap as Overlap
from noiser.methods.references import Position as Position
from noiser.methods.references import Random as Random
from noiser.methods.relevance import AttnLrp as AttnLrp
from noiser.methods.relevance import DeepLift as DeepLift
from noiser.methods.search import Search as Search
from noiser.methods.shapley import KernelShap as KernelShap
from noiser.methods.shapley import ShapleySampling as ShapleySampling
from noiser.methods.surrogates import ContextCite as ContextCite
from noiser.methods.surrogates import Lime as Lime
from noiser.registry import Family

for _method in (
    Occlusion,
    Joint,
    Noiser,
    Lime,
    ContextCite,
    KernelShap,
    ShapleySampling,
    InputXGradient,
    IntegratedGradients,
    GradientShap,
    SequentialIntegratedGradients,
    DeepLift,
    AttentionGradient,
):
    reads_old_names(_method)

# The Hellinger distance does not say why the model said this token: what moves other tokens'
# probabilities scores too.
_RELATIVE = partial(Noiser, bounding="relative", objective="hellinger")

for _name, _factory, _summary in (
    ("noiser", partial(Noiser, search="bisection"), "bounded noise, always by bisection"),
    (
        "noiser_relative",
        _RELATIVE,
        "noise in proportion to each embedding, no search, and the Hellinger distance",
    ),
    ("occlusion", Occlusion, "one unit at a time replaced by a baseline; the prediction's drop"),
    (
        "added",
        Added,
        "what each unit adds where it first appears, later ones replaced by a baseline",
    ),
    ("search", Search, "the few units that keep the answer, found by halves; few requests"),
    ("random", Random, "softmax of uniform random numbers: the reference"),
    ("constant", Constant, "1 for every unit: the reference that knows nothing"),
    ("position", Position, "1 to n along the text: the reference that knows only the place"),
    ("length", Length, "characters of the unit: the reference that knows only the size"),
    (
        "overlap",
        Overlap,
        "words in common with question and answer (TF-IDF): the reference of search",
    ),
    ("last_attention", LastAttention, "attention of the last layer, mean over heads"),
    ("attention_rollout", AttentionRollout, "attention multiplied through all layers"),
    (
        "attention_gradient",
        AttentionGradient,
        "slope of the prediction as attention to a unit opens; one pass",
    ),
    ("input_x_gradient", InputXGradient, "gradient times embedding"),
    ("integrated_gradients", IntegratedGradients, "gradient integrated from a baseline"),
    ("gradient_shap", GradientShap, "gradient at random points between a baseline and the input"),
    ("deeplift", DeepLift, "difference from a baseline, by the rescale rule at nonlinearities"),
    (
        "sequential_integrated_gradients",
        SequentialIntegratedGradients,
        "integrated gradients for one unit at a time",
    ),
    ("lime", Lime, "weighted linear surrogate on inputs with random units missing"),
    ("kernel_shap", KernelShap, "Shapley values by weighted regression on coalitions of units"),
    ("shapley_sampling", ShapleySampling, "Shapley values by random orders, with standard errors"),
    ("context_cite", ContextCite, "sparse surrogate of the log-odds over sources (sentences)"),
    ("attn_lrp", AttnLrp, "relevance of the logit passed back layer by layer, attention included"),
):
    METHODS.register(_name, _factory, summary=_summary)
METHODS.register(
    "joint",
    Joint,
    version=2,
    summary="units removed alone, last and first, and in random sets; copies are found",
)
METHODS.register(
    "noiser", Noiser, version=2, summary="bounded noise on one unit at a time (the paper's method)"
)

for _name, _place, _summary in (
    ("inseq", "inseq:InseqMethod", "any method of Inseq, such as inseq:saliency"),
    (
        "captum",
        "captum:CaptumMethod",
        "a method of Captum that takes embeddings, such as captum:ShapleyValueSampling",
    ),
    (
        "shapiq",
        "shapiq:ShapiqMethod",
        "an estimator of Shapley values of shapiq, such as shapiq:KernelSHAP",
    ),
):
    METHODS.families[_name] = Family(_name, f"noiser.integrations.{_place}.factory", _summary)
