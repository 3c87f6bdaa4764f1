"""The shipped environment is a Gymnasium environment: the checker, the wrappers and the vectors take it."""

from __future__ import annotations

import functools
import warnings
from typing import Any

import gymnasium
import pytest
import rz_agent.envs  # noqa: F401  # registers
from gymnasium.utils.env_checker import check_env
from rz_agent.envs.spaces import ActionSpace, ChatSpace

ID = "rz/PythonMath-v0"
CALL = '<tool_call>{"name":"python","arguments":{"code":"6*7"}}</tool_call>'


def make(**options: Any) -> gymnasium.Env[Any, Any]:

    return gymnasium.make(ID, **options)


def test_check_env_finds_nothing() -> None:
    env = gymnasium.make(ID)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        # The checker advises Box and Discrete; a chat is neither.
        warnings.filterwarnings("ignore", message=".*(observation|action) space.*")
        check_env(env.unwrapped, skip_render_check=True)
    env.close()


def test_the_same_seed_draws_the_same_task() -> None:
    env = make()
    first, again, other = (env.reset(seed=seed)[0] for seed in (5, 5, 6))
    env.close()
    assert first == again
    assert first != other


def test_a_time_limit_truncates() -> None:
    env = make(max_episode_steps=1)
    env.reset(seed=0)
    observation, _, terminated, truncated, _ = env.step(CALL)
    env.close()
    assert (terminated, truncated) == (False, True)
    assert observation["messages"][0]["content"] == "42"


@pytest.mark.parametrize(
    "vector",
    [gymnasium.vector.SyncVectorEnv, functools.partial(gymnasium.vector.AsyncVectorEnv, shared_memory=False)],
    ids=["sync", "async"],
)
def test_vector_environments_step_it(vector: Any) -> None:
    envs = vector([make, make])
    observations, _ = envs.reset(seed=3)
    assert all(ChatSpace().contains(observation) for observation in observations)
    observations, rewards, terminated, truncated, _ = envs.step((CALL, "\\boxed{x}"))
    envs.close()
    assert observations[0]["messages"][0]["content"] == "42"
    assert (rewards.tolist(), terminated.tolist(), truncated.tolist()) == (
        [0, 0],
        [False, True],
        [False, False],
    )


@pytest.mark.parametrize("space", [ActionSpace, ChatSpace])
def test_a_space_contains_its_samples_and_seeds_them(space: Any) -> None:
    first, second = space(seed=1), space(seed=1)
    samples = [first.sample() for _ in range(50)]
    assert samples == [second.sample() for _ in range(50)]
    assert all(first.contains(sample) for sample in samples)
    assert first == second
    assert not first.contains(3)


def test_any_unicode_text_is_an_action() -> None:
    assert all(ActionSpace().contains(text) for text in ("", "é", "中", "🙂", "a\nb"))
