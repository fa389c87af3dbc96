"""Random tiny image-text models of eight families, each with a real processor made of parts.

The processors are built without their video parts, and with image processors that need Pillow
alone.
"""

from __future__ import annotations

import copy
import importlib
import sys
from functools import cache
from typing import Any

import pytest
import torch
import transformers
from PIL import Image, ImageDraw

import noiser
from tiny import SIZES, tiny_tokenizer

TEXT: dict[str, Any] = {**SIZES, "vocab_size": 512, "max_position_embeddings": 2048}
VISION: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 56,
    "patch_size": 14,
}
WITHOUT_HEAD_DIM = {name: value for name, value in TEXT.items() if name != "head_dim"}
ROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% if m['content'] is string %}"
    "{{ m['content'] }}{% else %}{% for p in m['content'] %}{% if p['type'] == 'image' %}IMAGE"
    "{% else %}{{ p['text'] }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def tokenizer_with(named: dict[str, str], shown: str, extra: tuple[str, ...] = ()) -> Any:
    """The tiny tokenizer with special tokens that a processor reads by name; `shown` stands for a
    picture in its chat template.
    """
    base = copy.deepcopy(tiny_tokenizer())
    special = ["<|im_start|>", "<|im_end|>", *named.values(), *extra]
    base.add_special_tokens({"additional_special_tokens": special})
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=base.backend_tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        additional_special_tokens=special,
        extra_special_tokens=named,
    )
    tokenizer.chat_template = CHATML.replace("IMAGE", shown)
    return tokenizer


def without_video(processor_class: Any) -> Any:
    """A processor class that takes None for its video processor, which needs torchvision."""

    class WithoutVideo(processor_class):
        def check_argument_for_proper_class(self, argument_name, argument):
            if argument_name == "video_processor":
                return None
            return super().check_argument_for_proper_class(argument_name, argument)

    WithoutVideo.__name__ = processor_class.__name__
    return WithoutVideo


def randomised(model: Any, tokenizer: Any) -> Any:
    """The model with random weights; no token that the tokenizer lacks is ever predicted."""
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(0)
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 0.25)
        model.get_output_embeddings().weight[len(tokenizer) :] = 0
    return model.eval().float()


def _qwen(kind: str) -> tuple[Any, Any]:
    named = {
        "image_token": "<|image_pad|>",
        "video_token": "<|video_pad|>",
        "vision_start_token": "<|vision_start|>",
        "vision_end_token": "<|vision_end|>",
    }
    tokenizer = tokenizer_with(named, "<|vision_start|><|image_pad|><|vision_end|>")
    ids = {f"{name}_id": tokenizer.convert_tokens_to_ids(token) for name, token in named.items()}
    images = transformers.Qwen2VLImageProcessorPil(
        patch_size=14,
        merge_size=2,
        temporal_patch_size=2,
        size={"shortest_edge": 28 * 28, "longest_edge": 28 * 28 * 48},
    )
    vision = {"depth": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": 4}
    vision |= {"out_hidden_size": 32, "patch_size": 14}
    if kind == "2.5":
        config = transformers.Qwen2_5_VLConfig(
            text_config={**WITHOUT_HEAD_DIM, "rope_parameters": ROPE},
            vision_config={**vision, "window_size": 56, "fullatt_block_indexes": [1]},
            **ids,
        )
        model = transformers.Qwen2_5_VLForConditionalGeneration(config)
        made = without_video(transformers.Qwen2_5_VLProcessor)
    else:
        config = transformers.Qwen3VLConfig(
            text_config={**TEXT, "rope_parameters": {**ROPE, "mrope_interleaved": True}},
            vision_config={**vision, "deepstack_visual_indexes": [0]}
            | {"num_position_embeddings": 64},
            **ids,
        )
        model = transformers.Qwen3VLForConditionalGeneration(config)
        made = without_video(transformers.Qwen3VLProcessor)
    return model, made(images, tokenizer, None, chat_template=tokenizer.chat_template)


def qwen25vl() -> tuple[Any, Any]:
    """Positions of three axes."""
    return _qwen("2.5")


def qwen3vl() -> tuple[Any, Any]:
    """Positions of three axes, and features that early layers add (DeepStack)."""
    return _qwen("3")


def llava_processor(kind: Any, images: Any, tokenizer: Any) -> Any:
    """A processor of the LLaVA family, for a tower with a class token and patches of 14 pixels."""
    return kind(
        images,
        tokenizer,
        patch_size=14,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=tokenizer.chat_template,
    )


def square_crops() -> Any:
    """Pictures cut to a square of 56 pixels."""
    return transformers.CLIPImageProcessorPil(
        size={"shortest_edge": 56}, crop_size={"height": 56, "width": 56}
    )


def llava() -> tuple[Any, Any]:
    """A square crop of each picture, 16 tokens."""
    tokenizer = tokenizer_with({"image_token": "<image>"}, "<image>")
    config = transformers.LlavaConfig(
        text_config=transformers.LlamaConfig(**TEXT),
        vision_config=transformers.CLIPVisionConfig(**VISION),
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
    )
    processor = llava_processor(transformers.LlavaProcessor, square_crops(), tokenizer)
    return transformers.LlavaForConditionalGeneration(config), processor


def llava_next() -> tuple[Any, Any]:
    """The whole picture, its tiles, and tokens that break rows."""
    tokenizer = tokenizer_with({"image_token": "<image>"}, "<image>")
    tiles = [[56, 112], [112, 56], [112, 112]]
    config = transformers.LlavaNextConfig(
        text_config=transformers.LlamaConfig(**TEXT),
        vision_config=transformers.CLIPVisionConfig(**VISION),
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
        image_grid_pinpoints=tiles,
    )
    images = transformers.LlavaNextImageProcessorPil(
        size={"shortest_edge": 56},
        crop_size={"height": 56, "width": 56},
        image_grid_pinpoints=tiles,
    )
    processor = llava_processor(transformers.LlavaNextProcessor, images, tokenizer)
    return transformers.LlavaNextForConditionalGeneration(config), processor


def internvl() -> tuple[Any, Any]:
    """Tiles and a thumbnail."""
    named = {
        "start_image_token": "<img>",
        "end_image_token": "</img>",
        "context_image_token": "<IMG_CONTEXT>",
        "video_token": "<video>",
    }
    tokenizer = tokenizer_with(named, "<IMG_CONTEXT>\n")
    vision = {**VISION, "image_size": [56, 56], "patch_size": [14, 14]}
    config = transformers.InternVLConfig(
        text_config=transformers.Qwen2Config(**WITHOUT_HEAD_DIM),
        vision_config=transformers.InternVLVisionConfig(**vision),
        image_token_id=tokenizer.convert_tokens_to_ids("<IMG_CONTEXT>"),
        image_seq_length=4,
    )
    images = transformers.GotOcr2ImageProcessorPil(
        size={"height": 56, "width": 56}, crop_to_patches=True, min_patches=1, max_patches=6
    )
    processor = without_video(transformers.InternVLProcessor)(
        images, tokenizer, None, image_seq_length=4, chat_template=tokenizer.chat_template
    )
    return transformers.InternVLForConditionalGeneration(config), processor


def gemma3(window: int = 12) -> tuple[Any, Any]:
    """Tokens of a picture see each other, inside the window of a layer that slides."""
    named = {
        "boi_token": "<start_of_image>",
        "eoi_token": "<end_of_image>",
        "image_token": "<image_soft_token>",
    }
    tokenizer = tokenizer_with(named, "<start_of_image>")
    ids = {name: tokenizer.convert_tokens_to_ids(token) for name, token in named.items()}
    config = transformers.Gemma3Config(
        text_config=transformers.Gemma3TextConfig(
            **TEXT, sliding_window=window, layer_types=["sliding_attention", "full_attention"]
        ),
        vision_config=transformers.SiglipVisionConfig(**{**VISION, "image_size": 112}),
        mm_tokens_per_image=16,
        image_token_index=ids["image_token"],
        boi_token_index=ids["boi_token"],
        eoi_token_index=ids["eoi_token"],
    )
    images = transformers.Gemma3ImageProcessorPil(size={"height": 112, "width": 112})
    processor = transformers.Gemma3Processor(
        images, tokenizer, image_seq_length=16, chat_template=tokenizer.chat_template
    )
    return transformers.Gemma3ForConditionalGeneration(config), processor


def pixtral_processor() -> Any:
    """The class of Mistral 3's processor, also where torchvision is missing.

    Its module imports one function from that of the image processor that needs torchvision. The
    module of Pillow's image processor has the same function.
    """
    folder = "transformers.models.pixtral"
    needs_torchvision = f"{folder}.image_processing_pixtral"
    before = sys.modules.get(needs_torchvision)
    with_pillow = importlib.import_module(f"{folder}.image_processing_pil_pixtral")
    sys.modules[needs_torchvision] = with_pillow
    try:
        return importlib.import_module(f"{folder}.processing_pixtral").PixtralProcessor
    finally:
        del sys.modules[needs_torchvision]
        if before is not None:
            sys.modules[needs_torchvision] = before


def mistral3() -> tuple[Any, Any]:
    """As many tokens as the picture has patches, with tokens of text that break rows."""
    tokenizer = tokenizer_with({"image_token": "[IMG]"}, "[IMG]", ("[IMG_BREAK]", "[IMG_END]"))
    config = transformers.Mistral3Config(
        text_config=transformers.MistralConfig(**TEXT, sliding_window=None),
        vision_config=transformers.PixtralVisionConfig(**{**VISION, "image_size": 168}),
        image_token_index=tokenizer.convert_tokens_to_ids("[IMG]"),
        spatial_merge_size=2,
    )
    images = transformers.PixtralImageProcessorPil(
        size={"longest_edge": 168}, patch_size={"height": 14, "width": 14}
    )
    processor = pixtral_processor()(
        images,
        tokenizer,
        patch_size=14,
        spatial_merge_size=2,
        chat_template=tokenizer.chat_template,
    )
    return transformers.Mistral3ForConditionalGeneration(config), processor


def smolvlm() -> tuple[Any, Any]:
    """Tiles between tags of text, and the whole picture."""
    named = {
        "image_token": "<image>",
        "fake_image_token": "<fake_token_around_image>",
        "global_image_token": "<global-img>",
        "end_of_utterance_token": "<end_of_utterance>",
    }
    places = [f"<row_{row}_col_{column}>" for row in range(1, 5) for column in range(1, 5)]
    tokenizer = tokenizer_with(named, "<image>", tuple(places))
    config = transformers.SmolVLMConfig(
        text_config=transformers.LlamaConfig(**TEXT),
        vision_config=transformers.SmolVLMVisionConfig(**VISION),
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        scale_factor=2,
    )
    images = transformers.SmolVLMImageProcessorPil(
        size={"longest_edge": 168}, max_image_size={"longest_edge": 56}, do_image_splitting=True
    )
    processor = without_video(transformers.SmolVLMProcessor)(
        images, tokenizer, None, image_seq_len=4, chat_template=tokenizer.chat_template
    )
    return transformers.SmolVLMForConditionalGeneration(config), processor


def paligemma() -> tuple[Any, Any]:
    """Not causal: the prompt sees all of itself."""
    tokenizer = tokenizer_with({"image_token": "<image>"}, "<image>")
    config = transformers.PaliGemmaConfig(
        text_config=transformers.GemmaConfig(**{**TEXT, "vocab_size": 1700}),
        vision_config=transformers.SiglipVisionConfig(**VISION, vision_use_head=False),
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
        projection_dim=32,
    )
    images = transformers.SiglipImageProcessorPil(size={"height": 56, "width": 56})
    images.image_seq_length = 16
    processor = transformers.PaliGemmaProcessor(
        images, tokenizer, chat_template=tokenizer.chat_template
    )
    return transformers.PaliGemmaForConditionalGeneration(config), processor


FAMILIES = {
    made.__name__: made
    for made in (qwen25vl, qwen3vl, llava, llava_next, internvl, gemma3, mistral3, smolvlm)
}


NEEDS = {"smolvlm": "num2words"}
"""Packages beside Pillow that the processor of a family imports."""


def build(family: str) -> tuple[Any, Any]:
    """A random model of a family and its processor."""
    if family in NEEDS:
        pytest.importorskip(NEEDS[family], reason=f"the processor of {family} imports it")
    with torch.random.fork_rng():
        torch.manual_seed(0)  # also of what `randomised` leaves, such as a tower's class token
        model, processor = {**FAMILIES, "paligemma": paligemma}[family]()
    return randomised(model, processor.tokenizer), processor


@cache
def wrapped(family: str) -> noiser.LanguageModel:
    """The model of a family with its processor, one for all tests that leave it as it is."""
    return noiser.wrap(*build(family))


def picture(width: int = 224, height: int = 168) -> Image.Image:
    """A house under the sun."""
    image = Image.new("RGB", (width, height), (150, 190, 235))
    draw = ImageDraw.Draw(image)

    def box(left: float, top: float, right: float, bottom: float) -> list[float]:
        return [left * width, top * height, right * width, bottom * height]

    draw.rectangle(box(0, 2 / 3, 1, 1), fill=(90, 150, 70))
    draw.ellipse(box(0.7, 0.08, 0.88, 0.32), fill=(250, 210, 40))
    roof = [(0.15, 0.45), (0.3, 0.2), (0.45, 0.45)]
    draw.polygon([(x * width, y * height) for x, y in roof], fill=(170, 40, 30))
    draw.rectangle(box(0.18, 0.45, 0.42, 0.8), fill=(225, 200, 160))
    draw.rectangle(box(0.27, 0.58, 0.34, 0.8), fill=(90, 60, 40))
    draw.ellipse(box(0.6, 0.6, 0.78, 0.85), fill=(20, 20, 20))
    return image
