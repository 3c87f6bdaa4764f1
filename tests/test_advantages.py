"""Advantages: reward minus the mean of the group's unmasked episodes, and nothing else."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rz_agent.learner.advantages import advantages
from tiny_learner import group, segment

REWARDS = st.lists(st.floats(-100, 100, width=32), min_size=1, max_size=8)


def of(*groups_rewards: list[float], masked: tuple[int, ...] = ()) -> list[float]:
    rng = np.random.default_rng(0)
    groups = [
        group(str(g), [(r, [segment(rng, [(1, 1)])]) for r in rewards], masked=masked)
        for g, rewards in enumerate(groups_rewards)
    ]
    return list(advantages(groups).values())


def test_two_groups_are_centred_each_on_its_own_mean() -> None:
    assert of([1, 0], [5, 3]) == [0.5, -0.5, 1, -1]


def test_equal_rewards_teach_nothing() -> None:
    assert of([2, 2, 2]) == [0, 0, 0]


def test_an_episode_alone_in_its_group_has_no_baseline_and_advantage_zero() -> None:
    assert of([7]) == [0]


def test_a_masked_episode_has_no_advantage_and_does_not_move_its_groups_mean() -> None:
    assert of([1, 0, 100], masked=(2,)) == [0.5, -0.5]


def test_masking_down_to_one_episode_leaves_advantage_zero() -> None:
    assert of([1, 0], masked=(1,)) == [0]


def test_an_episode_of_several_segments_counts_once_in_the_mean() -> None:
    rng = np.random.default_rng(0)
    split = group("g", [(1.0, [segment(rng, [(1, 1)])]), (0.0, [segment(rng, [(1, 1)]) for _ in range(3)])])
    assert advantages([split]) == {"g.0": 0.5, "g.1": -0.5}


def test_an_episode_id_that_occurs_twice_is_refused() -> None:
    rng = np.random.default_rng(0)
    same = group("g", [(1.0, [segment(rng, [(1, 1)])])])
    with pytest.raises(ValueError, match=r"'g\.0' occurs twice"):
        advantages([same, same])


@settings(deadline=None)
@given(st.lists(REWARDS, min_size=1, max_size=4))
def test_groups_taken_together_or_one_by_one_give_the_same_advantages(rewards: list[list[float]]) -> None:
    assert of(*rewards) == [a for one in rewards for a in of(one)]


@settings(deadline=None)
@given(REWARDS)
def test_advantages_of_a_group_sum_to_zero(rewards: list[float]) -> None:
    assert abs(sum(of(rewards))) < 1e-9
