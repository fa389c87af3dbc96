"""Which classes of the installed Captum explain a function of embeddings, and what they take."""

from __future__ import annotations

import inspect
from typing import Any

from noiser.errors import DependencyError, ParameterError, UnknownNameError

__all__ = ["arguments_of", "captum_methods", "class_of", "constructor_of", "names_of"]

OURS = ("inputs", "baselines", "target", "additional_forward_args", "feature_mask", "show_progress")
"""Arguments of Captum's `attribute` that the adapter gives."""

REFUSED = {
    "FeaturePermutation": "permutes a feature between the inputs of a batch, and a prompt is one input",
    "NoiseTunnel": "wraps another method",
    **dict.fromkeys(
        ("DeepLift", "DeepLiftShap", "LRP", "GuidedBackprop", "Deconvolution", "GuidedGradCam"),
        "rewrites torch modules, and has no rule for what language models are made of",
    ),
}


def captum_methods() -> list[str]:
    """Names of the methods of the installed Captum that work on embeddings. Raises DependencyError without Captum."""
    attr = _captum()
    classes = [getattr(attr, name) for name in attr.__all__]
    return sorted(cls.__name__ for cls in classes if inspect.isclass(cls) and _works(attr, cls))


def class_of(name: str) -> Any:
    """The class of a method. Raises UnknownNameError, or ParameterError where it cannot work on embeddings alone."""
    attr, known = _captum(), captum_methods()
    if name in REFUSED:
        raise ParameterError(f"Captum's {name} {REFUSED[name]}; expected one of {', '.join(known)}.")
    if name not in known:
        hint = "Layer and neuron methods attribute to what is inside a model, not to its input."
        raise UnknownNameError("method", f"captum:{name}", [f"captum:{other}" for other in known], hint)
    return getattr(attr, name)


def _captum() -> Any:
    try:
        import captum.attr
    except ImportError as error:
        raise DependencyError(
            "Captum's methods need Captum; install it with: pip install 'noiser[captum]' (or pip install captum)."
        ) from error
    return captum.attr


def _works(attr: Any, cls: Any) -> bool:
    """Whether a class explains a function of its input, and needs nothing but the function."""
    if not issubclass(cls, attr.Attribution) or cls.__name__ in REFUSED or "attribute" not in vars(cls):
        return False
    parameters = list(inspect.signature(cls).parameters.values())
    return (
        [parameter.name for parameter in parameters[:1]] == ["forward_func"]
        and all(parameter.default is not inspect.Parameter.empty for parameter in parameters[1:])
        and "inputs" in names_of(cls.attribute)
    )


def arguments_of(cls: Any) -> tuple[str, ...]:
    """What the caller may give to its `attribute`."""
    ours = (*OURS, "self", "kwargs", "return_input_shape")
    return tuple(name for name in names_of(cls.attribute) if name not in ours)


def constructor_of(cls: Any) -> tuple[str, ...]:
    """What the caller may give to its constructor."""
    return tuple(name for name in names_of(cls) if name != "forward_func")


def names_of(function: Any) -> list[str]:
    """The names of a function's parameters."""
    return list(inspect.signature(function).parameters)
