"""Pictures that are read, cut and painted; whose tokens are whose; and what refuses pictures."""

from __future__ import annotations

import base64
import io
import sys

import pytest
import torch

import noiser
from noiser.engine import Predict, noise, prepare, run_one
from noiser.errors import (
    DependencyError,
    NoiserError,
    ParameterError,
    PromptError,
    TargetError,
    UnitError,
    UnknownNameError,
    UnsupportedModelError,
)
from noiser.methods import METHODS, Scores
from noiser.text.pictures import MARK, painted, read_picture
from noiser.types import Question
from tiny import tiny_model, tiny_tokenizer
from tiny_images import FAMILIES, build, picture, wrapped

Image = pytest.importorskip("PIL.Image")


@pytest.fixture(scope="module")
def lm():
    return wrapped("llava")


def content_of(image, text="What stands near the river?"):
    return [{"type": "image", "image": image}, {"type": "text", "text": text}]


def chat_of(image, text="What stands near the river?"):
    return [{"role": "user", "content": content_of(image, text)}]


def occlusion(lm, chat, **options):
    options = {"unit": "sentence", "image_unit": (1, 2), "target": " fox", **options}
    return noiser.attribute(lm, chat, method="occlusion", **options)


def encoded(image, form="PNG", **options):
    file = io.BytesIO()
    image.save(file, form, **options)
    return file.getvalue()


def data_url(image):
    return f"data:image/png;base64,{base64.b64encode(encoded(image)).decode()}"


# ---- what a picture may be ----------------------------------------------------------------------


def test_every_form_of_a_picture_is_the_same_picture(tmp_path):
    image = picture(60, 40)
    path = tmp_path / "house.png"
    path.write_bytes(encoded(image))
    forms = [
        {"type": "image", "image": image},
        {"type": "image", "image": str(path)},
        {"type": "image", "path": path},
        {"type": "image", "image": encoded(image)},
        {"type": "image", "base64": base64.b64encode(encoded(image)).decode()},
        {"type": "image", "url": data_url(image)},
        {"type": "image_url", "image_url": {"url": data_url(image)}},
        {"type": "image", "image": encoded(image, "BMP")},
        {"type": "image", "image": encoded(image, "WEBP", lossless=True)},
    ]
    for form in forms:
        assert read_picture(form, "Picture 1").tobytes() == image.tobytes()


def test_a_picture_is_turned_as_its_exif_says():
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned by a quarter
    content = encoded(picture(60, 40), "JPEG", exif=exif)
    assert read_picture({"image": content}, "Picture 1").size == (40, 60)


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P"])
def test_what_is_transparent_shows_white(mode):
    image = Image.new("RGBA", (4, 4), (200, 0, 0, 0)).convert(mode)
    options = {"transparency": image.getpixel((0, 0))} if mode == "P" else {}
    found = read_picture({"image": encoded(image, **options)}, "Picture 1")
    assert found.getpixel((0, 0)) == (255, 255, 255)


def huge():
    """A BMP that says that it has 100 million pixels, and has one."""
    content = bytearray(encoded(Image.new("RGB", (1, 1)), "BMP"))
    content[18:26] = 2 * (10_000).to_bytes(4, "little")
    return bytes(content)


REFUSED = {
    "an address": ("https://example.org/a.png", "not fetched; give a file or a data URL"),
    "no file": ("/nowhere/a.png", "cannot be read"),
    "a folder": ("/", "cannot be read"),
    "no picture at all": (None, "has no picture"),
    "a number": (7, "has no picture"),
    "no picture's bytes": (b"GIF89a", "cannot be read"),
    "a PDF": (b"%PDF-1.4 and more", "cannot be read"),
    "broken base64": ("data:image/png;base64,@@@", "not valid base64"),
    "a data URL of text": ("data:image/svg+xml,<svg/>", "without base64"),
    "too many pixels": (huge, "10000 × 10000 pixels"),
    "too many bytes": (b"\x89PNG" + bytes(20_000_001), "20,000,005 bytes"),
}


@pytest.mark.parametrize(("value", "says"), REFUSED.values(), ids=REFUSED)
def test_a_picture_that_cannot_be_read_is_refused_by_its_place(lm, value, says):
    value = value() if callable(value) else value
    with pytest.raises(PromptError, match=f"^Picture 1, of message 0, .*{says}"):
        occlusion(lm, chat_of(value))


def test_too_many_pictures(lm):
    content = content_of(picture(20, 20))[:1] * 17
    with pytest.raises(PromptError, match="17 pictures; expected at most 16"):
        occlusion(lm, [{"role": "user", "content": content}])


@pytest.mark.parametrize("text", ["Is <image> it?", f"Is {MARK} it?"])
def test_a_text_that_holds_a_placeholder(lm, text):
    with pytest.raises(PromptError, match=r"message 0 has .*stands for a picture"):
        occlusion(lm, chat_of(picture(), text))


@pytest.mark.parametrize("kind", ["video", "audio"])
def test_a_part_of_another_kind(lm, kind):
    content = [*content_of(picture()), {"type": kind, kind: "a"}]
    with pytest.raises(PromptError, match=f"part of type '{kind}'"):
        occlusion(lm, [{"role": "user", "content": content}])


def test_without_pillow_it_is_said_what_to_install(lm, monkeypatch):
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(DependencyError, match=r'pip install "noiser\[images\]"'):
        occlusion(lm, chat_of(b"GIF89a"))


# ---- regions ------------------------------------------------------------------------------------


def test_boxes_of_several_pictures(lm):
    content = [*content_of(picture(60, 40)), *content_of(picture(50, 70))]
    chat = [{"role": "user", "content": content}]
    boxes = {1: [(0, 0, 50, 35.4), (0, 35.4, 50, 70)]}
    att = occlusion(lm, chat, image_unit=boxes)
    boxes = att.info["images"]["boxes"]
    shown = [(unit.text, box) for unit, box in zip(att.units, boxes, strict=True) if box]
    assert shown == [
        ("image 2 box 1", [1, 0, 0, 50, 35]),
        ("image 2 box 2", [1, 0, 35, 50, 70]),
    ]
    with pytest.raises(ParameterError, match="there are 2 pictures"):
        occlusion(lm, chat, image_unit=[(0, 0, 10, 10)])
    with pytest.raises(ParameterError, match="picture 2; expected 0 to 1"):
        occlusion(lm, chat, image_unit={2: [(0, 0, 10, 10)]})


UNITS = {
    "a cropped edge": ((1, 60), UnitError, "column 1 holds no token: the picture has 16 tokens"),
    "too many regions": ((21, 20), UnitError, "420 regions; expected at most 400"),
    "outside": ([(0, 0, 300, 100)], UnitError, "leaves the picture"),
    "without a pixel": ([(5, 5, 5.2, 9)], UnitError, "has no pixel"),
    "a name": ("patch", ParameterError, "image_unit is 'patch'; expected"),
    "no rows": ((0, 4), ParameterError, "expected"),
    "three numbers": ([(1, 2, 3)], ParameterError, "four numbers"),
    "no number": ([(0, 0, float("nan"), 4)], ParameterError, "four numbers"),
}


@pytest.mark.parametrize(("unit", "error", "says"), UNITS.values(), ids=UNITS)
def test_a_unit_of_pictures_that_does_not_fit(lm, unit, error, says):
    with pytest.raises(error, match=says):
        occlusion(lm, chat_of(picture()), image_unit=unit)


def test_an_unknown_removal_of_regions():
    with pytest.raises(UnknownNameError, match=r"image_removal 'gray'\. Did you mean 'grey'"):
        Question(prompt="a", image_removal="gray")


@pytest.mark.parametrize("unit", [None, "image"])
def test_pictures_as_one_unit_each_or_none(lm, unit):
    att = occlusion(lm, chat_of(picture()), image_unit=unit)
    names = [each.text for each in att.units]
    assert names == ["image"] * (unit == "image") + ["What stands near the river?"]


def test_a_chat_of_a_picture_alone(lm):
    chat = [{"role": "user", "content": content_of(picture())[:1]}]
    att = occlusion(lm, chat)
    assert [unit.text for unit in att.units] == ["image row 1 column 1", "image row 1 column 2"]
    assert att.text[att.units[0].start : att.units[0].end] == MARK


def test_with_sources_pictures_stay_as_they_are(lm):
    att = occlusion(lm, chat_of(picture()), unit="source", sources=["near the river"])
    assert [unit.text.strip() for unit in att.units] == ["near the river"]


def test_pixels_of_regions_are_grey_or_blurred_and_others_stay():
    image = picture()
    box = (0, 0, 112, 84)
    for how in ("grey", "blur"):
        (changed,) = painted([image], [(0, box)], how, (1, 2, 3))
        assert (
            changed.crop((112, 0, 224, 168)).tobytes() == image.crop((112, 0, 224, 168)).tobytes()
        )
        assert changed.crop(box).tobytes() != image.crop(box).tobytes()
    (grey,) = painted([image], [(0, box)], "grey", (1, 2, 3))
    assert grey.crop(box).getcolors() == [(112 * 84, (1, 2, 3))]


# Rows and columns of tokens that the models make of a picture of 224 x 168 pixels.
LAYOUTS = {"qwen3vl": (6, 8), "gemma3": (4, 4), "mistral3": (5, 6)}


@pytest.mark.parametrize("family", LAYOUTS)
def test_a_region_owns_the_tokens_that_stand_there(family):
    lm = wrapped(family)
    scene = lm.scene(lm.encode(chat_of(picture()), pictures=True))
    height, width = LAYOUTS[family]
    assert len(scene.tokens[0]) == height * width
    owned = [
        {scene.tokens[0].index(token) for token in unit.token_indices}
        for unit in scene.units((2, 2))
    ]
    for number in range(height * width):
        down = (number // width + 0.5) / height
        across = (number % width + 0.5) / width
        if 0.5 not in (down, across):  # not on a border
            assert number in owned[2 * (down > 0.5) + (across > 0.5)]


@pytest.mark.parametrize("family", ["llava_next", "internvl"])
def test_tiles_and_the_whole_picture_have_tokens_of_each_region(family):
    lm = wrapped(family)
    scene = lm.scene(lm.encode(chat_of(picture()), pictures=True))
    units = scene.units((2, 2))
    counts = [len(unit.token_indices) for unit in units]
    assert min(counts) >= 3
    breaks = 6 if family == "llava_next" else 0  # tokens that break rows belong to no region
    assert sum(counts) == len(scene.tokens[0]) - breaks


def test_two_pictures_in_one_run_of_the_tower_are_as_one_by_one(lm):
    scene = lm.scene(lm.encode(chat_of(picture()), pictures=True))
    images = [[picture()], [picture().transpose(0)], [Image.new("RGB", (224, 168))]]
    together = scene.hand(images)
    for handed, own in zip(together, images, strict=True):
        torch.testing.assert_close(handed.inputs, scene.hand([own])[0].inputs)


def test_the_tower_reads_a_picture_once_for_each_changed_input():
    lm = noiser.wrap(*build("llava"))
    read = []
    lm.model.model.vision_tower.register_forward_pre_hook(
        lambda module, args, kwargs: read.append(len((args or [kwargs["pixel_values"]])[0])),
        with_kwargs=True,
    )
    chat = chat_of(picture())
    occlusion(lm, chat, unit="word", image_unit="image")
    first = sum(read)
    read.clear()
    occlusion(lm, chat, unit="word", image_unit="image")
    assert sum(read) == 2  # clean, and without the picture: words need no more
    assert first <= 3  # the comparison with the model's own pass, once
    read.clear()
    occlusion(lm, chat, unit="word", image_unit=(3, 3))
    assert sum(read) == 1 + 9 + 7  # rows and columns say whose tokens are whose


# ---- what is left as it was ---------------------------------------------------------------------


@pytest.mark.parametrize("family", ["qwen25vl", "gemma3"])
def test_the_model_is_left_as_it_was(family):
    model, processor = build(family)
    if hasattr(model.model, "rope_deltas"):
        model.model.rope_deltas = torch.tensor([[3]])
    hooks = [len(each._forward_pre_hooks) + len(each._forward_hooks) for each in model.modules()]
    attention = model.config._attn_implementation
    occlusion(noiser.wrap(model, processor), chat_of(picture()))
    after = [len(each._forward_pre_hooks) + len(each._forward_hooks) for each in model.modules()]
    assert hooks == after
    assert model.config._attn_implementation == attention
    if hasattr(model.model, "rope_deltas"):
        assert model.model.rope_deltas.tolist() == [[3]]


@pytest.mark.parametrize("family", ["qwen3vl", pytest.param("gemma3", marks=pytest.mark.slow)])
def test_text_is_explained_as_without_a_processor_and_without_pillow(family, monkeypatch):
    model, processor = build(family)
    chat = [{"role": "user", "content": "The quick brown fox"}]
    options = {"max_new_tokens": 1, "unit": "word"}
    for prompt in ("The quick brown fox", chat):
        expected = noiser.attribute(noiser.wrap(model, processor.tokenizer), prompt, **options)
        with monkeypatch.context() as patched:
            patched.setitem(sys.modules, "PIL", None)
            found = noiser.attribute(noiser.wrap(model, processor), prompt, **options)
        assert torch.equal(found.scores, expected.scores)
        assert "images" not in found.info


def test_many_prompts_with_and_without_pictures_are_as_one_by_one():
    lm = wrapped("qwen3vl")
    chats = [chat_of(picture()), [{"role": "user", "content": "What?"}], chat_of(picture(90, 90))]
    together = occlusion(lm, chats)
    for chat, att in zip(chats, together, strict=True):
        torch.testing.assert_close(att.scores, occlusion(lm, chat).scores, atol=1e-7, rtol=1e-3)


def test_a_foil_of_several_tokens_is_read_after_the_same_picture(lm):
    chat = chat_of(picture())
    both = occlusion(lm, chat, target=" fox jumps", foil=" dog sleeps")
    options = {"method": noiser.Occlusion(objective="logprob"), "unit": "sentence"}
    options["image_unit"] = (1, 2)
    for_target = noiser.attribute(lm, chat, target=" fox jumps", **options)
    contrast = noiser.attribute(lm, chat, target=" fox jumps", foil=" dog sleeps", **options)
    for_foil = noiser.attribute(lm, chat, target=" dog sleeps", **options)
    assert both.foil is not None
    torch.testing.assert_close(
        contrast.scores, for_target.scores - for_foil.scores, atol=1e-4, rtol=0
    )


# ---- doors that refuse --------------------------------------------------------------------------


def removes_units(name):
    return hasattr(METHODS.get(name).factory, "score_game")


@pytest.mark.slow
@pytest.mark.parametrize("name", [*filter(removes_units, METHODS.names())])
def test_methods_that_remove_units_answer(lm, name):
    options = {"unit": "turn", "image_unit": (1, 2), "target": " fox"}
    att = noiser.attribute(lm, chat_of(picture()), method=name, **options)
    assert att.scores.isfinite().all()


@pytest.mark.parametrize("name", [name for name in METHODS.names() if not removes_units(name)])
def test_methods_that_do_not_remove_units_refuse_in_one_sentence(lm, name):
    with pytest.raises(UnsupportedModelError, match="'joint' or 'occlusion'"):
        noiser.attribute(lm, chat_of(picture()), method=name)


class Disturbing:
    """A method of a user's own that adds noise to the rows of units."""

    score_game = None  # as methods that remove units have it

    async def __call__(self, query, rng):
        units = [noise(unit.token_indices, torch.ones(1, 99, 32)) for unit in query.units]
        answers = await Predict(query, units, query.objective("prob"))
        return Scores(scores=torch.stack(answers, 1)[..., 0])


def test_a_change_that_does_not_know_pictures_is_refused(lm):
    with pytest.raises(UnsupportedModelError, match="changes the tokens of pictures"):
        noiser.attribute(lm, chat_of(picture()), method=Disturbing(), image_unit="image")


def explain_with(method):
    return lambda lm, chat: noiser.attribute(lm, chat, method=method)


DOORS = {
    "cite": lambda lm, chat: noiser.cite(lm, chat, ["A river."]),
    "diff": lambda lm, chat: noiser.diff(lm, chat, chat),
    "expect": lambda lm, chat: noiser.expect(lm, chat, says="fox"),
    "tolerance": lambda lm, chat: noiser.tolerance(lm, occlusion(lm, chat), 0),
    "measure": lambda lm, chat: noiser.measure(lm, occlusion(lm, chat), "lds"),
}


@pytest.mark.parametrize("door", DOORS.values(), ids=DOORS)
def test_other_questions_refuse_pictures(lm, door):
    with pytest.raises(NoiserError, match=r"has a picture|previews of the pictures"):
        door(lm, chat_of(picture()))


def test_deleting_takes_out_words_only(lm):
    method = noiser.Occlusion(removal="delete")
    options = {"method": method, "image_unit": "image", "image_removal": "rows"}
    with pytest.raises(ParameterError, match="takes out words"):
        noiser.attribute(lm, chat_of(picture()), **options)


def test_an_action_as_the_target(lm):
    chat = [*chat_of(picture()), {"role": "assistant", "content": "Yes."}]
    with pytest.raises(TargetError, match="for chats of text alone"):
        occlusion(lm, chat, target="action")


def test_a_model_without_a_processor():
    lm = noiser.wrap(tiny_model("llama"), tiny_tokenizer())
    with pytest.raises(PromptError, match=r"noiser.wrap\(model, processor\)"):
        occlusion(lm, chat_of(picture()))


def test_a_model_that_is_not_causal():
    lm = noiser.wrap(*build("paligemma"))
    with pytest.raises(UnsupportedModelError):
        occlusion(lm, chat_of(picture()))


def test_a_model_that_adds_something_after_its_text_model_is_noticed(monkeypatch):
    model, processor = build("llava")
    forward = type(model).forward

    def with_more(self, *args, pixel_values=None, **kwargs):
        out = forward(self, *args, pixel_values=pixel_values, **kwargs)
        if pixel_values is not None:
            out.logits = out.logits + torch.arange(out.logits.shape[-1])
        return out

    monkeypatch.setattr(type(model), "forward", with_more)
    with pytest.raises(UnsupportedModelError, match="run in parts"):
        occlusion(noiser.wrap(model, processor), chat_of(picture()))


# ---- checkpoints --------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llava", pytest.param("gemma3", marks=pytest.mark.slow)])
def test_the_processor_of_a_checkpoint_comes_along(family, tmp_path):
    model, processor = build(family)
    model.save_pretrained(tmp_path)
    processor.save_pretrained(tmp_path)
    lm = noiser.load_model(tmp_path, device="cpu")
    chat = chat_of(picture())
    expected = occlusion(noiser.wrap(model, processor), chat)
    torch.testing.assert_close(occlusion(lm, chat).scores, expected.scores)


def test_a_checkpoint_without_a_processor_is_one_of_text(tmp_path):
    model, processor = build("llava")
    model.save_pretrained(tmp_path)
    processor.tokenizer.save_pretrained(tmp_path)
    lm = noiser.load_model(tmp_path, device="cpu")
    assert occlusion(lm, "The quick brown fox").targets
    with pytest.raises(PromptError, match="tokenizer alone"):
        occlusion(lm, chat_of(picture()))


def test_a_processor_whose_packages_are_missing(tmp_path, monkeypatch):
    from transformers import AutoProcessor

    model, processor = build("llava")
    model.save_pretrained(tmp_path)
    processor.save_pretrained(tmp_path)

    def missing(*_, **__):
        raise ImportError("needs torchvision")

    monkeypatch.setattr(AutoProcessor, "from_pretrained", missing)
    lm = noiser.load_model(tmp_path, device="cpu")
    with pytest.raises(DependencyError, match=r'pip install "noiser\[images\]"'):
        occlusion(lm, chat_of(picture()))


def test_the_query_keeps_regions_when_units_change(lm):
    question = Question(prompt=chat_of(picture()), image_unit=(1, 2), target=" fox")
    query = run_one(lm, prepare(lm, question, pictures=True))
    assert query.with_units(query.units[:1]).regions == query.regions
    assert set(FAMILIES) >= {"llava"}
