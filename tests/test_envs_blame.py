"""Whose doing a failure is: the machinery's masks an episode, the policy's own never does."""

from __future__ import annotations

from typing import Any

import pytest
from rz_agent.envs import AgentEnv, Episode, ListTaskset, Task, reward, tool
from rz_agent.sandboxes.errors import Died, FileError, SandboxError

pytestmark = pytest.mark.anyio
CALL = '<tool_call>{"name": "look", "arguments": {}}</tool_call>'


def died(blame: Any) -> Died:
    return Died("it is gone", provider="desktop", sandbox_id="s", cause="ended", blame=blame)


class LookEnv(AgentEnv):
    """Fails where it is told to."""

    taskset = ListTaskset([Task(id="t", prompt="Look.")], name="look")
    in_begin: SandboxError | None = None
    in_tool: SandboxError | None = None
    in_reward: SandboxError | None = None

    async def begin(self, task: Task) -> None:
        if self.in_begin:
            raise self.in_begin

    @tool
    async def look(self) -> str:
        """Look."""
        if self.in_tool:
            raise self.in_tool
        return "seen"

    @reward
    async def right(self, task: Task, episode: Episode) -> float:
        if self.in_reward:
            raise self.in_reward
        return 1.0


@pytest.fixture
def missing() -> FileError:
    return FileError("no such file", provider="local", sandbox_id="s")


async def test_a_tool_that_finds_no_file_answers_so_and_the_episode_goes_on(missing: FileError) -> None:
    env = LookEnv()
    env.in_tool = missing
    await env.areset(seed=0)
    observation, _, terminated, truncated, info = await env.astep(CALL)
    assert "no such file" in str(observation["messages"][0]["content"])
    assert (terminated, truncated, "mask" in info) == (False, False, False)
    _, value, terminated, _, _ = await env.astep("done")
    assert (value, terminated) == (1.0, True)


async def test_a_reward_that_finds_no_file_is_0_and_no_mask(missing: FileError) -> None:
    env = LookEnv()
    env.in_reward = missing
    await env.areset(seed=0)
    _, value, terminated, _, info = await env.astep("done")
    assert (value, terminated, "mask" in info) == (0.0, True, False)


@pytest.mark.parametrize("where", ["in_tool", "in_reward"])
async def test_a_policy_that_breaks_its_sandbox_is_worth_0_and_not_masked(where: str) -> None:
    env = LookEnv()
    setattr(env, where, died("program"))
    await env.areset(seed=0)
    _, value, terminated, _, info = await env.astep(CALL if where == "in_tool" else "done")
    assert (value, terminated, info["ended"], "mask" in info) == (0.0, True, "broken", False)
    assert "it is gone" in info["why"]
    assert info["metrics"]["broken"] == 1.0


async def test_a_sandbox_that_the_machinery_lost_masks() -> None:
    env = LookEnv()
    env.in_tool = died("infra")
    await env.areset(seed=0)
    assert "it is gone" in (await env.astep(CALL))[4]["mask"]


async def test_before_the_policy_has_acted_every_failure_is_the_machinerys(missing: FileError) -> None:
    for error in (missing, died("program")):
        env = LookEnv()
        env.in_begin = error
        assert "mask" in (await env.areset(seed=0))[1]
