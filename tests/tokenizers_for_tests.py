"""Tiny tokenizers of every kind, trained in milliseconds on the sentences below; each factory makes
a new object.
"""

import json
from collections.abc import Callable

from tokenizers import (
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import PreTrainedTokenizerFast

SENTENCES = [
    "The tall woman from the north plays basketball professionally.",
    "She said that the game was long, and that the score was 8.1 to 7.9.",
    "Nobody in the town knew why the old clock had stopped at noon.",
    "A naïve café owner sold crème brûlée for 1,000 coins; don't ask me why!",
    "Быстрая лиса прыгает через ленивую собаку. Привет, мир!",
    "नमस्ते दुनिया, यह एक छोटा वाक्य है।",
    "我们今天去打篮球。你好，世界！",
    "Good morning 👋, see you at the party 🎉🎉 tonight 👨‍👩‍👧.",
    "  def play(sport):\n    return sport.lower()\n",
]
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|{{ message['role'] }}|>\n{{ "
    "message['content'] }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)


def _train(
    core: Tokenizer, trainer, sentences=SENTENCES, specials=("<s>", "</s>", "<unk>"), **options
) -> None:
    core.train_from_iterator(
        sentences, trainer(special_tokens=[*specials], show_progress=False, **options)
    )


def _finish(
    core: Tokenizer, unk: str | None = None, *, bos: bool = True
) -> PreTrainedTokenizerFast:
    if bos:
        core.post_processor = processors.Sequence(
            [
                *([core.post_processor] if core.post_processor else []),
                processors.TemplateProcessing(
                    single="<s> $A", special_tokens=[("<s>", core.token_to_id("<s>"))]
                ),
            ]
        )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token="<s>", eos_token="</s>", unk_token=unk
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def _byte_level(
    *, trim: bool, prefix: bool = False, normalizer: normalizers.Normalizer | None = None
):
    core = Tokenizer(models.BPE())
    if normalizer is not None:
        core.normalizer = normalizer
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix)
    core.decoder = decoders.ByteLevel()
    core.post_processor = processors.ByteLevel(trim_offsets=trim)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    _train(
        core,
        trainers.BpeTrainer,
        specials=["<s>", "</s>"],
        vocab_size=500,
        initial_alphabet=alphabet,
    )
    return _finish(core)


def _unigram() -> PreTrainedTokenizerFast:
    """As T5's and XLNet's: a prefix space, pieces by probability, an unknown token."""
    core = Tokenizer(models.Unigram())
    core.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Replace("\n", " ")])
    core.pre_tokenizer = pre_tokenizers.Metaspace()
    core.decoder = decoders.Metaspace()
    _train(core, trainers.UnigramTrainer, vocab_size=300, unk_token="<unk>")
    return _finish(core, "<unk>")


def _byte_fallback() -> PreTrainedTokenizerFast:
    """As Llama 2's: a space put in front by the normaliser, and bytes for unknown characters."""
    trained = Tokenizer(models.BPE(unk_token="<unk>"))
    trained.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    specials = ["<unk>", "<s>", "</s>"]
    known = [
        sentence for sentence in SENTENCES if sentence.isascii()
    ]  # `limit_alphabet` breaks ties anew each time
    _train(trained, trainers.BpeTrainer, known, specials, vocab_size=350)
    model = json.loads(trained.to_str())["model"]
    vocab = model["vocab"] | {f"<0x{byte:02X}>": len(model["vocab"]) + byte for byte in range(256)}
    merges = [tuple(merge) for merge in model["merges"]]
    core = Tokenizer(
        models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    core.add_special_tokens(specials)
    core.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    core.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return _finish(core, "<unk>")


def _word_level() -> PreTrainedTokenizerFast:
    core = Tokenizer(models.WordLevel(unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    _train(core, trainers.WordLevelTrainer)
    return _finish(core, "<unk>")


def _word_piece() -> PreTrainedTokenizerFast:
    """As BERT's: drops control characters, accents and case."""
    core = Tokenizer(models.WordPiece(unk_token="<unk>"))
    core.normalizer = normalizers.BertNormalizer(strip_accents=True, lowercase=True)
    core.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    core.decoder = decoders.WordPiece()
    _train(core, trainers.WordPieceTrainer, vocab_size=300)
    return _finish(core, "<unk>")


TOKENIZERS: dict[str, Callable[[], PreTrainedTokenizerFast]] = {
    "byte_level": lambda: _byte_level(trim=False),
    "byte_level_trimmed": lambda: _byte_level(trim=True),
    "byte_level_prefix_space": lambda: _byte_level(trim=True, prefix=True),
    "byte_level_lower": lambda: _byte_level(
        trim=False, normalizer=normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
    ),
    "byte_level_nfd": lambda: _byte_level(trim=True, normalizer=normalizers.NFD()),
    "unigram": _unigram,
    "byte_fallback": _byte_fallback,
    "word_level": _word_level,
    "word_piece": _word_piece,
}
