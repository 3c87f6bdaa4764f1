"""Waiting for a sandbox that others hold: no deadline runs meanwhile, and the wait itself has an end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
from rz_agent.envs import AgentEnv, Episode, ListTaskset, Task, reward, tool
from rz_agent.envs.task import Deadlines
from rz_agent.rollout.renderer import Renderer
from rz_agent.sandboxes import keeper as keeping
from rz_agent.sandboxes.deadline import deadline, waiting
from rz_agent.sandboxes.errors import QuotaExceeded
from rz_agent.sandboxes.keeper import Keeper
from rz_agent.sandboxes.ledger import Ledger
from rz_agent.sandboxes.limiter import Limiter, Slots
from rz_agent.sandboxes.local.provider import LocalProvider
from rz_agent.sandboxes.pool import SandboxPool
from rz_agent.sandboxes.provider import Capabilities
from rz_agent.sandboxes.sandbox import Sandbox
from rz_agent.sandboxes.spec import SandboxSpec
from rz_agent.sandboxes.tables import LocalTable
from rz_agent.sandboxes.warm_pool import WarmPool
from test_episode import LIMITS, Scripted, play
from test_episode import qwen3 as qwen3
from test_renderer import CALL, say

pytestmark = pytest.mark.anyio
SPEC = SandboxSpec()


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@contextlib.asynccontextmanager
async def keeper_of_one(folder: Path, make: type[LocalProvider] = LocalProvider) -> AsyncIterator[Keeper]:
    """A keeper that holds at most one sandbox."""
    limiter = Limiter("local", max_live=1, max_starting=1, creates_per_s=None, folder=folder / "limits")
    ledger = Ledger(folder / "ledger")
    provider = make(LocalTable(isolation="none"), ledger)
    async with Keeper(provider, limiter=limiter, ledger=ledger) as keeper:
        yield keeper


def give_back(sandbox: Sandbox, after_s: float) -> asyncio.Task[None]:
    async def later() -> None:
        await asyncio.sleep(after_s)
        await sandbox.close()

    return asyncio.create_task(later())


# -- the clock --------------------------------------------------------------------------------------------


async def test_a_deadline_passes_as_a_plain_one_does() -> None:
    with pytest.raises(TimeoutError):
        async with deadline(0.05) as clock:
            await asyncio.sleep(5)
    assert clock.expired()
    async with deadline(5) as clock:
        await asyncio.sleep(0)
    assert not clock.expired()


async def wait_for(seconds: float) -> None:
    with waiting():
        await asyncio.sleep(seconds)


async def test_what_is_left_of_a_deadline_is_left_after_a_wait_in_a_task_of_its_own() -> None:
    async with deadline(0.5) as clock:
        await asyncio.create_task(wait_for(0.7))
        await asyncio.sleep(0.05)
    assert 0.6 < clock.waited_s < 5
    with pytest.raises(TimeoutError):
        async with deadline(0.1):
            await asyncio.gather(wait_for(0.2), asyncio.sleep(5))


async def test_a_deadline_of_two_tasks_stands_still_until_both_have_waited() -> None:
    async with deadline(0.3) as clock:
        await asyncio.gather(wait_for(0.35), wait_for(0.7))
    assert clock.waited_s > 0.6


async def test_no_deadline_stands_still_for_the_warm_sandboxes_that_its_episode_set_off() -> None:
    async def make(spec: SandboxSpec) -> None:
        await wait_for(5)

    async def hang() -> None:
        pool.refill(SPEC)
        await asyncio.sleep(5)

    pool = WarmPool(1, make)
    async with asyncio.timeout(2):
        with pytest.raises(TimeoutError):
            async with deadline(0.1):
                await hang()
    await pool.aclose()


# -- the slots --------------------------------------------------------------------------------------------


class Apart(LocalProvider):
    """Says that its sandboxes can be shared, so that episodes wait for one that is made for another."""

    def capabilities(self) -> Capabilities:
        return replace(super().capabilities(), isolates_sessions=True)


async def test_a_shared_sandbox_that_waits_for_a_slot_runs_nobodys_deadline_down(tmp_path: Path) -> None:
    async def acquire(pool: SandboxPool) -> str:
        async with deadline(2.0):
            return (await pool.acquire()).id

    async with keeper_of_one(tmp_path, Apart) as keeper:
        closing = give_back(await keeper.create(SPEC), 2.2)
        pool = SandboxPool(keeper, SPEC, size=1)
        one, other = await asyncio.gather(acquire(pool), acquire(pool))
        assert one == other
        await closing


async def test_nobody_waits_for_ever_for_a_slot_that_is_not_given_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(keeping, "SAY_S", 0.2)
    async with keeper_of_one(tmp_path) as keeper:
        await keeper.create(SPEC)
        with caplog.at_level(logging.WARNING), pytest.raises(QuotaExceeded) as caught:
            await keeper.create(replace(SPEC, lifetime_s=0.5))
    assert (caught.value.blame, caught.value.retryable) == ("infra", True)
    assert "Raise sandbox.max_live" in str(caught.value)
    assert "rz-agent sandbox ps" in caplog.text


async def test_all_who_wait_give_up_together_once_none_was_freed_for_their_patience(tmp_path: Path) -> None:
    slots = Slots(tmp_path, 1)
    slots.take_free()
    async with asyncio.timeout(1.5):
        answers = await asyncio.gather(*(slots.take(0.3) for _ in range(6)), return_exceptions=True)
    assert [type(answer) for answer in answers] == [TimeoutError] * 6


async def test_a_slot_that_goes_to_another_gives_who_waits_all_their_patience_again(tmp_path: Path) -> None:
    slots = Slots(tmp_path, 1)
    held = slots.take_free()
    assert held is not None
    first, second = (asyncio.create_task(slots.take(0.8)) for _ in range(2))
    await asyncio.sleep(0.5)
    held.release()
    await first
    await asyncio.sleep(0.5)
    assert not second.done()
    with pytest.raises(TimeoutError):
        await second


class Crowded(AgentEnv):
    """Its one tool wants a sandbox; the only one is held by somebody else for longer than all deadlines."""

    taskset = ListTaskset(
        [Task(id="only", prompt="Go.", deadlines=Deadlines(tool_s=2, episode_s=2))], name="one"
    )
    folder: Path
    held_s = 2.5

    async def begin(self, task: Task) -> None:
        self.stack = contextlib.AsyncExitStack()
        self.pool = SandboxPool(
            await self.stack.enter_async_context(keeper_of_one(self.folder)), SPEC, size=1
        )
        self.closing = give_back(await self.pool.lease(), self.held_s)

    async def end(self) -> None:
        await self.closing
        await self.stack.aclose()

    @tool
    async def python(self, code: str) -> str:
        """Run it."""
        async with await self.pool.lease() as box:
            self.state["said"] = (await box.exec(["echo", "5"])).text
        return "5"

    @reward
    def right(self, task: Task, episode: Episode) -> float:
        return float(episode.state.get("said") == "5\n")


def test_an_episode_that_waits_for_a_sandbox_is_neither_masked_nor_cut_short(
    qwen3: Renderer, tmp_path: Path
) -> None:
    Crowded.folder = tmp_path
    limits = replace(LIMITS, step_deadline_s=2, episode_deadline_s=2)
    played = play(Scripted(say(qwen3, CALL), say(qwen3, "done")), qwen3, limits, env_class=Crowded)
    assert (played.status, played.reward, played.mask_reason) == ("ok", 1.0, "")
    assert played.metrics["episode/seconds"] > Crowded.held_s
    assert played.metrics["rollout/sandbox_waited_s"] == pytest.approx(Crowded.held_s, abs=1)
