"""What a pass is made of: inputs, masks, passes that many prompts share; held against loops."""

import itertools

import pytest
import torch

import flex
import noiser
from engine_for_tests import query_of
from noiser.engine import Engine, Predict, noise, scale_rows, set_rows
from noiser.engine import engine as engine_module
from noiser.engine.effects import beside_prediction, effect_of
from noiser.engine.inputs import Sequences, inputs_of
from noiser.engine.objectives import OBJECTIVES, ReadTogether, objective_of
from noiser.engine.perturbations import Perturbation, delete, hide
from noiser.model import packing
from noiser.model.packing import Branch, Pass
from tiny import FAMILIES, tiny

PROMPTS = [
    "The brown fox sings in the rain.",
    "A teacher waits.",
    "The quick dog plays along, and the old cat sleeps near the door.",
]
SOURCES = ["The fox sings in the rain.", "The dog plays along."]
DIM = 32


# ---- inputs -------------------------------------------------------------------------------------


def some_changes(length):
    """Changes of every kind, at the beginning, in the middle and at the end."""
    draw = torch.Generator().manual_seed(3)
    vectors = torch.randn(3, 2, DIM, generator=draw)
    by_position = torch.randn(2, length, DIM, generator=draw)
    row = torch.randn(DIM, generator=draw)
    rows = torch.randn(2, 2, DIM, generator=draw)
    return {
        "one row": set_rows((0, 2), row),
        "another row": set_rows((1,), row * 2),
        "the same row elsewhere": set_rows((2,), row),
        "rows of its own": set_rows((1, 2), rows),
        "noise": noise((1, 2), vectors, 0.5),
        "the same noise, larger": noise((2,), vectors, 2.0),
        "relative noise": noise((0, 2), vectors, 0.5, relative=True),
        "noise by position": noise((1, 2), by_position, 2.0, relative=True, by_position=True),
        "soft masks": scale_rows(
            (0, 1, 2), lambda: torch.tensor([0.5, 0.0, 1.0])[None, :, None], 1
        ),
        "taken out": delete((0, 2)),
        "hidden": hide((1,)),
        "half of the rows": Perturbation((0, 1), lambda clean: clean[None] / 2),
    }


def obvious_inputs(context, start, change, first, last):
    """One sample after the other, one row after the other."""
    samples = []
    for sample in range(first, last):
        rows = [*context.inputs]
        if change is not None and change.rows is not None:
            places = list(change.positions)
            changed = change.rows(context.inputs[places].float() / context.scale)[sample]
            for place, row in zip(places, changed, strict=True):
                rows[place] = (row * context.scale).to(context.inputs.dtype)
        kept = range(len(rows))
        if change is not None and change.deletes:
            kept = [place for place in kept if place not in change.positions]
        samples.append(torch.stack([rows[place] for place in kept if place >= start]))
    return torch.stack(samples)


@pytest.mark.parametrize("family", ["llama", "gemma3"])  # without a factor on rows, and with one
def test_inputs_of_a_pass_are_those_of_each_change_alone(family):
    lm = tiny(family)
    contexts = [query_of(lm, prompt).context for prompt in PROMPTS]
    asked, expected = [], []
    for number, context in enumerate(contexts):
        length = len(context.inputs)
        for change in some_changes(length).values():
            first = min(1, change.samples - 1) if number else 0
            start = 0 if change.deletes else min(change.positions)
            kept = length - len(change.positions) if change.deletes else length
            asked.append(Sequences(context, start, kept, change, first, change.samples))
            expected.append(obvious_inputs(context, start, change, first, change.samples))
        asked.append(Sequences(context, 1, length))
        expected.append(context.inputs[None, 1:])
    for found, wanted in zip(inputs_of(asked), expected, strict=True):
        torch.testing.assert_close(found, wanted, atol=1e-6, rtol=1e-6)


def test_positions_after_the_last_token_that_is_read_change_nothing():
    context = query_of(tiny("llama"), PROMPTS[0]).context
    late = noise((1, 5), torch.ones(2, 2, DIM))
    (found,) = inputs_of([Sequences(context, 1, 4, late, 0, 2)])
    assert found.shape == (2, 3, DIM)
    torch.testing.assert_close(found[:, 0], (context.inputs[1] + 1).expand(2, -1))
    torch.testing.assert_close(found[:, 1:], context.inputs[2:4].expand(2, -1, -1))


# ---- masks --------------------------------------------------------------------------------------


def sees(branch, number, of_query, of_key, window):
    """Whether a query (sequence, position) sees a key (context, sequence or None, position)."""
    context, sequence, position = of_key
    distance = of_query - position
    own = sequence == number
    clean = sequence is None and context is branch.context and position < branch.start
    is_hidden = position in branch.hidden and distance != 0
    near = window is None or distance < window
    return (own or clean) and distance >= 0 and near and not is_hidden


def keys_of(packed, block):
    """Where a block's keys stand, in order."""
    keys = []
    for context, count in block.keys.cached.items():
        keys += [(context, None, position) for position in range(count)]
    for number in block.keys.numbers:
        branch, (first, end) = packed.sequences[number], packed.spans[number]
        for row in range(first, end):
            keys.append((branch.context, number, branch.start + row - first))
    return keys


@pytest.mark.parametrize("window", [None, 2, 4])
@pytest.mark.parametrize("size", [3, 8, 128])
def test_masks_say_what_each_row_may_see(size, window, monkeypatch):
    """Sequences of two prompts, side by side and cut, with hidden positions."""
    monkeypatch.setattr(packing, "BLOCK_ON_CPU", size)
    monkeypatch.setattr(packing, "MIXED_ON_CPU", size)
    one, other = (query_of(tiny("llama"), prompt).context for prompt in PROMPTS[:2])
    branches = [
        Branch(one, 5, one.inputs[None, 5:].expand(2, -1, -1), [5]),
        Branch(one, 2, one.inputs[None, 2:], [2], hidden=(1, 3)),
        Branch(other, 1, other.inputs[None, 1:], [1]),
        Branch(other, 0, other.inputs[None], [0], record=True),
    ]
    packed = Pass(branches)
    rows = 0
    for block in packed.blocks:
        seen = block.seen(window)
        place = block.keys.place
        keys = keys_of(packed, block)[seen.start - place : seen.stop - place]
        mask = packed.mask(block, window, torch.float32)[0, 0] == 0
        assert mask.shape == (block.last - block.first, len(keys))
        unseen = keys_of(packed, block)[: seen.start - place]
        for row in range(block.first, block.last):
            number = int(packed.tokens.number[row])
            branch = packed.sequences[number]
            position = branch.start + row - packed.spans[number][0]
            expected = [sees(branch, number, position, key, window) for key in keys]
            assert mask[row - block.first].tolist() == expected
            assert not any(sees(branch, number, position, key, window) for key in unseen)
            rows += 1
    assert rows == packed.spans[-1][1]


def test_short_prompts_attend_together(monkeypatch):
    """Up to a limit, which is lower on a CPU."""
    contexts = [query_of(tiny("llama"), prompt).context for prompt in PROMPTS]
    branches = [Branch(each, 1, each.inputs[None, 1:], [1]) for each in contexts]
    monkeypatch.setattr(packing, "MIXED_ON_CPU", 64)
    (block,) = Pass(branches).blocks
    assert set(block.keys.cached) == set(contexts)
    monkeypatch.setattr(packing, "MIXED_ON_CPU", 1)
    assert len(Pass(branches).blocks) == len(contexts)


PACKED = [family for family in FAMILIES if family not in ("falcon", "mamba")]  # these two run whole
QUICK = [
    ("llama", "zero"),
    ("llama", "joint"),
    ("gpt2", "zero"),
    ("gemma2", "hidden"),  # softcaps
    ("gemma3", "delete"),  # windows
]
WAYS = {
    "zero": noiser.Occlusion(),
    "hidden": noiser.Occlusion(removal="hidden"),
    "delete": noiser.Occlusion(removal="delete"),
    "noise": noiser.Occlusion(removal="noise"),
    "joint": noiser.Joint(),
    "noiser": noiser.Noiser(bounding=0.05),
    "slopes": noiser.InputXGradient(),  # goes on by the loop
    "relevance": noiser.AttnLrp(),  # has an attention of its own
}


@pytest.mark.parametrize(
    ("family", "way"),
    [
        pytest.param(*pair, marks=[] if pair in QUICK else pytest.mark.slow)
        for pair in itertools.product(PACKED, WAYS)
    ],
)
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_one_call_a_layer_gives_the_scores_of_the_loop(family, way):
    """Windows, softcaps, grouped heads, hidden tokens; prompts of several lengths in a pass."""
    lm = tiny(family)
    asked = {"method": WAYS[way], "unit": "word"}
    expected = noiser.attribute(lm, PROMPTS[:2], **asked)
    with flex.one_call(lm):
        found = noiser.attribute(lm, PROMPTS[:2], **asked)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.scores, other.scores, atol=1e-6, rtol=1e-4, equal_nan=True)


# ---- gradients of many prompts -------------------------------------------------------------------

LISTS = {
    "input_x_gradient": {"method": "input_x_gradient", "unit": "token"},
    "integrated_gradients": {
        "method": noiser.IntegratedGradients(n_steps=4),
        "unit": "word",
    },
    "gradient_shap": {"method": "gradient_shap", "unit": "token"},
    "deeplift": {"method": "deeplift", "unit": "token"},
    "attn_lrp": {"method": "attn_lrp", "unit": "token"},
    "attention_gradient": {"method": "attention_gradient", "sources": SOURCES},
    "a foil of several tokens": {
        "method": "input_x_gradient",
        "target": "the dog sings",
        "foil": "a cat waits here",
        "unit": "word",
    },
    "gates with a foil": {
        "method": "attention_gradient",
        "sources": SOURCES,
        "target": "the dog sings",
        "foil": "a cat waits here",
    },
    "relevance with a foil": {
        "method": "deeplift",
        "target": "the dog sings",
        "foil": "a cat waits here",
        "unit": "word",
    },
}


def explained(lm, asked, prompts):
    if "sources" in asked:
        text = " ".join(asked["sources"])
        prompts = [f"{text} Question: {prompt} Answer:" for prompt in prompts]
        asked = asked | {"sources": [asked["sources"]] * len(prompts)}
    return noiser.attribute(lm, prompts, **asked)


@pytest.mark.parametrize("asked", LISTS.values(), ids=LISTS)
def test_a_list_of_prompts_has_the_gradients_of_each_by_itself(asked, monkeypatch):
    lm = tiny("llama")
    together = explained(lm, asked, PROMPTS)
    monkeypatch.setattr(engine_module, "pass_tokens", lambda lm: 1)  # nothing fits beside another
    alone = [explained(lm, asked, [prompt])[0] for prompt in PROMPTS]
    for one, other in zip(together, alone, strict=True):
        torch.testing.assert_close(one.scores, other.scores, atol=1e-6, rtol=1e-4)
        assert one.info["token_forwards"] == other.info["token_forwards"]


@pytest.mark.parametrize("name", ["input_x_gradient", "attn_lrp", "attention_gradient"])
def test_prompts_share_a_pass_with_gradients(name, monkeypatch):
    """Forward passes beyond those that write and read the prompts: one for three prompts."""
    lm = tiny("llama")
    passes = []
    run = type(lm).run_packed

    def counted(lm, branches, *args, gradients):
        passes.append(gradients)
        return run(lm, branches, *args, gradients=gradients)

    monkeypatch.setattr(type(lm), "run_packed", counted)
    explained(lm, LISTS[name], PROMPTS)
    assert passes.count(True) == 1


def test_an_error_of_one_prompt_is_its_own(monkeypatch):
    """The others are answered, each by itself."""
    lm = tiny("llama")
    queries = [query_of(lm, prompt) for prompt in PROMPTS]
    expected = [
        noiser.attribute(lm, prompt, method="input_x_gradient", unit="token").scores
        for prompt in PROMPTS
    ]

    def fails(*_):
        raise ValueError("no score")

    method = noiser.InputXGradient()
    works = [method(query, torch.Generator()) for query in queries]
    object.__setattr__(queries[1], "of", fails)
    outcomes = dict(Engine(lm).run(works))
    assert isinstance(outcomes[1], ValueError)
    for number in (0, 2):
        torch.testing.assert_close(
            outcomes[number].scores.float(), expected[number].float(), atol=1e-6, rtol=1e-4
        )


# ---- one reading for all prompts of a pass ------------------------------------------------------


def effects_of_changed_rows(lm, queries, read):
    """The answers of several coroutines, each to two samples of rows at every token of its own."""
    rows = torch.tensor([0.0, 0.1])[:, None, None].expand(2, 1, DIM)

    async def ask(query):
        changes = [set_rows((i,), rows) for i in range(1, len(query.token_ids))]
        return torch.stack(await Predict(query, changes, read))

    return dict(Engine(lm).run(ask(query) for query in queries))


@pytest.mark.parametrize("beside", ["nothing", "prediction", "effect"])
@pytest.mark.parametrize("foil", [None, " sings"], ids=["target", "against a foil"])
@pytest.mark.parametrize("name", ["prob", "logprob", "logit", "lead"])
def test_prompts_that_are_read_together_have_their_own_numbers(name, foil, beside):
    lm = tiny("llama")
    asked = {"foil": foil} if foil else {"max_new_tokens": 2}
    queries = [query_of(lm, prompt, **asked) for prompt in PROMPTS]
    foil_tokens = len(queries[0].foil_ids)
    read = objective_of(name, foil_tokens)
    if beside == "prediction":
        read = beside_prediction(read, foil_tokens)
    elif beside == "effect":
        read = effect_of(read, foil_tokens)

    def one_by_one(logits, clean, ids):
        return read(logits, clean, ids)

    together = effects_of_changed_rows(lm, queries, read)
    # In passes of the same sequences: those of other sizes round in other places.
    apart = effects_of_changed_rows(lm, queries, one_by_one)
    for number in range(len(queries)):
        torch.testing.assert_close(
            together[number], apart[number], atol=1e-6, rtol=1e-5, equal_nan=True
        )


def test_a_pass_is_read_once_for_all_of_its_prompts():
    lm = tiny("llama")
    queries = [query_of(lm, prompt) for prompt in PROMPTS]
    readings = []

    def counted(logits, ids):
        readings.append(len(logits))
        return logits.gather(-1, ids[..., None])[..., 0].sum(-1)

    effects_of_changed_rows(lm, queries, ReadTogether(counted))
    assert readings == [sum(len(query.token_ids) - 1 for query in queries)]


def test_memory_that_runs_out_in_reading_ends_the_prompts_that_do_not_fit():
    """Each is then read by itself."""
    lm = tiny("llama")
    queries = [query_of(lm, prompt) for prompt in PROMPTS]
    most = max(len(query.token_ids) for query in queries[:2]) - 1

    def with_little_memory(logits, ids):
        if len(logits) > most:
            raise torch.OutOfMemoryError("out of memory")
        return logits.gather(-1, ids[..., None])[..., 0].sum(-1)

    found = effects_of_changed_rows(lm, queries, ReadTogether(with_little_memory))
    assert [type(found[number]).__name__ for number in range(3)] == [
        "Tensor",
        "Tensor",
        "ModelError",
    ]
    assert "Not enough memory" in str(found[2])


# ---- the next pass begins before the last one is read -------------------------------------------


@pytest.fixture
def beside_the_host(monkeypatch):
    """As on an accelerator."""
    monkeypatch.setattr(engine_module, "_runs_beside_the_host", lambda lm: True)


def many_small_passes():
    """A model of small passes, queries that need several, and what is read."""
    small = noiser.wrap(tiny("llama").model, tiny("llama").tokenizer, batch_tokens=24)
    queries = [query_of(small, prompt) for prompt in PROMPTS]
    return small, queries, OBJECTIVES.get("prob").factory().value


def answers(lm, queries, read):
    async def ask(query):
        changes = [set_rows((i,), torch.zeros(DIM)) for i in range(1, len(query.token_ids))]
        first = await Predict(query, changes, read)
        second = await Predict(query, changes[:2], read)
        return torch.stack([*first, *second])

    return dict(Engine(lm).run(ask(query) for query in queries))


@pytest.mark.usefixtures("beside_the_host")
def test_passes_that_overlap_give_the_same_answers(monkeypatch):
    small, queries, read = many_small_passes()
    found = answers(small, queries, read)
    monkeypatch.setattr(engine_module, "_runs_beside_the_host", lambda lm: False)
    expected = answers(small, queries, read)
    for number in expected:
        torch.testing.assert_close(found[number], expected[number], atol=1e-7, rtol=1e-5)


@pytest.mark.usefixtures("beside_the_host")
def test_a_pass_that_fails_leaves_what_runs_beside_it(monkeypatch):
    """The second pass fails: the coroutines in it get the error, the others their answers."""
    small, queries, read = many_small_passes()
    expected = answers(small, queries, read)
    run, passes = small.run, []

    def fails_once(branches):
        passes.append(branches)
        if len(passes) == 2:
            raise ValueError("a layer failed")
        return run(branches)

    monkeypatch.setattr(small, "run", fails_once)
    found = answers(small, queries, read)
    failed = [number for number, answer in found.items() if isinstance(answer, ValueError)]
    assert failed
    assert len(found) == len(queries)
    assert len(failed) < len(queries)
    for number in set(found) - set(failed):
        torch.testing.assert_close(found[number], expected[number], atol=1e-7, rtol=1e-5)


@pytest.mark.usefixtures("beside_the_host")
def test_memory_that_runs_out_beside_a_running_pass_loses_nothing(monkeypatch):
    small, queries, read = many_small_passes()
    expected = answers(small, queries, read)
    run = small.run

    def runs_out(branches):
        tokens = sum(branch.inputs.shape[:2].numel() for branch in branches)
        if tokens > 12 and len(branches) > 1:
            raise torch.OutOfMemoryError("out of memory")
        return run(branches)

    monkeypatch.setattr(small, "run", runs_out)
    found = answers(small, queries, read)
    for number in expected:
        torch.testing.assert_close(found[number], expected[number], atol=1e-7, rtol=1e-5)
