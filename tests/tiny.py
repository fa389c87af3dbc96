"""Random two-layer models, one a family, built from a configuration in milliseconds."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

import noiser

_SIZES: dict[str, Any] = {
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
_GEMMA = {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "qwen2": ("Qwen2Config", {}),
    "qwen3": ("Qwen3Config", {}),
    "gemma2": ("Gemma2Config", _GEMMA),
    "gemma3": ("Gemma3TextConfig", _GEMMA),
    "mistral": ("MistralConfig", {"sliding_window": 6}),
    "phi3": ("Phi3Config", {"sliding_window": None}),
    "gpt2": ("GPT2Config", {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256}),
    "opt": ("OPTConfig", {"ffn_dim": 64, "word_embed_proj_dim": 16, "dropout": 0.1}),
    "olmo2": ("Olmo2Config", {}),
    "falcon": ("FalconConfig", {"alibi": False, "num_kv_heads": 2, "new_decoder_architecture": True, "head_dim": _ABSENT}),
    "granite": ("GraniteConfig", {"embedding_multiplier": 12.0, "logits_scaling": 8.0}),
    "mamba": ("MambaConfig", {"state_size": 4, "expand": 2, "max_position_embeddings": _ABSENT}),
}

_CORPUS = [
    "The quick brown fox jumps over the lazy dog near the river bank.",
    "A teacher in the village plays the violin, and the children sing along.",
    "When it rains in the mountains, the trains to the coast run late.",
]


@cache
def tiny_tokenizer(bos: bool = True) -> transformers.PreTrainedTokenizerFast:
    """Byte-level BPE over a few sentences, with a BOS that it adds itself."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=384,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_CORPUS, trainer)
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")


def tiny_model(family: str, *, seed: int = 0, spread: float = 0.3) -> Any:
    """A random model of a family, float32, in training mode as a careless caller would have it.

    `spread` is the standard deviation of its weights: large, so that predictions are sharp enough to flip.
    """
    name, extra = FAMILIES[family]
    config_class = getattr(transformers, name)
    config = config_class(**{key: value for key, value in (_SIZES | extra).items() if value is not _ABSENT})
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = transformers.AutoModelForCausalLM.from_config(config)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim > 1:
                    parameter.normal_(0, spread)
    return model.train()


@cache
def tiny(family: str) -> noiser.LanguageModel:
    return noiser.wrap(tiny_model(family).eval(), tiny_tokenizer())
