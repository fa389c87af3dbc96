"""A kind of model: a tiny random one of any family."""

import noiser
from noiser.model import BACKENDS
from tiny import tiny_model, tiny_tokenizer


def load(name, **options):
    """The model "tiny:FAMILY"."""
    family = name.partition(":")[2]
    return noiser.wrap(tiny_model(family).eval(), tiny_tokenizer())


BACKENDS.register("tiny", load, summary="tiny random models")
