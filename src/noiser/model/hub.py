"""Models of the Hugging Face hub: whether there is one of that name, here or there."""

from __future__ import annotations

import difflib
from pathlib import Path

from noiser.errors import ModelNotFoundError
from noiser.model.catalog import BUILT_IN


def check_hub_id(name: str, revision: str | None) -> bool:
    """Whether the hub answers, if a model of that name may be there or in the hub's local cache.

    Raises:
        ModelNotFoundError: the name is not a hub id, is nearly a built-in name, or can be neither fetched nor read.
    """
    if not _is_hub_id(name) or name.endswith(".gguf"):
        raise model_not_found(name, "there is no such file or folder.")
    cached = cached_commit(name, revision) is not None
    near = difflib.get_close_matches(name, BUILT_IN, n=1, cutoff=0.75)
    if near and "/" not in name and not cached:
        raise model_not_found(name, f"did you mean {near[0]!r}?")
    online = hub_answers()
    if not online and not cached:
        raise model_not_found(name, "the hub cannot be reached, and the model is not in the hub's local cache.")
    return online


def _is_hub_id(name: str) -> bool:
    from huggingface_hub.utils import HFValidationError, validate_repo_id

    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return True


def cached_commit(name: str, revision: str | None) -> str | None:
    """The commit of a model in the hub's local cache, or None if it is not there.

    Its files lie in a folder named by the commit that `revision` stood for when it was last asked of the hub.
    """
    from huggingface_hub import try_to_load_from_cache

    for file in ("config.json", "adapter_config.json"):
        config = try_to_load_from_cache(name, file, revision=revision)
        if isinstance(config, str):
            return Path(config).parent.name
    return None


def hub_answers() -> bool:
    """One quick question, because the hub's client retries for half a minute for every file."""
    from huggingface_hub import constants
    from huggingface_hub.utils import get_session

    if constants.HF_HUB_OFFLINE:
        return False
    try:
        get_session().head(constants.ENDPOINT, timeout=10)
    except Exception:  # whatever the HTTP library raises, the hub did not answer
        return False
    return True


def model_not_found(name: str, why: str) -> ModelNotFoundError:
    """The error for a name that nothing has."""
    short = name if len(name) <= 200 else f"{name[:200]}..."
    return ModelNotFoundError(
        f"Cannot find the model {short!r}: {why} Expected a built-in name ({', '.join(BUILT_IN)}), a local folder with "
        "config.json, a .gguf file, or the id of a model on the Hugging Face hub (needs the network)."
    )
