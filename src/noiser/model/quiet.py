"""Keeping the loading libraries quiet for the length of a call."""

from __future__ import annotations

import logging
from collections.abc import Generator
from contextlib import contextmanager

__all__ = ["quiet_transformers"]


@contextmanager
def quiet_transformers() -> Generator[None]:
    """Hides transformers' own progress bars and warnings, and puts both settings back.

    The hub's download bars stay: they are on stderr, shown only on a terminal, and worth seeing. A verbosity that
    the user chose (anything but the default) stays too.
    """
    from huggingface_hub.utils import are_progress_bars_disabled, enable_progress_bars
    from transformers.utils import logging as transformers_logging

    bars, hub_bars = transformers_logging.is_progress_bar_enabled(), not are_progress_bars_disabled()
    verbosity = transformers_logging.get_verbosity()
    if verbosity == logging.WARNING:
        transformers_logging.set_verbosity(logging.ERROR)
    if bars:
        transformers_logging.disable_progress_bar()
        if hub_bars:  # the call above switches the hub's off as well
            enable_progress_bars()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if bars:
            transformers_logging.enable_progress_bar()
