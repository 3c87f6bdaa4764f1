"""Micro-batches hold every segment once, whole, within the budget, and replicas get equal shares."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rz_agent.learner.batch import Batch
from rz_agent.learner.packing import MicroBatch, pack
from tiny_learner import ragged_groups, segment

LENGTHS = st.lists(st.integers(1, 40), min_size=0, max_size=30)


def batch_of(lengths: list[int]) -> Batch:
    rng = np.random.default_rng(0)
    return Batch.of_segments([segment(rng, [(1, n)]) for n in lengths])


def test_worked_example_of_two_segments_in_one_micro_batch() -> None:
    rng = np.random.default_rng(0)
    one, two = segment(rng, [(2, 1), (1, 2)]), segment(rng, [(1, 2)], temperature=0.5)
    [[held]] = pack(Batch.of_segments([one, two]).pieces, budget=100)
    assert held.cu_seqlens == (0, 6, 9)
    assert held.positions.tolist() == [0, 1, 2, 3, 4, 5, 0, 1, 2]
    assert held.rows.tolist() == [1, 3, 4, 6, 7], "the token before an action predicts it"
    assert held.targets.tolist() == [*one.token_ids[[2, 4, 5]], *two.token_ids[1:]]
    assert held.flat.tolist() == [0, 1, 2, 3, 4]
    assert held.temperatures.tolist() == [1, 1, 1, 0.5, 0.5]


@settings(deadline=None)
@given(lengths=LENGTHS, budget=st.integers(1, 100), shares=st.integers(1, 4))
def test_every_action_is_trained_exactly_once_and_nothing_is_dropped(
    lengths: list[int], budget: int, shares: int
) -> None:
    batch = batch_of(lengths)
    dealt = pack(batch.pieces, budget, shares)
    flat = [int(f) for share in dealt for held in share for f in held.flat if f >= 0]
    assert sorted(flat) == list(range(len(batch)))


@settings(deadline=None)
@given(lengths=LENGTHS, budget=st.integers(1, 100), shares=st.integers(1, 4))
def test_replicas_run_equally_many_micro_batches_padded_with_work_that_adds_nothing(
    lengths: list[int], budget: int, shares: int
) -> None:
    dealt = pack(batch_of(lengths).pieces, budget, shares)
    assert len({len(share) for share in dealt}) == 1
    padding = [held for share in dealt for held in share if (held.flat < 0).any()]
    assert all(not held.coefficients.any() and (held.flat == -1).all() for held in padding)


@settings(deadline=None)
@given(lengths=LENGTHS, budget=st.integers(1, 100), shares=st.integers(1, 4))
def test_a_micro_batch_passes_the_budget_only_with_one_segment_that_is_longer(
    lengths: list[int], budget: int, shares: int
) -> None:
    for share in pack(batch_of(lengths).pieces, budget, shares):
        for held in share:
            assert len(held) <= budget or len(held.cu_seqlens) == 2


@settings(deadline=None)
@given(lengths=LENGTHS, budget=st.integers(1, 100), shares=st.integers(1, 4))
def test_packing_is_a_function_of_its_arguments(lengths: list[int], budget: int, shares: int) -> None:
    def shape(dealt: list[list[MicroBatch]]) -> list[list[list[int]]]:
        return [[held.flat.tolist() for held in share] for share in dealt]

    pieces = batch_of(lengths).pieces
    assert shape(pack(pieces, budget, shares)) == shape(pack(pieces, budget, shares))


def test_ten_segments_over_four_replicas_give_each_replica_work() -> None:
    dealt = pack(batch_of([30, 28, 25, 20, 18, 15, 9, 7, 5, 3]).pieces, budget=1000, shares=4)
    loads = [sum(len(held) for held in share) for share in dealt]
    assert len(dealt) == 4
    assert max(loads) - min(loads) <= 9


def test_coefficients_sum_to_the_sum_of_advantages_over_responses() -> None:
    batch = Batch.of(ragged_groups())
    packed = np.concatenate([held.coefficients for share in pack(batch.pieces, 48, 2) for held in share])
    assert packed.sum() == pytest.approx(batch.coefficients.sum(), abs=1e-6)


def test_a_segment_without_actions_costs_no_work() -> None:
    rng = np.random.default_rng(0)
    batch = Batch.of_segments([segment(rng, [(9, 0)]), segment(rng, [(1, 1)])])
    [[held]] = pack(batch.pieces, budget=100)
    assert len(held) == 2
