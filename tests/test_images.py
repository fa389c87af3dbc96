"""Pictures in a prompt, against loops that run the whole model on changed pictures."""

from __future__ import annotations

import copy
import itertools
from inspect import signature

import pytest
import torch

import noiser
import noiser.model.language_model
from noiser.engine import StoredGame, run_one
from noiser.errors import UnsupportedModelError
from noiser.model import layout, packing
from noiser.text.pictures import without_data
from tiny_images import FAMILIES, gemma3, picture, randomised, wrapped

pytest.importorskip("PIL")
TARGET = " fox on"


def part(image):
    return {"type": "image", "image": image}


def chat_of(*pictures):
    content = [part(pictures[0]), {"type": "text", "text": "What stands near the river?"}]
    for other in pictures[1:]:
        content += [part(other), {"type": "text", "text": " Which has a bridge?"}]
    return [{"role": "user", "content": content}]


class Naive:
    """A loop over the whole model: each input is one call with its own pictures and words."""

    def __init__(self, lm, chat, att):
        self.model, self.processor, self.att = lm.model, lm.processor, att
        self.images = [
            each["image"] for message in chat for each in message["content"] if "image" in each
        ]
        self.rendered = self.processor.tokenizer.apply_chat_template(
            without_data(chat), add_generation_prompt=True, tokenize=False
        )
        self.target = [token for target in att.targets for token in target.token_ids]
        self.boxes = att.info["images"]["boxes"]

    def log_probabilities(self, gone=(), *, grey=True, delete=False, hidden=False):
        """The target's without some units: regions grey, or with zero rows as words have."""
        images = [image.copy() for image in self.images]
        tokens = []
        mean = self.processor.image_processor.image_mean
        for unit in gone:
            if self.boxes[unit] is not None and grey:
                number, *box = self.boxes[unit]
                images[number].paste(tuple(round(255 * value) for value in mean), tuple(box))
            else:
                tokens += self.att.units[unit].token_indices
        inputs = self.inputs(images)
        length = inputs["input_ids"].shape[1]
        if delete:
            kept = [place for place in range(length) if place not in tokens]
            for name, value in inputs.items():
                if value.shape == (1, length):
                    inputs[name] = value[:, kept]
            length = len(kept)
        logits = self.logits(inputs, [] if delete else tokens, hidden=hidden)
        rows = logits[length - 1 :].double().log_softmax(-1)
        return rows[range(len(self.target)), self.target]

    def inputs(self, images):
        out = self.processor(
            text=[self.rendered], images=[images], return_tensors="pt", add_special_tokens=False
        )
        dtype = self.model.dtype
        return {
            name: value.to(dtype) if value.is_floating_point() else value
            for name, value in out.items()
            if name != "attention_mask"
        }

    @torch.no_grad()
    def logits(self, inputs, tokens, *, hidden):
        length = inputs["input_ids"].shape[1]
        target = torch.tensor([self.target[:-1]], dtype=torch.long)
        for name, value in inputs.items():
            if value.shape == (1, length):
                added = target if name == "input_ids" else torch.zeros_like(target)
                inputs[name] = torch.cat([value, added], 1)

        def without_rows(_module, args, kwargs):
            inputs_embeds = kwargs["inputs_embeds"].clone()
            inputs_embeds[:, tokens] = 0
            kwargs = {**kwargs, "inputs_embeds": inputs_embeds}
            if kwargs.get("deepstack_visual_embeds"):
                places = kwargs["visual_pos_masks"][0].nonzero().flatten().tolist()
                rows = [places.index(token) for token in tokens if token in places]
                deep = [each.clone() for each in kwargs["deepstack_visual_embeds"]]
                for each in deep:
                    each[rows] = 0
                kwargs["deepstack_visual_embeds"] = deep
            return args, kwargs

        def without_sight(_module, args, kwargs):
            count = kwargs["inputs_embeds"].shape[1]
            masks = kwargs.get("attention_mask")
            windows = {None: None} if not isinstance(masks, dict) else dict.fromkeys(masks)
            found = {}
            for name in windows:
                seen = torch.ones(count, count).tril().bool()
                if name is not None:
                    mask = masks[name][0, 0]
                    seen = mask if mask.dtype == torch.bool else mask == 0
                seen = seen.clone()
                own = seen & torch.eye(count).bool()
                seen[:, tokens] = False
                found[name] = (seen | own)[None, None]
            return args, {**kwargs, "attention_mask": found.get(None, found)}

        door = self.model.get_decoder()
        hook = without_sight if hidden else without_rows
        handle = door.register_forward_pre_hook(hook, with_kwargs=True)
        if hasattr(self.model.model, "rope_deltas"):
            self.model.model.rope_deltas = None
        try:
            return self.model(**inputs, use_cache=False).logits[0]
        finally:
            handle.remove()

    def losses(self, **how):
        """What the geometric mean of the target's probabilities loses without each unit."""
        whole = self.log_probabilities().mean().exp()
        without = [
            self.log_probabilities([unit], **how).mean().exp()
            for unit in range(len(self.att.units))
        ]
        return torch.stack([whole - each for each in without])


def occlusion(lm, chat, removal="zero", **options):
    options = {"unit": "word", "image_unit": (2, 2), "target": TARGET, **options}
    return noiser.attribute(lm, chat, method=noiser.Occlusion(removal=removal), **options)


def check_same(att, expected):
    """Scores of 1e-5 to 1e-3 agree by a thousandth of the largest."""
    largest = float(expected.abs().max())
    assert largest > 1e-5
    torch.testing.assert_close(att.scores[0].double(), expected, atol=1e-3 * largest, rtol=0)


# Families whose text models differ most; the others are compared in the slow tests, too.
FEW = ["qwen3vl", "gemma3"]
EACH = [*FEW, *(pytest.param(name, marks=pytest.mark.slow) for name in FAMILIES if name not in FEW)]
ONE = (picture(),)
TWO = (picture(), picture(168, 200).transpose(0))


@pytest.mark.parametrize("family", FAMILIES)
def test_scores_of_words_and_regions_of_two_pictures_are_those_of_a_loop(family):
    lm = wrapped(family)
    chat = chat_of(*TWO)
    att = occlusion(lm, chat, unit="sentence", image_unit=(1, 2))
    naive = Naive(lm, chat, att)
    check_same(att, naive.losses())
    whole = float(naive.log_probabilities().mean().exp())
    assert att.targets[0].probability == pytest.approx(whole, rel=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("removal", ["grey", "rows"])
@pytest.mark.parametrize("pictures", [ONE, TWO], ids=["one", "two"])
@pytest.mark.slow
def test_scores_of_a_finer_grid_and_of_single_words_are_those_of_a_loop(family, removal, pictures):
    lm = wrapped(family)
    chat = chat_of(*pictures)
    att = occlusion(lm, chat, image_removal=removal)
    check_same(att, Naive(lm, chat, att).losses(grey=removal == "grey"))


@pytest.mark.parametrize("family", EACH)
def test_rows_of_regions_are_removed_as_those_of_words(family):
    lm = wrapped(family)
    chat = chat_of(*ONE)
    att = occlusion(lm, chat, unit="sentence", image_unit=(1, 2), image_removal="rows")
    check_same(att, Naive(lm, chat, att).losses(grey=False))


@pytest.mark.parametrize("family", EACH)
def test_hidden_units_are_those_that_a_mask_hides(family):
    lm = wrapped(family)
    chat = chat_of(*ONE)
    options = {"unit": "sentence", "image_unit": (1, 2), "image_removal": "rows"}
    att = occlusion(lm, chat, "hidden", **options)
    check_same(att, Naive(lm, chat, att).losses(grey=False, hidden=True))


@pytest.mark.parametrize("family", EACH)
def test_words_are_deleted_beside_regions_that_are_grey(family):
    lm = wrapped(family)
    content = [{"type": "text", "text": "Look:"}, part(*ONE), {"type": "text", "text": "What?"}]
    chat = [{"role": "user", "content": content}]
    att = occlusion(lm, chat, "delete", image_unit="image")
    naive = Naive(lm, chat, att)
    whole = naive.log_probabilities().mean().exp()
    expected = []
    for unit, box in enumerate(naive.boxes):
        left = naive.log_probabilities([unit], delete=box is None)
        expected.append(whole - left.mean().exp())
    check_same(att, torch.stack(expected))


@pytest.mark.parametrize("family", FEW)
def test_a_word_hidden_beside_a_grey_region_in_one_input(family):
    lm = wrapped(family)
    chat = chat_of(*ONE)
    options = {"unit": "sentence", "image_unit": "image", "target": TARGET}
    game = noiser.Game(lm, chat, objective="prob", removal="hidden", **options)
    att = occlusion(lm, chat, unit="sentence", image_unit="image")
    naive = Naive(lm, chat, att)
    images = [image.copy() for image in naive.images]
    images[0].paste(lm.scene(lm.encode(chat, pictures=True)).grey, (0, 0, *images[0].size))
    inputs = naive.inputs(images)
    length = inputs["input_ids"].shape[1]
    logits = naive.logits(inputs, list(att.units[1].token_indices), hidden=True)
    rows = logits[length - 1 :].double().log_softmax(-1)
    rows = rows[range(len(naive.target)), naive.target]
    assert float(game([False, False])) == pytest.approx(float(rows.mean().exp()), rel=1e-3)


@pytest.mark.parametrize("family", EACH)
def test_the_answer_is_that_of_generate(family):
    lm = wrapped(family)
    chat = chat_of(*ONE)
    options = {"target": None, "target_unit": "token", "max_new_tokens": 6}
    att = occlusion(lm, chat, unit="turn", image_unit="image", **options)
    naive = Naive(lm, chat, att)
    inputs = naive.inputs(naive.images)
    length = inputs["input_ids"].shape[1]
    written = lm.model.generate(**inputs, max_new_tokens=6, do_sample=False)[0, length:].tolist()
    assert naive.target == written[: len(naive.target)]
    assert len(naive.target) >= min(6, len(written))


@pytest.mark.parametrize("family", ["qwen3vl"])
def test_joint_plays_the_game_of_the_whole_model(family):
    lm = wrapped(family)
    chat = chat_of(*ONE)
    joint = noiser.Joint(samples=32, objective="logprob")
    options = {"unit": "sentence", "image_unit": (1, 3), "target": " fox"}
    att = noiser.attribute(lm, chat, method=joint, **options)
    naive = Naive(lm, chat, att)
    values = {}
    for kept in itertools.product((0, 1), repeat=len(att.units)):
        gone = [unit for unit, is_kept in enumerate(kept) if not is_kept]
        values[0, bytes(kept)] = float(naive.log_probabilities(gone).mean())
    everything = torch.ones(1, len(att.units), dtype=torch.bool)
    whole = torch.tensor([values[0, b"\1" * len(att.units)]], dtype=torch.float64)
    game = StoredGame(everything, whole, "logprob", values)
    expected = run_one(lm, joint.score_game(game, torch.Generator().manual_seed(0)))
    torch.testing.assert_close(att.scores, expected.scores, atol=1e-4, rtol=0)


# ---- traps: each of these once gave wrong numbers without a word ---------------------------------


def no_positions(handed):
    def without(self, device):
        given = handed(self, device)
        given.pop("position_ids", None)
        return given

    return without


TRAPS = {
    "a block of tokens that is begun in its middle": (
        "gemma3",
        layout.Layout,
        "begin",
        lambda _: lambda self, position: position,
    ),
    "features of early layers that stay": (
        "qwen3vl",
        layout.Layout,
        "with_deep",
        lambda _: lambda self, positions, deep: self,
    ),
    "positions 0, 1, 2": ("qwen25vl", packing.Pass, "handed", no_positions),
}


@pytest.mark.parametrize(("family", "owner", "name", "broken"), TRAPS.values(), ids=TRAPS)
def test_the_comparison_with_a_loop_finds_what_is_wrong(family, owner, name, broken, monkeypatch):
    lm = wrapped(family)
    chat = chat_of(*ONE)
    options = {"unit": "sentence", "image_unit": (2, 1), "image_removal": "rows"}
    right = occlusion(lm, chat, **options)
    monkeypatch.setattr(owner, name, broken(getattr(owner, name)))
    lm = noiser.wrap(lm.model, lm.processor)
    expected = Naive(lm, chat, right).losses(grey=False)
    with pytest.raises((AssertionError, UnsupportedModelError), match=r"close|run in parts"):
        check_same(occlusion(lm, chat, **options), expected)


def test_a_long_prompt_whose_blocks_of_tokens_are_longer_than_the_window(monkeypatch):
    model, processor = gemma3(window=6)
    lm = noiser.wrap(randomised(model, processor.tokenizer), processor)
    chat = chat_of(*TWO)
    chat[0]["content"][1]["text"] = "What stands near the river? " * 12
    options = {"unit": "turn", "image_unit": (1, 2)}
    att = occlusion(lm, chat, **options)
    assert att.units[0].token_indices[0] > 0
    expected = Naive(lm, chat, att).losses()
    check_same(att, expected)
    assert max(max(unit.token_indices) for unit in att.units) > packing.BLOCK_ON_CPU
    # Passes that begin and end within the pictures.
    monkeypatch.setattr(packing, "BLOCK_ON_CPU", 11)
    monkeypatch.setattr(noiser.model.language_model, "BLOCK", 20)
    lm.batch_tokens = 20
    check_same(occlusion(lm, chat, **options), expected)


# ---- half precision ------------------------------------------------------------------------------


def losses_in_nats(lm, chat, att, **how):
    """What the target's log-probability loses without each unit, by the loop."""
    naive = Naive(lm, chat, att)
    whole = naive.log_probabilities().sum()
    without = [naive.log_probabilities([unit], **how).sum() for unit in range(len(naive.att.units))]
    return torch.stack([whole - each for each in without])


HALVES = [
    ("qwen3vl", "bfloat16"),
    ("gemma3", "float16"),
    *(
        pytest.param(family, dtype, marks=pytest.mark.slow)
        for family in FAMILIES
        for dtype in ("bfloat16", "float16")
        if (family, dtype) not in [("qwen3vl", "bfloat16"), ("gemma3", "float16")]
    ),
]


@pytest.mark.parametrize(("family", "dtype"), HALVES)
def test_in_half_precision_scores_are_nearer_to_the_loop_than_the_loop_to_the_truth(family, dtype):
    whole = wrapped(family)
    half = noiser.wrap(copy.deepcopy(whole.model).to(getattr(torch, dtype)), whole.processor)
    chat = chat_of(*ONE)
    options = {"unit": "sentence", "image_unit": (2, 2), "target": TARGET}
    method = noiser.Occlusion(objective="logprob")
    for removal in ("grey", "rows"):
        att = noiser.attribute(half, chat, method=method, image_removal=removal, **options)
        truth = losses_in_nats(whole, chat, att, grey=removal == "grey")
        loop = losses_in_nats(half, chat, att, grey=removal == "grey")
        error = float((loop - truth).abs().max())
        assert 1e-4 < error < float(truth.abs().max()) / 8
        assert float((att.scores[0] - loop).abs().max()) <= error


# ---- cost ---------------------------------------------------------------------------------------

TOWERS = {"llava": ("vision_tower", "pixel_values"), "qwen3vl": ("visual", "grid_thw")}


class Counted:
    """Within it, the pictures that the tower reads, and the tokens that the text model reads."""

    def __init__(self, model, tower, argument):
        self.pictures = self.tokens = 0
        self._model, self._tower, self._argument = model, tower, argument

    def __enter__(self):
        tower = getattr(self._model.model, self._tower)
        layer = self._model.get_decoder().layers[0]
        self._hooks = [
            tower.register_forward_pre_hook(self._count_pictures, with_kwargs=True),
            layer.register_forward_pre_hook(self._count_tokens, with_kwargs=True),
        ]
        return self

    def __exit__(self, *_):
        for hook in self._hooks:
            hook.remove()

    def _count_pictures(self, module, args, kwargs):
        given = signature(module.forward).bind(*args, **kwargs).arguments
        self.pictures += len(given[self._argument])

    def _count_tokens(self, _module, args, kwargs):
        hidden = args[0] if args else kwargs["hidden_states"]
        self.tokens += hidden.shape[0] * hidden.shape[1]


QUESTION = "Which of the two houses near the river stands closer to the bridge, and why?"


@pytest.mark.parametrize(("family", "tower"), TOWERS.items(), ids=TOWERS)
def test_words_and_regions_cost_at_most_a_tenth_more_than_the_loop(family, tower):
    lm = wrapped(family)
    square = picture(224, 224)  # of which LLaVA crops nothing
    chat = [{"role": "user", "content": [part(square), {"type": "text", "text": QUESTION}]}]
    occlusion(lm, chat, unit="turn", image_unit="image")  # what is compared at first use
    with Counted(lm.model, *tower) as ours:
        att = occlusion(lm, chat, image_unit=(4, 4))
    with Counted(lm.model, *tower) as loops:
        Naive(lm, chat, att).losses()
    assert loops.pictures == 1 + len(att.units)
    assert ours.pictures <= 1.1 * loops.pictures
    assert ours.tokens <= 1.1 * loops.tokens


@pytest.mark.parametrize(("family", "tower"), TOWERS.items(), ids=TOWERS)
def test_what_stands_before_the_first_changed_picture_is_read_once(family, tower):
    lm = wrapped(family)
    text = {"type": "text", "text": f"{QUESTION} " * 3}
    chat = [{"role": "user", "content": [text, part(*ONE)]}]
    occlusion(lm, chat, unit="turn", image_unit="image")
    with Counted(lm.model, *tower) as ours:
        att = occlusion(lm, chat, unit="turn", image_unit=(2, 2))
    with Counted(lm.model, *tower) as loops:
        Naive(lm, chat, att).losses()
    assert att.units[0].start < att.units[-1].start
    assert ours.tokens <= 0.75 * loops.tokens
