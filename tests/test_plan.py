"""Batches: every sample exactly once, within the limits, and never dearer than the obvious partitions."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from noiser.engine.plan import Limits, Work, pack_batches, plan_batches

NONE = Limits(10**9, 10**9, 10**9)
works = st.lists(
    st.builds(lambda start, length, samples: Work(start, start + length, samples), *[st.integers(1, 30)] * 3),
    min_size=1,
    max_size=30,
)


@given(works, st.builds(Limits, st.integers(1, 400), st.integers(1, 50), st.integers(1, 800)), st.integers(0, 500))
def test_every_sample_runs_exactly_once_within_the_limits(work, limits, overhead):
    batches = plan_batches(work, limits, overhead=overhead)
    seen = [(p.perturbation, i) for b in batches for p in b.pieces for i in range(p.first, p.last)]
    assert sorted(seen) == [(i, s) for i, w in enumerate(work) for s in range(w.samples)]
    for batch in batches:
        assert batch.sequences <= limits.sequences
        assert batch.tokens <= limits.tokens or batch.sequences == 1
        assert batch.sequences * batch.stop <= limits.keys or batch.sequences == 1
        assert all(
            batch.start <= work[p.perturbation].start and batch.stop >= work[p.perturbation].stop for p in batch.pieces
        )


@given(works, st.integers(0, 500))
def test_the_plan_costs_no_more_than_one_batch_each_or_one_for_all(work, overhead):
    def cost(batches):
        return sum(b.tokens + overhead for b in batches)

    plan = plan_batches(work, NONE, overhead=overhead)
    separate = sum(w.samples * (w.stop - w.start) + overhead for w in work)
    start, stop = min(w.start for w in work), max(w.stop for w in work)
    together = sum(w.samples for w in work) * (stop - start) + overhead
    assert cost(plan) <= min(separate, together)


@given(works, st.integers(1, 400), st.integers(1, 50))
def test_packed_batches_run_every_sample_once_and_no_token_for_nothing(work, max_tokens, max_sequences):
    batches = pack_batches(work, max_tokens=max_tokens, max_sequences=max_sequences)
    seen = [(p.perturbation, i) for b in batches for p in b.pieces for i in range(p.first, p.last)]
    assert sorted(seen) == [(i, s) for i, w in enumerate(work) for s in range(w.samples)]
    assert sum(b.tokens for b in batches) == sum(w.samples * (w.stop - w.start) for w in work)
    for batch in batches:
        assert batch.sequences <= max_sequences
        assert batch.tokens <= max_tokens or batch.sequences == 1


def test_neighbours_share_a_pass_only_while_it_pays():
    work = [Work(0, 10, 10), Work(1, 10, 10), Work(9, 10, 10)]
    batches = plan_batches(work, NONE, overhead=15)
    assert [{p.perturbation for p in b.pieces} for b in batches] == [{2}, {0, 1}]


def test_nothing_to_do():
    assert plan_batches([], Limits(1, 1, 1), overhead=0) == []
