"""A chat model of tiny size."""

import noiser
from tiny import chat_tokenizer, tiny_model
from tokenizers_for_tests import CHAT_TEMPLATE


def chat_model():
    """Its template reads tools, and it has room for a few pages."""
    return noiser.wrap(
        tiny_model("llama", max_position_embeddings=1024).eval(),
        chat_tokenizer(CHAT_TEMPLATE + "{# it reads tools #}"),
    )
