"""The class of transformers that loads a checkpoint, and the kinds of model that Noiser refuses."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from noiser.errors import UnsupportedModelError

_CLASSIFIERS = (
    "ForSequenceClassification",
    "ForTokenClassification",
    "ForQuestionAnswering",
    "ForMultipleChoice",
    "ForImageClassification",
    "ForAudioClassification",
)
"""How the names of model classes end that score labels and predict no token."""


def auto_class_of(config: Any, name: str) -> Any:
    """The auto class of transformers that loads the checkpoint `name` of a configuration.

    It is `AutoModelForCausalLM` if that class knows the configuration, and otherwise
    `AutoModelForImageTextToText`: its models read text without a picture as language models do.

    Raises:
        UnsupportedModelError: an encoder-decoder model, a classifier, or any other kind.
    """
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    architectures = getattr(config, "architectures", None) or [type(config).__name__]
    refuse_other_kinds(architectures[0], config, f"The model {name!r} ({architectures[0]})")
    code_of_its_own: dict[str, str] = getattr(config, "auto_map", None) or {}
    for auto_class in (AutoModelForCausalLM, AutoModelForImageTextToText):
        known: Any = auto_class._model_mapping  # pyright: ignore[reportPrivateUsage]
        if auto_class.__name__ in code_of_its_own or type(config) in known:
            return auto_class
    raise UnsupportedModelError(
        f"The model {name!r} is not a causal language model that transformers can load: it has a "
        f"{type(config).__name__}. Take a decoder-only model."
    )


def may_have_processor(config: Any) -> bool:
    """Whether transformers has an image-text model for a configuration."""
    from transformers import AutoModelForImageTextToText

    known: Any = AutoModelForImageTextToText._model_mapping  # pyright: ignore[reportPrivateUsage]
    code_of_its_own: dict[str, str] = getattr(config, "auto_map", None) or {}
    return type(config) in known or "AutoProcessor" in code_of_its_own


def refuse_other_kinds(architecture: str, config: Any, subject: str) -> None:
    """Raises UnsupportedModelError if the subject is a classifier or an encoder-decoder."""
    if architecture.endswith(_CLASSIFIERS):
        raise UnsupportedModelError(
            f"{subject} is a classifier, which predicts no next token. Take a decoder-only "
            "language model, or explain the classifier with Captum."
        )
    configs = [config]
    with suppress(AttributeError, ValueError):  # a configuration of the model's own code
        configs.append(config.get_text_config())
    if any(getattr(each, "is_encoder_decoder", False) for each in configs):
        raise UnsupportedModelError(
            f"{subject} is an encoder-decoder model. Take a decoder-only (causal) language "
            "model, or explain this one with Inseq."
        )
