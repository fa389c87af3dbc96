"""What a graphics card does with models of published shapes: prompts a second, share of its peak,
the longest prompt.

    python benchmarks/devices.py --device cuda --output build/devices.json
    python benchmarks/devices.py --device cuda --long 1000 4000 7800 --attention loop flex
    python benchmarks/devices.py --device cpu

Weights are random: they do not matter for speed, and nothing has to be downloaded. They do matter
for how often a search asks, so Noiser's scoring pass is measured, with its k given; a whole call
with its search is about three of them (bisection) or one and a half (certified). The prompts are
attributed as one list, as a user would.

Peak: a product of square matrices in the same precision, on the same device. The longest prompt is
doubled from 1,024 tokens until memory does not suffice, or to what the model can read; four spans
of it are occluded. What passes cost, and the usual way, is measured by `passes.py`.

On a CPU the shape is a tiny one, in float32: what is left is the host's work.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import time
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import transformers

import flex
import noiser
import passes
from many_prompts import PROMPTS
from measuring import DTYPES, TEXT, ForwardClock, matrix_peak, operations, say, table
from noiser.errors import ModelError
from noiser.methods import Method
from noiser.model import LanguageModel
from noiser.model.memory import free_memory, is_out_of_memory

SHAPES: dict[str, transformers.PretrainedConfig] = {
    "llama-3-8b": transformers.LlamaConfig(
        vocab_size=128256,
        intermediate_size=14336,
        num_key_value_heads=8,
        max_position_embeddings=8192,
        rope_theta=500000.0,
    ),
    "gemma-2-9b": transformers.Gemma2Config(
        hidden_size=3584,
        intermediate_size=14336,
        num_hidden_layers=42,
        num_attention_heads=16,
        num_key_value_heads=8,
    ),
    "gemma-3-270m": transformers.Gemma3TextConfig(
        vocab_size=262144,
        hidden_size=640,
        intermediate_size=2048,
        num_hidden_layers=18,
        num_attention_heads=4,
        num_key_value_heads=1,
        max_position_embeddings=32768,
    ),
    "tiny": transformers.LlamaConfig(
        vocab_size=512,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=18,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=8192,
    ),
}
"""What differs from the defaults of each class. The tiny one is for the host's work alone."""

METHODS: dict[str, Method] = {
    "noiser, one scoring pass": noiser.Noiser(bounding=0.05),
    "joint": noiser.Joint(),
    "occlusion": noiser.Occlusion(),
    "attention_gradient": noiser.AttentionGradient(),
}

UNITS = {"attention_gradient": "sentence"}
"""What a method scores that refuses tokens."""


def random_model(
    config: transformers.PretrainedConfig, tokenizer: Any, device: str, dtype: str
) -> LanguageModel:
    """A model of this shape, made where it will run."""
    with torch.device(device):
        model: Any = transformers.AutoModelForCausalLM.from_config(config, dtype=DTYPES[dtype])
    return noiser.wrap(model.eval(), tokenizer)


def speed(lm: LanguageModel, name: str, prompts: Sequence[str], top: float) -> dict[str, Any]:
    """The row of one method: a list of prompts, after a first call that warms up."""
    asked: dict[str, Any] = {"method": METHODS[name], "unit": UNITS.get(name, "token")}
    noiser.attribute(lm, list(prompts[:2]), **{"unit": "token"} | asked)
    with ForwardClock(lm) as clock:
        begin = time.perf_counter()
        found = noiser.attribute(lm, list(prompts), **{"unit": "token"} | asked)
        took = time.perf_counter() - begin
    return {
        "method": name,
        "prompts": len(prompts),
        "prompts a second": len(prompts) / took,
        "token-forwards a second": sum(att.info["token_forwards"] for att in found) / took,
        "share of peak, %": 100 * operations(lm, clock.tokens, clock.rows) / took / top,
    }


def longest(lm: LanguageModel, limit: int, first: int = 1024) -> dict[str, Any]:
    """The row of the longest prompt, in powers of two, of which four spans can be occluded."""
    found: dict[str, Any] = {"method": "occlusion, four spans"}
    tokens = first
    while tokens <= limit:
        ids = lm.tokenizer(" ".join([TEXT] * (tokens // 100 + 1)))["input_ids"][: tokens - 8]
        text = lm.tokenizer.decode(ids, skip_special_tokens=True)
        quarter = len(text) // 4
        spans = [(i * quarter, (i + 1) * quarter) for i in range(4)]
        try:
            begin = time.perf_counter()
            noiser.attribute(lm, text, method="occlusion", unit=spans)
            found |= {"longest prompt, tokens": tokens, "seconds": time.perf_counter() - begin}
        except (ModelError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            break
        tokens *= 2
    return found


def measured(
    shape: str,
    tokenizer: Any,
    device: str,
    dtype: str,
    prompts: Sequence[str],
    top: float,
    *,
    limit: int | None = None,
    long: Sequence[int] = (),
    attentions: Sequence[str] = ("loop",),
) -> list[Any]:
    """All rows of one shape; none but the first where the weights do not fit."""
    common: dict[str, Any] = {"model": shape, "precision": dtype}
    try:
        lm = random_model(SHAPES[shape], tokenizer, device, dtype)
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        return [say(common | {"method": "does not fit"})]
    size = sum(p.numel() * p.element_size() for p in lm.model.parameters())
    rows = [
        say(common | {"weights, GiB": size / 2**30} | speed(lm, name, prompts, top))
        for name in METHODS
    ]
    for attention in attentions:
        named = common | {"attention": attention}
        compiles = attention == "flex"
        with flex.one_call(lm) if compiles else nullcontext():
            for row in passes.short_rows(lm, prompts, top, compiles=compiles):
                rows.append(say(named | row))
            for tokens in long:
                for row in passes.long_rows(lm, tokens, top, compiles=compiles):
                    rows.append(say(named | row))
    readable = lm.model.config.max_position_embeddings
    rows.append(say(common | longest(lm, readable if limit is None else min(limit, readable))))
    if torch.device(device).type == "cuda":
        rows[-1]["memory, GiB"] = torch.cuda.max_memory_allocated(device) / 2**30
        torch.cuda.reset_peak_memory_stats(device)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", choices=list(DTYPES))
    parser.add_argument("--shapes", nargs="+", choices=list(SHAPES))
    parser.add_argument(
        "--long", nargs="+", type=int, default=[1000], help="tokens of long prompts"
    )
    parser.add_argument(
        "--attention",
        nargs="+",
        choices=["loop", "flex"],
        default=["loop"],
        help="of passes: blocks one after the other, or one call a layer (flex.py)",
    )
    parser.add_argument("--prompts", type=int, default=len(PROMPTS))
    parser.add_argument(
        "--longest", type=int, help="tokens of the longest prompt to try (what the model can read)"
    )
    parser.add_argument(
        "--tokenizer", help="a folder with a tokenizer (that of the built-in model)"
    )
    parser.add_argument("--output", type=Path, help="also as JSON")
    chosen = parser.parse_args()
    on_cpu = torch.device(chosen.device).type == "cpu"
    dtype = chosen.dtype or ("float32" if on_cpu else "bfloat16")
    shapes = chosen.shapes or ["tiny" if on_cpu else shape for shape in SHAPES if shape != "tiny"]
    if chosen.tokenizer:
        tokenizer: Any = transformers.AutoTokenizer.from_pretrained(chosen.tokenizer)
    elif on_cpu:
        tokenizer = passes.word_tokenizer([*PROMPTS, TEXT, TEXT.title()])
    else:
        tokenizer = noiser.load_model("smollm2-135m-instruct", device="cpu").tokenizer
    top = matrix_peak(dtype, 512 if on_cpu else 8192, chosen.device)
    rows: list[dict[str, Any]] = []
    for shape in dict.fromkeys(shapes):
        prompts = PROMPTS[: chosen.prompts]
        rows += measured(
            shape,
            tokenizer,
            chosen.device,
            dtype,
            prompts,
            top,
            limit=chosen.longest,
            long=chosen.long,
            attentions=chosen.attention,
        )
        gc.collect()
        free_memory()
    name = platform.processor() or "CPU"
    if torch.device(chosen.device).type == "cuda":
        name = torch.cuda.get_device_name(chosen.device)
    note = f"{name}, {dtype}, peak {top / 1e12:.3g} TFLOP/s, torch {torch.__version__}"
    print(f"{note}\n\n{table(rows)}")
    if chosen.output:
        chosen.output.parent.mkdir(parents=True, exist_ok=True)
        chosen.output.write_text(
            json.dumps({"note": note, "rows": rows}, indent=1) + "\n", encoding="utf-8"
        )


if __name__ == "__main__":
    main()
