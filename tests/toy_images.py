"""A tiny LLaVA that is trained here to name the colour at a quarter of a picture."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import transformers
from PIL import Image, ImageDraw

from tiny_images import TEXT, llava_processor, square_crops, tokenizer_with

COLOURS = {
    "red": (220, 40, 40),
    "green": (40, 170, 60),
    "blue": (50, 80, 220),
    "yellow": (240, 210, 40),
    "white": (245, 245, 245),
    "purple": (150, 60, 190),
}
SHAPES = ["circle", "square", "triangle", "cross"]
PLACES = ["top left", "top right", "bottom left", "bottom right"]
MEAN = torch.tensor([0.48145466, 0.4578275, 0.40821073])
STD = torch.tensor([0.26862954, 0.26130258, 0.27577711])
STEPS = 800
PICTURES = 6000


def draw(rng: random.Random, scale: int = 1) -> tuple[Image.Image, list[str]]:
    """A picture of 56 pixels times `scale` with a shape in each quarter, and their colours."""
    side = 28 * scale
    background = (rng.randint(70, 110), rng.randint(70, 110), rng.randint(70, 110))
    image = Image.new("RGB", (2 * side, 2 * side), background)
    pen = ImageDraw.Draw(image)
    colours: list[str] = []
    for quarter, shape in enumerate(rng.sample(SHAPES, 4)):
        name = rng.choice(list(COLOURS))
        colours.append(name)
        x = side * (quarter % 2) + scale * (4 + rng.randint(-2, 2))
        y = side * (quarter // 2) + scale * (4 + rng.randint(-2, 2))
        _draw_shape(pen, shape, x, y, scale, COLOURS[name])
    return image, colours


def _draw_shape(
    pen: ImageDraw.ImageDraw, shape: str, x: int, y: int, scale: int, colour: tuple[int, int, int]
) -> None:
    size = 20 * scale - 1
    first, last = 7 * scale, 13 * scale - 1  # of a cross's arms
    if shape == "circle":
        pen.ellipse([x, y, x + size, y + size], outline=colour, width=5 * scale)
    elif shape == "square":
        pen.rectangle([x, y, x + size, y + size], fill=colour)
    elif shape == "triangle":
        pen.polygon([(x, y + size), (x + size, y + size), (x + size / 2, y)], fill=colour)
    else:
        pen.rectangle([x + first, y, x + last, y + size], fill=colour)
        pen.rectangle([x, y + first, x + size, y + last], fill=colour)


def chat_of(place: str, image: Any = None) -> list[dict[str, Any]]:
    """What colour is at a place of the picture?"""
    part: dict[str, Any] = {"type": "image"} if image is None else {"type": "image", "image": image}
    text = {"type": "text", "text": f"What colour is at the {place}?"}
    return [{"role": "user", "content": [part, text]}]


def untrained() -> tuple[Any, Any]:
    """The model with random weights, and its processor."""
    tokenizer = tokenizer_with({"image_token": "<image>"}, "<image>")
    words = [*COLOURS, "top", "bottom", "left", "right", "colour", "What", "is", "the"]
    tokenizer.add_tokens(words)
    tokenizer.chat_template = (
        "{% for m in messages %}{% for q in m['content'] %}{% if q['type'] == 'image' %}<image>"
        "{% else %}{{ q['text'] }}{% endif %}{% endfor %}<|im_end|>{% endfor %}"
    )
    sizes = {"vocab_size": len(tokenizer), "hidden_size": 96, "intermediate_size": 192}
    text = {**TEXT, **sizes, "num_hidden_layers": 3, "head_dim": 24}
    config = transformers.LlavaConfig(
        text_config=transformers.LlamaConfig(**text),
        vision_config=transformers.CLIPVisionConfig(
            hidden_size=96,
            intermediate_size=192,
            num_hidden_layers=3,
            num_attention_heads=4,
            image_size=56,
            patch_size=14,
        ),
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
        vision_feature_layer=-1,
    )
    processor = llava_processor(transformers.LlavaProcessor, square_crops(), tokenizer)
    return transformers.LlavaForConditionalGeneration(config), processor


def train() -> tuple[Any, Any]:
    """The model that answers, and its processor."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model, processor = untrained()
    rng = random.Random(0)
    data = [draw(rng) for _ in range(PICTURES)]
    pixels = torch.stack([pixels_of(image) for image, _ in data])
    prompts = {}
    for place in PLACES:
        text = processor.apply_chat_template(chat_of(place), tokenize=False)
        out = processor(text=[text], images=[[data[0][0]]], return_tensors="pt")
        prompts[place] = out.input_ids[0]
    token_of = processor.tokenizer.convert_tokens_to_ids
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01)
    model.train()
    for step in range(STEPS):
        chosen = [rng.randrange(len(data)) for _ in range(32)]
        asked = [rng.randrange(4) for _ in chosen]
        wanted = [token_of(data[each][1][place]) for each, place in zip(chosen, asked, strict=True)]
        rate = 1e-3 * min(1, step / 50, max(0.05, 3 * (1 - step / STEPS)))
        for group in optimiser.param_groups:
            group["lr"] = rate
        logits = model(
            input_ids=torch.stack([prompts[PLACES[place]] for place in asked]),
            pixel_values=pixels[chosen],
            use_cache=False,
            logits_to_keep=1,
        ).logits[:, -1]
        loss = torch.nn.functional.cross_entropy(logits, torch.tensor(wanted))
        optimiser.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
    return model.eval(), processor


def pixels_of(image: Image.Image) -> torch.Tensor:
    """What the processor makes of a picture of 56 pixels."""
    raw = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8).view(56, 56, 3)
    return ((raw.float() / 255 - MEAN) / STD).permute(2, 0, 1)


class Asked(NamedTuple):
    """A question about a picture: the quarter that is asked for, and its colour."""

    image: Image.Image
    quarter: int
    colour: str

    @property
    def chat(self) -> list[dict[str, Any]]:
        """The question as a chat."""
        return chat_of(PLACES[self.quarter], self.image)


def questions(count: int, seed: int = 7) -> Iterator[Asked]:
    """Questions about pictures that are not those of the training."""
    rng = random.Random(seed)
    for _ in range(count):
        image, colours = draw(rng)
        quarter = rng.randrange(4)
        yield Asked(image, quarter, colours[quarter])
