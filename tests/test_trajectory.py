"""The contract between rollout, journal and learner: whoever holds a segment holds a valid one."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rz_agent.errors import MissingLogprob, NonFinite
from rz_agent.trajectory import Group, Sampling, Segment, Trajectory, unmasked

NAN = math.nan
VALID: dict[str, Any] = {
    "token_ids": [7, 8, 9],
    "action_mask": [False, True, True],
    "behaviour_logprobs": [NAN, -0.5, 0.0],
    "policy_version": [-1, 3, 4],
}


def segment(**columns: Any) -> Segment:
    return Segment(**(VALID | columns))


def episode(name: str = "e", *segments: Segment, **fields: Any) -> Trajectory:
    plain: dict[str, Any] = {
        "episode_id": name,
        "group_id": "g",
        "task_id": "t",
        "segments": segments,
        "reward": 1.0,
    }
    return Trajectory(**(plain | fields))


def masked(name: str, *segments: Segment) -> Trajectory:
    return episode(name, *segments, status="masked", mask_reason="sandbox lost", reward=0.0)


def test_columns_are_stored_in_their_dtypes_and_cannot_be_written() -> None:
    made = segment()
    dtypes = {name: getattr(made, name).dtype for name in VALID}
    assert dtypes == {
        "token_ids": np.int32,
        "action_mask": np.bool_,
        "behaviour_logprobs": np.float32,
        "policy_version": np.int32,
    }
    for name in VALID:
        with pytest.raises(ValueError, match="read-only"):
            getattr(made, name)[0] = 0


def test_a_segment_does_not_change_with_the_arrays_it_was_made_from() -> None:
    ids = np.array([7, 8, 9], np.int32)
    made = segment(token_ids=ids)
    ids[0] = 1
    assert made.token_ids.tolist() == [7, 8, 9]


@pytest.mark.parametrize("column", sorted(VALID))
def test_columns_of_different_lengths_are_refused(column: str) -> None:
    with pytest.raises(ValueError, match="the columns of a segment have one entry a token"):
        segment(**{column: VALID[column][:2]})


def test_a_two_dimensional_column_is_refused() -> None:
    with pytest.raises(ValueError, match="one entry a token"):
        segment(token_ids=[[7], [8], [9]])


@pytest.mark.parametrize(
    ("columns", "error", "said"),
    [
        ({"behaviour_logprobs": [NAN, NAN, -1]}, MissingLogprob, "action token 1 has no log-probability"),
        ({"behaviour_logprobs": [NAN, -1, -math.inf]}, NonFinite, "action token 2 .* -inf"),
        ({"behaviour_logprobs": [NAN, 0.25, -1]}, NonFinite, "action token 1 .* 0.25"),
        ({"behaviour_logprobs": [0, -1, -1]}, ValueError, "token 0 is no action, so its log-probability"),
        ({"policy_version": [-1, -1, 3]}, ValueError, "action token 1 has no policy version"),
        ({"policy_version": [0, 3, 3]}, ValueError, "token 0 is no action, so its policy version"),
    ],
)
def test_an_invalid_token_is_named(columns: dict[str, Any], error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        segment(**columns)


def test_oldest_version_and_actions_are_counted_over_action_tokens() -> None:
    observation = segment(action_mask=[False] * 3, behaviour_logprobs=[NAN] * 3, policy_version=[-1] * 3)
    assert (observation.num_actions, observation.oldest_version) == (0, None)
    both = episode("e", observation, segment())
    assert (both.num_tokens, both.num_actions, both.oldest_version) == (6, 2, 3)
    assert episode("e", observation).oldest_version is None
    assert episode("e").num_tokens == 0


@given(mask=st.lists(st.booleans(), max_size=30))
def test_turns_are_the_runs_of_action_tokens(mask: list[bool]) -> None:
    made = segment(
        token_ids=range(len(mask)),
        action_mask=mask,
        behaviour_logprobs=[-1.0 if action else NAN for action in mask],
        policy_version=[0 if action else -1 for action in mask],
    )
    turns = made.turns()
    assert [i for turn in turns for i in turn] == [i for i, action in enumerate(mask) if action]
    assert all(turn.stop < later.start for turn, later in itertools.pairwise(turns))


@pytest.mark.parametrize("reward", [NAN, math.inf])
def test_a_reward_that_is_not_finite_is_refused(reward: float) -> None:
    with pytest.raises(NonFinite, match="episode e: reward"):
        episode(reward=reward)


def test_exactly_the_masked_episodes_have_a_reason() -> None:
    assert masked("e").masked
    with pytest.raises(ValueError, match="exactly the masked episodes have a reason"):
        episode(status="masked")
    with pytest.raises(ValueError, match="exactly the masked episodes have a reason"):
        episode(mask_reason="sandbox lost")


def test_a_masked_episode_counts_for_nothing_in_its_group() -> None:
    old = segment(policy_version=[-1, 0, 0])
    group = Group(
        group_id="g", task_id="t", trajectories=(masked("a", old), episode("b", segment()), episode("c"))
    )
    assert [t.episode_id for t in group.kept] == ["b", "c"]
    assert group.oldest_version == 3
    assert [t.episode_id for t in unmasked([group])] == ["b"]
    assert Group(group_id="g", task_id="t", trajectories=(masked("a", old),)).oldest_version is None


def test_an_episode_of_another_group_is_refused() -> None:
    with pytest.raises(ValueError, match="group g holds episode x of another group"):
        Group(group_id="g", task_id="t", trajectories=(episode("x", group_id="h"),))


def test_sampling_without_full_support_says_so() -> None:
    assert Sampling(temperature=0.7).full_support
    assert not Sampling(top_p=0.9).full_support
    assert not Sampling(top_k=20).full_support
