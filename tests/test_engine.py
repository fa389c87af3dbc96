"""The engine gives what running every whole sequence gives, whatever the batches, and leaves no trace."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode

from engine_for_tests import clean, distributions, drive
from noiser import Lime, Noiser, Occlusion, attribute, evaluate, tolerance
from noiser.engine import (
    REMOVALS,
    AddNoise,
    Delete,
    Effects,
    Hide,
    KeepDimensions,
    Remover,
    Replace,
    Session,
    SetRows,
    Values,
    expected_norm,
    readouts,
)
from noiser.errors import ModelError, NumericalError, ParameterError, UnknownNameError, UnsupportedModelError
from noiser.model import build_query, packing, wrap
from noiser.model.clean import run_clean, without_sharing
from tiny import FAMILIES, tiny, tiny_model, tiny_tokenizer

PROMPT = "The brown fox sings in the rain, and the dog plays along."


def some_perturbations(query, dim, targets=3):
    """Noise, zeros and masks at single and several positions, for all and for some targets."""
    generator = torch.Generator().manual_seed(1)
    noise = torch.randn(4, 3, dim, generator=generator)
    keep = torch.rand(2, len(query.token_ids) - 1, dim, generator=generator) < 0.5
    everywhere = tuple(range(1, len(query.token_ids)))
    return [
        *[AddNoise((i,), noise=noise, scale=0.5) for i in range(1, len(query.token_ids) - targets)],
        AddNoise((2, 4, 5), (targets - 1,), noise=noise, scale=0.3),
        Replace((1, 2), (0, targets - 1)),
        Delete((1, 4, 5), (0, targets - 1)),
        Delete((3, len(query.token_ids) - 1)),
        KeepDimensions(everywhere, keep=lambda: keep, count=2),
    ]


def one_by_one(lm, query, perturbations):
    """The obvious way: every sample alone, from the first token, with all logits."""
    results = []
    with lm.running():
        clean = lm.model.get_input_embeddings()(query.token_ids)
        for p in perturbations:
            targets = range(len(query.logit_positions)) if p.targets is None else p.targets
            if isinstance(p, Delete):
                results.append(torch.stack([shortened(lm, query, p.positions, g) for g in targets])[None])
                continue
            positions = list(p.positions)
            samples = []
            for rows in p.rows(clean[positions] / lm.embedding_scale, lambda name: torch.zeros(clean.shape[1])):
                inputs = clean.clone()
                inputs[positions] = rows * lm.embedding_scale
                logits = lm.model(inputs_embeds=inputs[None], use_cache=False).logits[0]
                samples.append(logits[[query.logit_positions[g] for g in targets]].softmax(-1))
            results.append(torch.stack(samples))
    return results


def shortened(lm, query, deleted, target):
    """The distribution of one target on the ids that are left, by the model alone."""
    kept = [i for i in range(query.logit_positions[target] + 1) if i not in deleted]
    with torch.no_grad():
        return lm.model(input_ids=query.token_ids[kept][None]).logits[0, -1].softmax(-1)


def unpacked(lm):
    """The same model, whose batches have one start and stop."""
    other = wrap(lm.model, lm.tokenizer)
    other.packs = False
    return other


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_equals_whole_sequences_in_every_family(family, packed):
    lm = tiny(family) if packed else unpacked(tiny(family))
    query = build_query(lm, PROMPT, max_new_tokens=3, target=None if family != "mamba" else "dog")
    perturbations = some_perturbations(query, lm.embedding_dim, targets=len(query.target_ids))
    found = distributions(Session(lm, query), perturbations)
    for index, expected in enumerate(one_by_one(lm, query, perturbations)):
        torch.testing.assert_close(found[index], expected, atol=2e-6, rtol=1e-4)


@pytest.mark.parametrize("tile", [1, 3, packing.TILE], ids="tiles of {}".format)
@pytest.mark.parametrize("cost", [0, float("inf")], ids=["many blocks", "one block"])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_clean_sequence_travels_with_the_first_batch(family, cost, tile, monkeypatch):
    monkeypatch.setitem(packing.BLOCK_COST, "cpu", cost)
    monkeypatch.setattr(packing, "TILE", tile)
    monkeypatch.setattr(packing, "MASKS", 0 if tile == 1 else packing.MASKS)
    lm = wrap(tiny(family).model, tiny(family).tokenizer, batch_tokens=40)
    known = build_query(lm, PROMPT, max_new_tokens=3)
    query = replace(known, continuation=None)
    perturbations = some_perturbations(query, lm.embedding_dim, targets=3)
    session = Session(lm, query)
    assert session._clean is None
    found = distributions(session, perturbations)
    for index, expected in enumerate(one_by_one(lm, query, perturbations)):
        torch.testing.assert_close(found[index], expected, atol=2e-6, rtol=1e-4)
    own = drive(session, session.clean()).probabilities
    torch.testing.assert_close(own, clean(lm, known), atol=2e-6, rtol=1e-4)


@pytest.mark.parametrize(("method", "passes"), [("occlusion", 1), ("input_x_gradient", 2), ("deeplift", 3)])
def test_how_often_methods_run_the_model(method, passes, monkeypatch):
    lm = tiny("llama")
    assert lm.packs
    expected = attribute(lm, PROMPT, method=method)
    calls = []
    inner = lm.model.forward
    monkeypatch.setattr(
        lm.model, "forward", functools.wraps(inner)(lambda **kwargs: calls.append(1) or inner(**kwargs))
    )
    found = attribute(lm, PROMPT, method=method, target=expected.targets[0].token_id)
    assert len(calls) == passes
    assert found.targets[0].probability == pytest.approx(expected.targets[0].probability, rel=1e-5)
    torch.testing.assert_close(found.scores, expected.scores, atol=1e-6, rtol=1e-4)


def test_prefix_is_reused_where_it_can_be_and_never_where_it_cannot():
    assert all(tiny(family).reuses_prefix(9) == (family != "mamba") for family in FAMILIES)


@pytest.mark.parametrize("family", [family for family in FAMILIES if family != "mamba"])
def test_a_repeated_prefix_is_copied_for_one_layer_at_a_time(family):
    lm = tiny(family)
    with lm.running():
        embeddings = lm.embed(torch.arange(5, 17))
        recorded = without_sharing(run_clean(lm, embeddings, [11])).prefix
        branch = recorded.branch(8, 3)
        lm.logits(embeddings[8:].expand(3, -1, -1), positions=[3], prefix=branch)
    for layer, original in zip(branch.cache.layers, recorded.cache.layers, strict=True):
        for kept, whole in [(layer.keys, original.keys), (layer.values, original.values)]:
            assert kept.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("family", ["llama", "gemma3", "mamba"])
@pytest.mark.parametrize("batch_tokens", [1, 17, 64])
def test_results_do_not_depend_on_the_batch_budget(family, batch_tokens, packed):
    big = tiny(family)
    small = wrap(big.model, big.tokenizer, batch_tokens=batch_tokens)
    small.packs = packed and big.packs
    query = build_query(big, PROMPT, max_new_tokens=2)
    perturbations = some_perturbations(query, big.embedding_dim, targets=len(query.target_ids))
    expected = distributions(Session(big, query), perturbations)
    session = Session(small, query)
    for index, found in enumerate(distributions(session, perturbations)):
        torch.testing.assert_close(found, expected[index], atol=1e-6, rtol=1e-4)
    assert session.counters.passes > 3


# ---- removal --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt2", "mamba"])
def test_deletion_is_the_shorter_text(family, packed):
    lm = wrap(tiny(family).model, tiny(family).tokenizer, batch_tokens=64)
    lm.packs = packed and lm.packs
    query = build_query(lm, PROMPT, max_new_tokens=3, target=None if family != "mamba" else "dog")
    targets, last = range(len(query.target_ids)), len(query.token_ids) - 1
    perturbations = [
        *[Delete((i,)) for i in range(1, last + 1)],
        Delete((last - 2, last - 1, last)),
        Delete(tuple(range(1, last + 1))),
    ]
    for perturbation, found in zip(perturbations, distributions(Session(lm, query), perturbations), strict=True):
        expected = torch.stack([shortened(lm, query, perturbation.positions, g) for g in targets])
        torch.testing.assert_close(found[0], expected, atol=2e-6, rtol=1e-4)


def test_what_cannot_be_deleted_is_an_error():
    lm = wrap(tiny("llama").model, tiny_tokenizer(bos=False))
    query = build_query(lm, PROMPT)
    with pytest.raises(ParameterError, match="leaves none before a target; expected at least one"):
        distributions(Session(lm, query), [Delete(tuple(range(len(query.token_ids))))])


HIDING = [family for family in FAMILIES if family not in ("mamba", "falcon", "opt")]
"""Mamba has no attention, Falcon cannot be packed, and OPT counts positions by the mask, so that this test cannot."""


def masked(lm, query, hidden, begin):
    """Distributions if positions from `begin` on do not attend to earlier hidden ones, by transformers alone."""
    length = len(query.token_ids)
    distance = torch.arange(length)[:, None] - torch.arange(length)
    columns = torch.zeros(length, dtype=torch.bool)
    columns[list(hidden)] = True
    unseen = (distance < 0) | (columns[None] & (distance > 0) & (torch.arange(length) >= begin)[:, None])
    window = getattr(lm.model.config, "sliding_window", None)
    masks = {"full_attention": unseen, "sliding_attention": unseen | (distance >= (window or length))}
    ready = {name: torch.where(mask, -torch.inf, 0.0)[None, None] for name, mask in masks.items()}
    kinds = getattr(lm.model.config, "layer_types", None)
    mask = ready if kinds and len(set(kinds)) > 1 else ready["sliding_attention" if window else "full_attention"]
    with lm.running():
        logits = lm.model(inputs_embeds=lm.embed(query.token_ids)[None], attention_mask=mask, use_cache=False).logits[0]
    return logits[list(query.logit_positions)].softmax(-1)


@pytest.mark.parametrize("tile", [1, packing.TILE], ids="tiles of {}".format)
@pytest.mark.parametrize("family", HIDING)
def test_later_tokens_do_not_attend_to_hidden_ones(family, tile, monkeypatch):
    monkeypatch.setattr(packing, "TILE", tile)
    lm = wrap(tiny(family).model, tiny(family).tokenizer, batch_tokens=64)
    sources = ["The brown fox sings", "the dog plays"]
    for query in (
        build_query(lm, PROMPT, max_new_tokens=3, sources=sources),
        build_query(lm, PROMPT, target=" fox in the rain"),
    ):
        last = len(query.token_ids) - 1
        hides = [Hide((1,)), Hide((2, 3, 7)), Hide(tuple(range(1, 9))), Hide((4, last - 2)), Replace((2, 3))]
        found = distributions(Session(lm, query), hides)
        for hide, each in zip(hides[:-1], found, strict=False):
            expected = masked(lm, query, hide.positions, query.sources_stop)
            torch.testing.assert_close(each[0], expected, atol=2e-6, rtol=1e-4)
        assert (found[3][0] - clean(lm, query)).abs().max() > 2e-5


def test_hiding_in_sources_runs_what_comes_after_them():
    lm = tiny("llama")
    query = build_query(lm, PROMPT, target=" fox sings", sources=["The brown fox sings", "the dog plays"])
    assert query.encoding.text[query.encoding.offsets[query.sources_stop][0] :] == " along. fox sing"
    session = Session(lm, query)
    distributions(session, [Hide((1,)), Hide((2, 3))])
    assert session.counters.token_forwards == 2 * (len(query.token_ids) - query.sources_stop)


def test_what_cannot_be_hidden_is_an_error():
    lm = tiny("mamba")
    with pytest.raises(UnsupportedModelError, match=r"cannot be taken away in Mamba.*such as 'zero'"):
        attribute(lm, PROMPT, target="dog", method=Occlusion(baseline="hidden"))


def test_every_removal_is_the_perturbation_of_its_name():
    lm = tiny("gemma3")
    query = build_query(lm, PROMPT)
    session = Session(lm, query)
    table = lm.model.get_input_embeddings().weight.detach()

    def rows(name, positions):
        remover = Remover(query, name, torch.Generator().manual_seed(3), samples=4)
        return remover(positions).rows(session.embeddings[list(positions)], session.baseline)

    assert set(REMOVALS) == {"zero", "mean", "noise", "delete"}
    assert not rows("zero", (2, 4)).any()
    known = len(lm.tokenizer)
    torch.testing.assert_close(rows("mean", (2, 4)), table[:known].mean(0).expand(1, 2, -1))
    assert Remover(query, "delete", torch.Generator())((4, 2)).deleted == (2, 4)
    noise = torch.randn(4, len(query.token_ids), 32, generator=torch.Generator().manual_seed(3))
    sizes = 2 * session.embeddings.norm(dim=-1, keepdim=True) / expected_norm("l2", 32)
    noisy = session.embeddings + sizes * noise
    torch.testing.assert_close(rows("noise", (2, 4)), noisy[:, [2, 4]])
    torch.testing.assert_close(rows("noise", (4,)), noisy[:, [4]])  # the same whatever else is removed
    with pytest.raises(UnknownNameError, match="Did you mean 'delete'"):
        Remover(query, "deleted", torch.Generator())


class Waits(TorchFunctionMode):
    """Counts what a graphics card would be waited for: tensors whose numbers are asked for, masks used as indices."""

    reads = frozenset(
        getattr(torch.Tensor, name)
        for name in ("tolist", "item", "cpu", "numpy", "nonzero", "__float__", "__int__", "__bool__", "__index__")
    )

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        masks = func in (torch.Tensor.__getitem__, torch.Tensor.__setitem__) and any(
            isinstance(index, torch.Tensor) and index.dtype == torch.bool
            for index in (args[1] if isinstance(args[1], tuple) else args[1:2])
        )
        self.count += func in self.reads or masks
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "method", [Noiser(bounding=0.05), Noiser(bounding=0.05, score="hellinger"), Occlusion(), Lime(samples=50)]
)
def test_what_is_read_is_copied_at_once(method):
    """A model that runs in plain batches, as on a graphics card."""
    lm = tiny("falcon")
    short, long = "The brown fox sings", "The brown fox sings in the rain, and the dog plays along with the child."
    counts = []
    for prompt in (short, short, long):
        with Waits() as waits:
            att = attribute(lm, prompt, method=method)
        counts.append(waits.count)
    assert len(att.units) > 15
    assert counts[1] == counts[2]  # the first time, the model is tried out


@pytest.mark.parametrize(
    "ask",
    [
        *(functools.partial(attribute, method=m) for m in (Noiser(), Occlusion(), Lime(samples=50))),
        lambda lm, prompt: tolerance(lm, attribute(lm, prompt, method="random"), 1),
        lambda lm, prompt: evaluate(lm, attribute(lm, prompt, method="random"), metrics=["soft_scores"]),
    ],
)
def test_distributions_are_not_kept(ask, monkeypatch):
    """They are a megabyte each for a long vocabulary; what is read of them must not hold on to them."""
    seen, most = [], 0

    def watched(readout):
        inner = readout.measure

        def measure(self, predicted, targets):
            nonlocal most
            own = readouts.Predicted(predicted.probabilities.log())
            seen.append(StorageWeakRef(own._logits.untyped_storage()))
            seen.append(StorageWeakRef(own.probabilities.untyped_storage()))
            numbers = inner(self, own, targets)
            del own
            most = max(most, sum(not each.expired() for each in seen))
            return numbers

        monkeypatch.setattr(readout, "measure", measure)

    watched(readouts.EffectReadout)
    watched(readouts.ValueReadout)
    ask(tiny("llama"), PROMPT)
    assert len(seen) > 1
    assert most == 0


def test_long_sequences_are_cut_so_that_little_is_compared_for_nothing():
    place = packing._Segment(start=700, copies=2, length=1300, offset=50, base=0, cached=700, clean=700)
    whole = packing._tiles(place, None)
    assert [(tile.first, tile.stop) for tile in whole] == [
        (700, 768), (768, 1024), (1024, 1280), (1280, 1536), (1536, 1792), (1792, 2000)
    ]  # fmt: skip
    assert all(tile.oldest == 0 for tile in whole)
    assert sum(tile.queries * tile.keys for tile in whole) < 1.1 * sum(range(701, 2001))
    narrow = packing._tiles(place, 100)
    assert [tile.oldest for tile in narrow] == [tile.first - 99 for tile in whole]
    assert sum(tile.queries * tile.keys for tile in narrow) < 4 * 1300 * 100
    many = packing._tiles(place._replace(copies=100), None)
    assert max(tile.segment.copies * tile.keys for tile in many) <= packing.BLOCK_KEYS
    assert sum(tile.segment.copies * tile.queries for tile in many) == 100 * 1300


def test_packs_wherever_attention_goes_through_the_registry():
    assert {family for family in FAMILIES if not tiny(family).packs} == {"falcon", "mamba"}


@pytest.mark.parametrize("packed", [True, False])
def test_half_precision_stays_close_to_float32(packed):
    exact = tiny("llama")
    half = wrap(tiny_model("llama").bfloat16(), exact.tokenizer)
    half.packs = packed and half.packs
    query = build_query(exact, PROMPT)
    perturbations = some_perturbations(query, 32, targets=1)
    expected = distributions(Session(exact, query), perturbations)
    for index, found in enumerate(distributions(Session(half, query), perturbations)):
        assert found.dtype == torch.float32
        torch.testing.assert_close(found, expected[index], atol=0.02, rtol=0.3)


def test_only_the_suffix_is_run():
    lm = tiny("llama")
    query = build_query(lm, PROMPT)
    last = query.logit_positions[-1]
    session = Session(lm, query)
    distributions(session, [AddNoise((last - 2,), noise=torch.zeros(5, 1, 32))])
    assert session.counters[:3] == (15, 1, 5)


def out_of_memory_above(lm, tokens):
    """A model that fails, as a full card does, on more than this many tokens at once."""
    inner = lm.model.forward

    def forward(*args, **kwargs):
        if kwargs["inputs_embeds"].shape[:2].numel() > tokens:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return inner(*args, **kwargs)

    return inner, forward


def test_halves_batches_when_memory_runs_out(monkeypatch):
    lm = tiny("llama")
    query = build_query(lm, PROMPT, max_new_tokens=2)
    perturbations = some_perturbations(query, 32, targets=2)
    expected = distributions(Session(lm, query), perturbations)
    session = Session(lm, query)
    _, failing = out_of_memory_above(lm, 40)
    monkeypatch.setattr(lm.model, "forward", failing)
    found = distributions(session, perturbations)
    assert len(found) == len(expected)
    for index in range(len(found)):
        torch.testing.assert_close(found[index], expected[index], atol=1e-6, rtol=1e-4)


def test_memory_that_runs_out_for_a_prefix_halves_what_is_in_front_of_a_batch(monkeypatch):
    whole = tiny("llama")
    lm = wrap(whole.model, whole.tokenizer, batch_tokens=64)
    lm.packs = False
    query = build_query(lm, " ".join([PROMPT] * 8))
    length = len(query.token_ids)
    assert length > 64
    inner, sizes = lm.model.forward, []

    def forward(*args, **kwargs):
        sequences = kwargs["inputs_embeds"].shape[0]
        if sequences * length > 8 * length:
            raise torch.OutOfMemoryError("CUDA out of memory")
        sizes.append(sequences)
        return inner(*args, **kwargs)

    monkeypatch.setattr(lm.model, "forward", functools.wraps(inner)(forward))
    session = Session(lm, query)
    noise = torch.randn(40, 1, 32, generator=torch.Generator().manual_seed(0))
    for _ in range(2):
        distributions(session, [AddNoise((length - 2,), noise=noise, scale=0.1)])
    assert sorted(sizes)[-6:] >= [5] * 6  # of 16 at first, 8, and then half of what failed; not one by one
    assert len(sizes) < 2 * 40 / 3


def test_says_so_when_not_even_one_sequence_fits(monkeypatch):
    lm = tiny("llama")
    query = build_query(lm, PROMPT)
    session = Session(lm, query)
    _, failing = out_of_memory_above(lm, 0)
    monkeypatch.setattr(lm.model, "forward", failing)
    with pytest.raises(ModelError, match=r"Not enough memory on cpu to run one sequence .* Shorten the prompt"):
        distributions(session, [AddNoise((1,), noise=torch.zeros(5, 1, 32))])


def test_a_failing_model_fails_loudly():
    model = tiny_model("llama")
    lm = wrap(model, tiny_tokenizer())
    query = build_query(lm, PROMPT)
    session = Session(lm, query)
    broken = SetRows((3,), given=torch.full((1, 1, 32), torch.inf))
    for request in (Effects([broken]), Effects([broken], leads=False), Values([broken]), Values([broken], "squared")):
        with pytest.raises(NumericalError, match="NaN or infinite"):
            session.ask(request)
    assert all(module.training for module in model.modules())


def test_later_positions_cannot_matter():
    lm = tiny("llama")
    query = build_query(lm, PROMPT, max_new_tokens=3)
    late = AddNoise((query.logit_positions[2],), (0,), noise=torch.ones(1, 1, 32), scale=3.0)
    (found,) = distributions(Session(lm, query), [late])
    torch.testing.assert_close(found[0, 0], clean(lm, query)[0], atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_half_precision_packs_too(family):
    assert wrap(tiny_model(family).bfloat16(), tiny_tokenizer()).packs


def test_what_is_read_of_logits_alone_loses_no_digits():
    """Against float64, where a probability is as good as 0 or 1."""
    logits = 8 * torch.randn(3, 2, 300, generator=torch.Generator().manual_seed(2))
    ids = torch.tensor([7, 299])
    logits[0, 0, 7], logits[1, 1, 299] = 90.0, -40.0
    p = logits.double().softmax(-1)
    target = torch.stack([p[:, 0, 7], p[:, 1, 299]], 1)
    p[:, 0, 7] = p[:, 1, 299] = 0
    rest = p.sum(-1)
    read = readouts.Predicted(logits).target_and_rest(ids).double()
    torch.testing.assert_close(read, torch.stack([target, rest], -1), rtol=1e-5, atol=0)
    assert 0 < float(read[0, 0, 1]) < 1e-20


@pytest.mark.parametrize("score", ["prob", "logprob"])
@pytest.mark.parametrize("target_unit", ["token", "all"])
def test_effects_without_leads_have_the_same_scores(score, target_unit):
    lm = tiny("gemma3")
    query = build_query(lm, PROMPT, max_new_tokens=3, target_unit=target_unit)
    every = some_perturbations(query, 32, targets=len(query.target_spans))
    whole, alone = (Session(lm, query).ask(Effects(every, score, leads=leads)) for leads in (True, False))
    for name in ("score", "stderr", "probability", "probability_stderr"):
        torch.testing.assert_close(getattr(alone, name), getattr(whole, name), equal_nan=True, rtol=1e-4, atol=1e-6)
    assert alone.lead.isnan().all()
    assert not alone.flips.any()
    assert (alone.leader == -1).all()
