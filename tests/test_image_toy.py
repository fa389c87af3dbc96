"""A tiny LLaVA that is trained here to name the colour at a quarter of a picture: the strongest
region is the quarter that was asked for.
"""

from __future__ import annotations

import random

import pytest
import torch
import transformers

import noiser
from tiny_images import TEXT, llava_processor, square_crops, tokenizer_with

pytest.importorskip("PIL")
from PIL import Image, ImageDraw

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
ASKED = 50


def draw(rng):
    """Four shapes in the quarters of a picture, and their colours by place."""
    image = Image.new("RGB", (56, 56), tuple(rng.randint(70, 110) for _ in range(3)))
    pen = ImageDraw.Draw(image)
    colours = []
    for quarter, shape in enumerate(rng.sample(SHAPES, 4)):
        name = rng.choice(list(COLOURS))
        colours.append(name)
        colour = COLOURS[name]
        x = 28 * (quarter % 2) + 4 + rng.randint(-2, 2)
        y = 28 * (quarter // 2) + 4 + rng.randint(-2, 2)
        if shape == "circle":
            pen.ellipse([x, y, x + 19, y + 19], outline=colour, width=5)
        elif shape == "square":
            pen.rectangle([x, y, x + 19, y + 19], fill=colour)
        elif shape == "triangle":
            pen.polygon([(x, y + 19), (x + 19, y + 19), (x + 9.5, y)], fill=colour)
        else:
            pen.rectangle([x + 7, y, x + 12, y + 19], fill=colour)
            pen.rectangle([x, y + 7, x + 19, y + 12], fill=colour)
    return image, colours


def chat_of(place, image=None):
    part = {"type": "image"} if image is None else {"type": "image", "image": image}
    text = {"type": "text", "text": f"What colour is at the {place}?"}
    return [{"role": "user", "content": [part, text]}]


def untrained():
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


def train():
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
        if step % 200 == 0 and __name__ == "__main__":
            print(step, float(loss), flush=True)
    return model.eval(), processor


def pixels_of(image):
    raw = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8).view(56, 56, 3)
    return ((raw.float() / 255 - MEAN) / STD).permute(2, 0, 1)


@pytest.fixture(scope="module")
def lm():
    return noiser.wrap(*train())


def questions():
    rng = random.Random(7)
    for _ in range(ASKED):
        image, colours = draw(rng)
        quarter = rng.randrange(4)
        yield image, quarter, colours[quarter]


def strongest_quarters(lm, method, **options):
    """The strongest region of each question, whether the answer is right, and the quarter."""
    found = []
    for image, quarter, colour in questions():
        att = noiser.attribute(
            lm,
            chat_of(PLACES[quarter], image),
            method=method,
            image_unit=(2, 2),
            max_new_tokens=1,
            unit="word",
            target_unit="token",
            **options,
        )
        boxes = att.info["images"]["boxes"]
        regions = [column for column, box in enumerate(boxes) if box is not None]
        strongest = int(att.scores[0, regions].argmax())
        found.append((strongest, att.targets[0].text.strip() == colour, quarter))
    return found


def share_right(found):
    return sum(strongest == quarter for strongest, _, quarter in found) / len(found)


REMOVALS = {
    "grey": (noiser.Occlusion(), {}),
    "hidden": (noiser.Occlusion(removal="hidden"), {"image_removal": "rows"}),
}


@pytest.mark.slow
@pytest.mark.parametrize(("method", "options"), REMOVALS.values(), ids=REMOVALS)
def test_the_strongest_region_is_the_quarter_that_was_asked_for(lm, method, options):
    found = strongest_quarters(lm, method, **options)
    assert sum(is_right for _, is_right, _ in found) >= 0.95 * ASKED
    assert share_right(found) >= 0.9
    # Controls: a random order of the regions, and whichever quarter is right most often.
    rng = random.Random(1)
    at_random = [(rng.randrange(4), True, quarter) for *_, quarter in found]
    assert share_right(at_random) < 0.5
    always = [share_right([(each, True, quarter) for *_, quarter in found]) for each in range(4)]
    assert max(always) < 0.5


if __name__ == "__main__":
    import time

    begin = time.process_time()
    trained = noiser.wrap(*train())
    print("trained", time.process_time() - begin)
    for name, (method, options) in REMOVALS.items():
        found = strongest_quarters(trained, method, **options)
        print(
            name,
            share_right(found),
            sum(right for _, right, _ in found),
            time.process_time() - begin,
        )
