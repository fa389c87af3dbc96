"""Random two-layer models, one a family, built from a configuration in milliseconds."""

import copy
from functools import cache
from pathlib import Path
from threading import Lock
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

import noiser

SIZES: dict[str, Any] = {
    "vocab_size": 384,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 1,
}
_ABSENT = object()  # the family's configuration has no such field
GEMMA = {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "qwen2": ("Qwen2Config", {}),
    "qwen3": ("Qwen3Config", {}),
    "gemma2": ("Gemma2Config", GEMMA),
    "gemma3": ("Gemma3TextConfig", GEMMA),
    "mistral": ("MistralConfig", {"sliding_window": 6}),
    "phi3": ("Phi3Config", {"sliding_window": None}),
    "gpt2": ("GPT2Config", {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256}),
    "opt": ("OPTConfig", {"ffn_dim": 64, "word_embed_proj_dim": 16, "dropout": 0.1}),
    "olmo2": ("Olmo2Config", {}),
    "falcon": (
        "FalconConfig",
        {"alibi": False, "num_kv_heads": 2, "new_decoder_architecture": True, "head_dim": _ABSENT},
    ),
    "granite": ("GraniteConfig", {"embedding_multiplier": 12.0, "logits_scaling": 8.0}),
    "mamba": ("MambaConfig", {"state_size": 4, "expand": 2, "max_position_embeddings": _ABSENT}),
}

_CORPUS = [
    "The quick brown fox jumps over the lazy dog near the river bank.",
    "A teacher in the village plays the violin, and the children sing along.",
    "When it rains in the mountains, the trains to the coast run late.",
    "Capital cities have museums, markets and bridges over rivers.",
]

CHAT_TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def _merges(alphabet: set[str]) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """A vocabulary and merges that join the first bytes of every word: trained ones differ between
    processes.
    """
    vocabulary = {token: i for i, token in enumerate(["<s>", "</s>", *sorted(alphabet)])}
    merges = []
    for word in " ".join(_CORPUS).replace(" ", " Ġ").split(" "):
        for end in range(1, min(6, len(word))):
            if word[: end + 1] not in vocabulary and len(vocabulary) < SIZES["vocab_size"]:
                merges.append((word[:end], word[end]))
                vocabulary[word[: end + 1]] = len(vocabulary)
    return vocabulary, merges


@cache
def tiny_tokenizer(bos: bool = True) -> transformers.PreTrainedTokenizerFast:
    """Byte-level BPE with the beginnings of some words, and a BOS that it adds itself."""
    vocabulary, merges = _merges(set(pre_tokenizers.ByteLevel.alphabet()))
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", 0)]
        )
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>"
    )


def tiny_model(family: str, *, seed: int = 0, spread: float = 0.3, **sizes: int) -> Any:
    """A random model of a family, float32, in training mode as a careless caller would have it."""
    name, extra = FAMILIES[family]
    given = {key: value for key, value in (SIZES | extra | sizes).items() if value is not _ABSENT}
    return random_model(getattr(transformers, name)(**given), seed=seed, spread=spread)


_drawing = Lock()  # the random state is that of the process, and servers load in threads


def random_model(config: Any, *, seed: int = 0, spread: float = 0.3, **options: Any) -> Any:
    """A random model of a configuration.

    `spread` is the standard deviation of its weights: large, so that predictions are sharp enough
    to flip.
    """
    with _drawing, torch.random.fork_rng():
        torch.manual_seed(seed)
        model = transformers.AutoModelForCausalLM.from_config(config, **options)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim > 1:
                    parameter.normal_(0, spread)
    return model.train()


@cache
def tiny(family: str) -> noiser.LanguageModel:
    return noiser.wrap(tiny_model(family).eval(), tiny_tokenizer())


def chat_tokenizer(template: str = CHAT_TEMPLATE) -> transformers.PreTrainedTokenizerFast:
    """A copy of the tokenizer, with a chat template."""
    tokenizer = copy.deepcopy(tiny_tokenizer())
    tokenizer.chat_template = template
    return tokenizer


def save_tiny(family: str, folder: Path) -> Path:
    """The folder, with a model of a family and its tokenizer, which has a chat template, as users
    keep them on disk.
    """
    tiny_model(family).save_pretrained(folder)
    chat_tokenizer().save_pretrained(folder)
    return folder
