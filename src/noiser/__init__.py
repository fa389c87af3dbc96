"""Noiser: which parts of the input made a language model say that?

    lm = noiser.load_model("gemma-3-270m")
    att = noiser.attribute(lm, "LeBron James professionally plays the sport of")
    print(att)

Names are loaded when they are first used, so `import noiser` costs milliseconds.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from noiser.errors import NoiserError as NoiserError
from noiser.registry import __version__ as __version__
from noiser.types import Span as Span
from noiser.types import Target as Target

if TYPE_CHECKING:
    from noiser.attribution import Attribution as Attribution
    from noiser.attribution import Attributions as Attributions
    from noiser.evaluation import Evaluation as Evaluation
    from noiser.evaluation import evaluate as evaluate
    from noiser.evaluation import measure as measure
    from noiser.explain import Citations as Citations
    from noiser.explain import Diff as Diff
    from noiser.explain import Expectations as Expectations
    from noiser.explain import Game as Game
    from noiser.explain import Guarded as Guarded
    from noiser.explain import Rule as Rule
    from noiser.explain import Slim as Slim
    from noiser.explain import attribute as attribute
    from noiser.explain import cite as cite
    from noiser.explain import compare as compare
    from noiser.explain import diff as diff
    from noiser.explain import diff_models as diff_models
    from noiser.explain import expect as expect
    from noiser.explain import guard as guard
    from noiser.explain import rule as rule
    from noiser.explain import slim as slim
    from noiser.explain import tolerance as tolerance
    from noiser.explain import without as without
    from noiser.methods import Added as Added
    from noiser.methods import AttentionGradient as AttentionGradient
    from noiser.methods import AttentionRollout as AttentionRollout
    from noiser.methods import AttnLrp as AttnLrp
    from noiser.methods import Constant as Constant
    from noiser.methods import ContextCite as ContextCite
    from noiser.methods import DeepLift as DeepLift
    from noiser.methods import GradientShap as GradientShap
    from noiser.methods import InputXGradient as InputXGradient
    from noiser.methods import IntegratedGradients as IntegratedGradients
    from noiser.methods import Joint as Joint
    from noiser.methods import KernelShap as KernelShap
    from noiser.methods import LastAttention as LastAttention
    from noiser.methods import Length as Length
    from noiser.methods import Lime as Lime
    from noiser.methods import Noiser as Noiser
    from noiser.methods import Occlusion as Occlusion
    from noiser.methods import Overlap as Overlap
    from noiser.methods import Position as Position
    from noiser.methods import Random as Random
    from noiser.methods import Search as Search
    from noiser.methods import SequentialIntegratedGradients as SequentialIntegratedGradients
    from noiser.methods import ShapleySampling as ShapleySampling
    from noiser.model import LanguageModel as LanguageModel
    from noiser.model import load_model as load_model
    from noiser.model import wrap as wrap
    from noiser.text import place_sources as place_sources

_NAMES = {
    "attribution": "Attribution Attributions",
    "evaluation": "Evaluation evaluate measure",
    "explain": "Citations Diff Expectations Game Guarded Rule Slim attribute cite compare diff "
    "diff_models "
    "expect guard rule slim tolerance without",
    "methods": "Added AttentionGradient AttentionRollout AttnLrp Constant ContextCite DeepLift "
    "GradientShap "
    "InputXGradient IntegratedGradients KernelShap LastAttention Length Lime Noiser Joint "
    "Occlusion Overlap Position "
    "Random Search SequentialIntegratedGradients ShapleySampling",
    "model": "LanguageModel load_model wrap",
    "text": "place_sources",
}
_HOMES = {name: f"noiser.{room}" for room, names in _NAMES.items() for name in names.split()}
_ROOMS = (
    "attribution bench data engine errors evaluation explain judges "
    "methods metrics model objectives registry types"
)

__all__ = ["NoiserError", "Span", "Target", "__version__", *sorted(_HOMES)]  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        value = getattr(importlib.import_module(_HOMES[name]), name)
    elif name in _ROOMS.split():
        value = importlib.import_module(f"noiser.{name}")
    else:
        raise AttributeError(f"module 'noiser' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*__all__, *_ROOMS.split()})
