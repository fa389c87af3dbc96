import functools

import pytest
import torch

from engine_for_tests import clean, distributions, query_of
from noiser import Noiser, Occlusion, attribute
from noiser.engine import Engine, LiveGame, Predict, ask, remover, run_one
from noiser.engine import engine as engine_module
from noiser.engine.effects import Effect, effect_of
from noiser.engine.objectives import OBJECTIVES, objective_of
from noiser.engine.perturbations import delete, hide, noise, scale_rows, set_rows
from noiser.errors import ModelError, NumericalError, ParameterError, UnsupportedModelError
from noiser.explain.many import run_many
from noiser.model import language_model, packing, wrap
from tiny import FAMILIES, tiny, tiny_model, tiny_tokenizer

VALUES = {name: OBJECTIVES.get(name).factory().value for name in OBJECTIVES.names()}
PROMPT = "The brown fox sings in the rain, and the dog plays along."
DIM = 32
PACKING = [family for family in FAMILIES if family not in ("falcon", "mamba")]


@pytest.fixture
def block(monkeypatch):
    """Few tokens attend together, so that sequences are cut; elsewhere all of a prompt do."""
    monkeypatch.setattr(packing, "BLOCK_ON_CPU", 3)


def another(lm, batch_tokens=64):
    return wrap(lm.model, lm.tokenizer, batch_tokens=batch_tokens)


def question_of(lm, **options):
    """Three tokens; Mamba, which ends at once, is told what to say."""
    target = "dog" if "Mamba" in type(lm.model).__name__ else None
    return query_of(lm, PROMPT, max_new_tokens=3, target=target, **options)


def some_changes(query, targets=3):
    """Noise, zeros, masks and deletions at single and several positions, for all and for some
    targets.
    """
    rng = torch.Generator().manual_seed(1)
    dim, length = query.embedding_dim, len(query.token_ids)
    vectors, masks = (
        torch.randn(2, 3, dim, generator=rng),
        torch.rand(2, length - 1, dim, generator=rng) < 0.5,
    )
    return [
        *[noise((i,), vectors, 0.5) for i in range(1, length - targets, 2)],
        noise((2, 4, 5), vectors, 0.3, (targets - 1,)),
        set_rows((1, 2), torch.zeros(dim), (0, targets - 1)),
        delete((1, 4, 5), (0, targets - 1)),
        delete((3, length - 1)),
        scale_rows(range(1, length), lambda: masks, 2),
        *[delete((i,)) for i in range(1, length, 2)],
        delete(range(1, length)),
    ]


@torch.no_grad()
def one_by_one(lm, query, changes):
    """The obvious way: every sample alone, from the first token, by the model alone."""
    table = lm.model.get_input_embeddings()(query.token_ids) / lm.abilities.embedding_scale
    with lm.running():
        return [slowly(lm, query, table, change) for change in changes]


def slowly(lm, query, table, change):
    targets = range(len(query.target_ids)) if change.targets is None else change.targets
    rows = [query.logit_positions[g] for g in targets]
    if not (change.rows or change.hidden):
        kept = [[i for i in range(row + 1) if i not in change.positions] for row in rows]
        last = [lm.model(input_ids=query.token_ids[ids][None]).logits[0, -1] for ids in kept]
        return torch.stack(last).softmax(-1)[None]
    samples = []
    for changed in change.rows(table[list(change.positions)]):
        inputs = table.clone()
        inputs[list(change.positions)] = changed
        logits = lm.model(
            inputs_embeds=inputs[None] * lm.abilities.embedding_scale, use_cache=False
        ).logits[0]
        samples.append(logits[rows].softmax(-1))
    return torch.stack(samples)


def assert_all_close(found, expected, atol=2e-6, rtol=1e-4):
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, atol=atol, rtol=rtol)


def asks(query, *changes, read=VALUES["prob"]):
    return Predict(query, [*changes], read)


def zero(position, targets=None):
    return set_rows((position,), torch.zeros(DIM), targets)


INFINITE = set_rows((3,), torch.full((1, 1, DIM), torch.inf))


@pytest.mark.usefixtures("block")
@pytest.mark.parametrize("family", FAMILIES)
def test_equals_whole_sequences_in_every_family(family):
    lm = another(tiny(family))
    assert lm.abilities.supports_packing is (family in PACKING)
    query = question_of(lm)
    changes = some_changes(query, targets=len(query.target_ids))
    assert_all_close(distributions(lm, query, changes), one_by_one(lm, query, changes))
    with lm.running():
        logits = lm.model(input_ids=query.token_ids[None]).logits[0, list(query.logit_positions)]
    assert_all_close(clean(query), logits.softmax(-1))


def test_half_precision_stays_close_to_float32():
    half, gemma = (
        wrap(tiny_model(family).bfloat16(), tiny_tokenizer()) for family in ("llama", "gemma3")
    )
    assert half.abilities.supports_packing
    assert gemma.abilities.supports_packing
    queries = [(lm, query_of(lm, PROMPT, target=7)) for lm in (half, tiny("llama"))]
    found = [distributions(lm, query, some_changes(query, targets=1)) for lm, query in queries]
    assert_all_close(*found, atol=0.02, rtol=0.3)


def test_only_what_follows_a_change_is_run():
    lm = tiny("llama")
    query = query_of(lm, PROMPT)
    distributions(lm, query, [noise((query.logit_positions[0] - 2,), torch.zeros(5, 1, DIM))])
    assert (query.spent.token_forwards, query.spent.passes) == (15, 1)
    query = query_of(lm, PROMPT, max_new_tokens=3)
    late = noise((query.logit_positions[2],), torch.ones(1, 1, DIM), 3.0, (0,))
    torch.testing.assert_close(
        distributions(lm, query, [late])[0][0, 0], clean(query)[0], atol=1e-6, rtol=1e-4
    )


HIDING = [family for family in PACKING if family != "opt"]
"""OPT counts positions by the mask, so that the slow way cannot mask single tokens."""


def masked(lm, query, hidden, begin):
    length = len(query.token_ids)
    distance = torch.arange(length)[:, None] - torch.arange(length)
    columns = torch.zeros(length, dtype=torch.bool)
    columns[list(hidden)] = True
    unseen = (distance < 0) | (
        columns[None] & (distance > 0) & (torch.arange(length) >= begin)[:, None]
    )
    window = getattr(lm.model.config, "sliding_window", None)
    masks = {
        "full_attention": unseen,
        "sliding_attention": unseen | (distance >= (window or length)),
    }
    ready = {name: torch.where(mask, -torch.inf, 0.0)[None, None] for name, mask in masks.items()}
    kinds = getattr(lm.model.config, "layer_types", None)
    mask = (
        ready
        if kinds and len(set(kinds)) > 1
        else ready["sliding_attention" if window else "full_attention"]
    )
    with lm.running():
        logits = lm.model(
            inputs_embeds=lm.embed(query.token_ids)[None], attention_mask=mask, use_cache=False
        ).logits[0]
    return logits[list(query.logit_positions)].softmax(-1)


@pytest.mark.usefixtures("block")
@pytest.mark.parametrize("family", HIDING)
def test_later_tokens_do_not_attend_to_hidden_ones(family):
    lm = another(tiny(family))
    sources = ["The brown fox sings", "the dog plays"]
    for question in ({"max_new_tokens": 3, "sources": sources}, {"target": " fox in the rain"}):
        query = query_of(lm, PROMPT, **question)
        hidden = [(1,), (2, 3, 7), tuple(range(1, 9)), (4, len(query.token_ids) - 3)]
        found = distributions(
            lm, query, [*map(hide, hidden), set_rows((2, 3), torch.zeros(query.embedding_dim))]
        )
        assert_all_close(
            found[:-1],
            [masked(lm, query, positions, query.sources_stop)[None] for positions in hidden],
        )
        assert (found[3][0] - clean(query)).abs().max() > 2e-5


def test_what_cannot_be_removed_is_an_error():
    lm = wrap(tiny("llama").model, tiny_tokenizer(bos=False))
    query = query_of(lm, PROMPT)
    with pytest.raises(ParameterError, match="leaves none before a target to predict it from"):
        distributions(lm, query, [delete(range(len(query.token_ids)))])
    with pytest.raises(
        UnsupportedModelError, match=r"but not hidden\. Take a method with removal='delete'"
    ):
        attribute(
            tiny("mamba"), PROMPT, target="dog", method=Occlusion(removal="hidden"), unit="token"
        )


@pytest.mark.parametrize("family", ["gemma3", "mamba"])
@pytest.mark.parametrize("removal", ["noise", "delete"])
def test_a_game_has_the_values_of_inputs_built_by_hand(family, removal):
    lm = tiny(family)
    query = question_of(lm, unit="word")
    units, read = query.units, query.objective("logprob")
    kept = torch.rand(5, len(units), generator=torch.Generator().manual_seed(0)) < 0.6
    kept[0], kept[1], kept[2] = True, False, kept[3]
    way = remover(query, removal, torch.Generator().manual_seed(2), 3)
    remove = way.perturbation
    found = run_one(lm, LiveGame(query, read, way)(kept))
    for g, seen in enumerate(query.causal_mask):
        for row, value in zip(kept, found[g], strict=True):
            gone = [
                i
                for unit, k, s in zip(units, row, seen, strict=True)
                if s and not k
                for i in unit.token_indices
            ]
            (p,) = (
                one_by_one(lm, query, [remove(gone, (g,))]) if gone else [clean(query)[None, [g]]]
            )
            expected = p[:, 0, query.target_ids[g]].log().mean()
            torch.testing.assert_close(value.float(), expected, atol=2e-5, rtol=1e-4)


def test_equal_inputs_run_once_and_targets_share_them():
    lm = tiny("llama")
    query = query_of(lm, PROMPT, max_new_tokens=3)
    seen = int(query.causal_mask[0].sum())
    kept = torch.ones(4, len(query.units), dtype=torch.bool)
    kept[0, 4] = kept[1, 4] = kept[2, seen] = (
        False  # twice the same, then a unit that the first target does not see
    )
    game = LiveGame(query, query.objective("prob"), remover(query, "zero"))
    values = run_one(lm, game(kept))
    once = sum(len(query.token_ids) - query.units[unit].token_indices[0] for unit in (4, seen))
    assert query.spent.token_forwards == once
    assert torch.equal(values[:, 0], values[:, 1])
    assert torch.equal(values[:, 3], game.whole)
    assert values[0, 2] == game.whole[0]
    assert (values[1:, 2] != game.whole[1:]).any()
    assert torch.equal(torch.stack(run_one(lm, game.values([kept] * 3))), values)
    assert query.spent.token_forwards == once
    fewer = LiveGame(
        query,
        query.objective("prob"),
        remover(query, "zero"),
        (torch.arange(len(query.units)) < 2).expand(3, -1),
    )
    assert [units.tolist() for units in fewer.units] == [[0, 1]] * 3
    assert torch.equal(run_one(lm, fewer(kept)), game.whole[:, None].expand(-1, 4))


def by_hand(name, p, q, ids):
    """The score of one sample, from distributions [tokens, vocab] under a change and without one,
    in float64.
    """
    own = p[range(len(ids)), ids]
    distance = (p.sqrt() - q.sqrt()).square().sum(-1)
    return {
        "prob": own.log().mean().exp(),
        "logprob": own.log().sum(),
        "logit": own.prod().log() - (1 - own.prod()).log(),
        "lead": min(
            (row[i] / max(row.tolist()[:i] + row.tolist()[i + 1 :])).log()
            for row, i in zip(p, ids, strict=True)
        ),
        "hellinger": -(distance / 2).mean().sqrt(),
        "squared": -distance.mean() / 2**0.5,
    }[name]


@pytest.mark.parametrize("name", VALUES)
@pytest.mark.parametrize("tokens", [1, 3])
def test_scores_are_their_formulas(name, tokens):
    rng = torch.Generator().manual_seed(2)
    logits, clean = (
        3 * torch.randn(4, tokens, 9, generator=rng),
        3 * torch.randn(tokens, 9, generator=rng),
    )
    clean, ids = clean.log_softmax(-1), torch.tensor([4, 0, 8])[:tokens]
    p, q = logits.double().softmax(-1), clean.double().exp()
    expected = torch.stack([by_hand(name, one, q, ids) for one in p])
    torch.testing.assert_close(
        VALUES[name](logits, clean, ids).double(), expected, atol=1e-6, rtol=1e-5
    )
    if name in ("hellinger", "squared"):
        with pytest.raises(ParameterError, match="has no foil"):
            objective_of(name, 1)


@pytest.mark.parametrize("name", ["prob", "logprob", "logit"])
def test_a_contrast_takes_the_foil_from_the_last_tokens(name):
    rng = torch.Generator().manual_seed(2)
    logits = 3 * torch.randn(4, 3, 9, generator=rng)
    clean, ids = logits[0].log_softmax(-1), torch.tensor([4, 0, 8])
    p = logits.double().softmax(-1)
    target, foil = p[:, 0, 4].log(), p[:, 1, 0].log() + p[:, 2, 8].log()
    contrast = target.exp() - (foil / 2).exp() if name == "prob" else target - foil
    torch.testing.assert_close(
        objective_of(name, 2)(logits, clean, ids).double(), contrast, atol=1e-6, rtol=1e-5
    )


def test_log_odds_lose_no_digits():
    """Against float64, where a probability is as good as 0 or 1."""
    logits = 8 * torch.randn(3, 1, 300, generator=torch.Generator().manual_seed(2))
    logits[0, 0, 7], logits[1, 0, 7] = 90.0, -40.0
    p = logits.double().softmax(-1)[:, 0]
    rest = p.clone()
    rest[:, 7] = 0
    expected = p[:, 7].log() - rest.sum(-1).log()
    found = VALUES["logit"](logits, logits[0], torch.tensor([7])).double()
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=0)
    assert expected[0] > 40
    assert expected[1] < -40


@pytest.mark.parametrize("foil", [None, 5])
def test_effects_of_a_change_by_hand(foil):
    """Of the mean distribution over the samples; errors by the delta method."""
    logits = 2 * torch.randn(5, 1, 9, generator=torch.Generator().manual_seed(4))
    clean, ids = (logits[:1, 0] + 0.3).log_softmax(-1), torch.tensor([2])
    if foil is None:
        read = effect_of(objective_of("logprob"))
        found = read(logits, clean, ids)
    else:  # both are read at one place
        read = effect_of(objective_of("logprob", 1), 1)
        both = logits.expand(-1, 2, -1), clean.expand(2, -1), torch.tensor([2, foil])
        found = read(*both)
    samples, q = logits.double().softmax(-1)[:, 0], clean[0].double().exp()
    p = samples.mean(0)
    value, rest = (each[2].log() - (0 if foil is None else each[foil].log()) for each in (p, q))
    influence = samples[:, 2] / p[2] - (0 if foil is None else samples[:, foil] / p[foil])
    own = int(q.argmax()) if foil is None else 2
    rival, before = (
        foil or int(each.masked_fill(torch.arange(9) == own, 0).argmax()) for each in (p, q)
    )
    flips = p.argmax() != q.argmax() if foil is None else (p[2] > p[foil]) != (q[2] > q[foil])
    expected = {
        "score": rest - value,
        "stderr": influence.std() / 5**0.5,
        "flips": float(flips),
        "margin": (p[own] / p[rival]).log() / (q[own] / q[before]).log(),
        "probability": p[2],
        "probability_stderr": samples[:, 2].std() / 5**0.5,
        "foil_probability": 0 if foil is None else p[foil],
        "top_token": int(p.argmax()),
        "top_probability": p.max(),
    }
    expected = {name: float(value) for name, value in expected.items()}
    assert Effect(*found.tolist())._asdict() == pytest.approx(expected, rel=1e-4, abs=1e-6)


def failing_above(lm, tokens, sizes, error=torch.OutOfMemoryError):
    """A model that fails, by default as a full card does, on more than this many tokens at once."""
    inner = lm.model.forward

    @functools.wraps(inner)
    def forward(*args, **kwargs):
        sizes.append(kwargs["inputs_embeds"].shape[:2].numel())
        if sizes[-1] > tokens:
            raise error("CUDA out of memory")
        return inner(*args, **kwargs)

    return forward


@pytest.mark.parametrize("family", ["llama", "falcon"])
def test_passes_are_halved_when_memory_runs_out(family, monkeypatch):
    lm = tiny(family)
    query = query_of(lm, PROMPT, max_new_tokens=2)
    changes = some_changes(query, targets=2)
    expected, sizes = distributions(lm, query, changes), []
    monkeypatch.setattr(lm.model, "forward", failing_above(lm, 40, sizes))
    assert_all_close(distributions(lm, query, changes), expected, atol=1e-6)
    assert max(sizes) > 40
    assert sum(size > 40 for size in sizes) < 10  # what fits is remembered
    monkeypatch.setattr(lm.model, "forward", failing_above(lm, 0, sizes))
    with pytest.raises(
        ModelError, match=r"Not enough memory on cpu to run one sequence .* Shorten the prompt"
    ):
        distributions(lm, query, changes)


@pytest.mark.parametrize("family", PACKING)
def test_a_long_prompt_runs_in_pieces(family, monkeypatch):
    lm = another(tiny(family), batch_tokens=4)
    question_of(lm)  # what the model can do is tried once
    query = question_of(lm)
    changes = some_changes(query)
    expected = distributions(lm, query, changes)
    lengths: list[int] = []

    def forward(*args, inputs_embeds, **options):
        lengths.append(inputs_embeds.shape[1])
        return inner(*args, inputs_embeds=inputs_embeds, **options)

    inner = lm.model.forward
    monkeypatch.setattr(language_model, "BLOCK", 4)
    monkeypatch.setattr(packing, "KEPT_NUMBERS", 0)
    monkeypatch.setattr(lm.model, "forward", forward)
    pieces = question_of(lm)
    assert 1 <= max(lengths) <= 4
    assert_all_close(distributions(lm, pieces, changes), expected, atol=1e-5)
    for one, other in zip(pieces.clean_of, query.clean_of, strict=True):
        assert torch.allclose(one, other, atol=1e-5)


def test_an_interrupt_between_pieces_leaves_a_context_that_can_be_used(monkeypatch):
    lm = another(tiny("llama"), batch_tokens=4)
    monkeypatch.setattr(language_model, "BLOCK", 4)
    calls = []

    def forward(*args, **options):
        calls.append(args)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return inner(*args, **options)

    inner = lm.model.forward
    context = lm.context(lm.encode(PROMPT).token_ids)
    branch = packing.Branch(
        context, 0, context.inputs[None], [len(context.inputs) - 1], record=True
    )
    monkeypatch.setattr(lm.model, "forward", forward)
    with pytest.raises(KeyboardInterrupt):
        lm.run([branch])
    assert context.done == 0
    (logits,) = lm.run([branch])
    assert context.done == len(context.inputs)
    assert torch.isfinite(logits).all()
    monkeypatch.undo()
    (again,) = lm.run([branch])
    assert torch.allclose(logits, again, atol=1e-5)


def test_an_error_ends_one_coroutine_and_the_others_go_on():
    """In a pass, in reading what it gave, in the coroutine itself; nothing that was theirs is run
    any more.
    """
    lm, closed = another(tiny("llama")), list[int]()
    queries = [query_of(lm, PROMPT) for _ in range(5)]

    def failing(*_):
        raise KeyError("mine")

    async def steps(number):
        changes = [INFINITE] * (number == 2) + some_changes(queries[number], targets=1)
        try:
            if number == 3:
                raise ZeroDivisionError
            read = failing if number == 1 else VALUES["prob"]
            return await asks(queries[number], *changes, read=read)
        finally:
            closed.append(number)

    outcomes = dict(Engine(lm).run([steps(number) for number in range(5)]))
    expected = run_one(tiny("llama"), steps(0))
    for number in (0, 4):
        assert_all_close(outcomes[number], expected)
    assert [type(outcomes[number]) for number in (1, 2, 3)] == [
        KeyError,
        NumericalError,
        ZeroDivisionError,
    ]
    assert sorted(closed) == [0, 0, 1, 2, 3, 4]
    with pytest.raises(ZeroDivisionError) as caught:
        run_many(lm, [steps(0), steps(3)])
    assert caught.value.__notes__ == ["Prompt 1, counted from 0, was being attributed."]


async def steps_of(query, change):
    return await asks(query, change)


def test_a_pass_that_fails_ends_the_coroutines_whose_sequences_it_held(monkeypatch):
    lm, calls = another(tiny("llama"), batch_tokens=10**6), []
    monkeypatch.setattr(engine_module, "AT_ONCE", 2)
    queries = [query_of(lm, PROMPT) for _ in range(3)]

    def stop(*_):
        calls.append(1)
        if len(calls) == 1:
            raise RuntimeError("a hook of the caller's")

    handle = lm.model.register_forward_pre_hook(stop)
    outcomes = dict(Engine(lm).run([steps_of(query, zero(1)) for query in queries]))
    handle.remove()
    assert all(
        "failed while it ran: RuntimeError: a hook of the caller's." in str(outcomes[i])
        for i in (0, 1)
    )
    assert (outcomes[2][0].shape, len(calls)) == ((1, 1), 2)


@pytest.mark.parametrize("error", [KeyboardInterrupt, GeneratorExit])
def test_coroutines_that_are_given_up_are_closed(error, monkeypatch):
    lm, closed = tiny("llama"), []
    query = query_of(lm, PROMPT)

    async def steps(number):
        try:
            for _ in range(number + 1):
                await asks(query, zero(1))
        finally:
            closed.append(number)

    running = Engine(lm).run([steps(number) for number in range(3)])
    assert next(running)[0] == 0
    if error is GeneratorExit:
        running.close()
    else:
        monkeypatch.setattr(lm.model, "forward", failing_above(lm, 0, [], KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            list(running)
    assert sorted(closed) == [0, 1, 2]


def test_steps_may_await_other_steps():
    """Their result is the answer, their error is raised where they were awaited, and an error of
    the model ends all.
    """
    lm, ended = tiny("llama"), []
    query = query_of(lm, PROMPT)

    async def inner(positions, error=None):
        try:
            (found,) = await asks(query, delete(positions))
            if error:
                raise error
            return float(found)
        finally:
            ended.append("inner")

    async def outer(one, other):
        try:
            with pytest.raises(ValueError, match="Caught"):
                await inner((1,), ValueError("Caught"))
            return await inner(one), await inner(other)
        finally:
            ended.append("outer")

    assert run_one(lm, outer((1,), (2, 3))) == (
        run_one(lm, inner((1,))),
        run_one(lm, inner((2, 3))),
    )
    ended.clear()
    with pytest.raises(ParameterError, match="leaves none before a target"):
        run_one(lm, outer(range(len(query.token_ids)), (1,)))
    assert ended == ["inner", "inner", "outer"]


def test_targets_that_are_not_named_are_not_read():
    lm = tiny("llama")
    query = query_of(lm, PROMPT, max_new_tokens=3)
    found = ask(lm, asks(query, zero(1), zero(1, (2, 0)), zero(1, ())))
    assert [each.shape for each in found] == [(3, 1), (2, 1), (0, 1)]
    torch.testing.assert_close(found[1], found[0][[2, 0]], atol=1e-7, rtol=1e-5)
    assert (found[0].dtype, query.spent.passes) == (torch.float64, 1)


@pytest.mark.parametrize("read", [VALUES["squared"], VALUES["prob"], effect_of(VALUES["prob"])])
def test_a_failing_model_fails_loudly(read):
    lm = wrap(tiny_model("llama"), tiny_tokenizer())
    with pytest.raises(NumericalError, match="NaN or infinite"):
        ask(lm, asks(query_of(lm, PROMPT), INFINITE, read=read))
    assert all(module.training for module in lm.model.modules())


@pytest.mark.parametrize(
    ("method", "unit"),
    [(Noiser(samples=2, steps=2), "token"), (Occlusion(), "token"), (Occlusion(), "auto")],
)
def test_progress_counts_token_forwards(method, unit):
    lm, told = another(tiny("llama"), batch_tokens=100), []
    att = attribute(
        lm,
        PROMPT,
        method=method,
        unit=unit,
        target_unit="token",
        progress=lambda *counts: told.append(counts),
    )
    length, done = len(lm.tokenizer(PROMPT)["input_ids"]), [each[0] for each in told]
    assert done == sorted(done)
    assert all(now <= expected for now, expected in told)
    assert told[0] == (0, length)
    assert told[-1] == (done[-1],) * 2 == (att.info["token_forwards"] + length,) * 2
    first = next(expected for now, expected in told if now == length and expected > now)
    assert first > 5 * length or unit == "auto", "before they run"
