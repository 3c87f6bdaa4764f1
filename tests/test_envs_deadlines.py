"""Deadlines hold for every hook: what cannot be stopped is left behind, and nothing is undone under it."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from rz_agent.envs import AgentEnv, Episode, ListTaskset, Rubric, Task, calls, reward, tool
from rz_agent.envs.calls import Calls
from rz_agent.envs.factory import EnvFactory
from test_envs_api import tool_call

GRACE_S = 0.1
DEADLINE_S = 0.1
SOON_S = 5.0  # far from any deadline, on a busy machine too


@pytest.fixture(autouse=True)
def _short_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "GRACE_S", GRACE_S)


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    """What a hook that hangs waits for; opened at the end, so that no thread outlives its test."""
    Hanging.gate = threading.Event()
    yield Hanging.gate
    Hanging.gate.set()


TASK = Task(id="only", prompt="Go.", deadlines={"setup_s": DEADLINE_S, "tool_s": DEADLINE_S})


class Hanging(AgentEnv):
    """Hangs in the plain hook called `where`; writes down what it does."""

    taskset = ListTaskset([TASK], name="one")
    where = ""
    gate = threading.Event()

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.log: list[str] = []
        self.hangs, self.ended = threading.Event(), threading.Event()

    def at(self, where: str) -> None:
        if where == self.where:
            self.log.append(f"{where} hangs")
            self.hangs.set()
            self.gate.wait(2 * SOON_S)
            self.log.append(f"{where} returns")
            raise KeyError("discarded")

    def begin(self, task: Task) -> None:  # type: ignore[override]  # plain where the base is async
        self.at("begin")

    def end(self) -> None:  # type: ignore[override]
        self.log.append("end")
        self.ended.set()

    @tool
    def work(self) -> str:
        """Work."""
        self.at("work")
        return "worked"

    @reward
    def worth(self, task: Task, episode: Episode) -> float:
        self.at("worth")
        return 1.0


class Stubborn(Hanging):
    """The same, async, and deaf to its cancellation."""

    async def begin(self, task: Task) -> None:  # type: ignore[override]
        until = time.monotonic() + SOON_S  # asyncio.run waits for it where the test fails
        while self.where == "begin" and not self.gate.is_set() and time.monotonic() < until:
            try:
                await asyncio.sleep(0.01)
            except asyncio.CancelledError:
                self.log.append("begin hangs")
        if self.where == "begin":
            self.log.append("begin returns")


def hanging(base: type[Hanging], where: str) -> type[Hanging]:
    return type(base.__name__, (base,), {"where": where, "rubric": Rubric(deadline_s=DEADLINE_S)})


async def until(event: threading.Event) -> None:
    assert await asyncio.to_thread(event.wait, SOON_S)


@pytest.mark.parametrize("base", [Hanging, Stubborn])
def test_a_setup_that_cannot_be_stopped_masks_at_its_deadline_and_ends_after_it_returned(
    base: type[Hanging], gate: threading.Event, caplog: pytest.LogCaptureFixture
) -> None:
    async def body() -> None:
        env = hanging(base, "begin")()
        began = time.monotonic()
        _, info = await env.areset()
        await env.aclose()
        assert time.monotonic() - began < SOON_S
        assert info["mask"] == f"setup did not finish within {DEADLINE_S:g} s"
        assert env.log == ["begin hangs"]
        gate.set()
        await until(env.ended)
        assert env.log == ["begin hangs", "begin returns", "end"]

    asyncio.run(body())
    assert f"{base.__name__}.begin still ran" in caplog.text


def test_a_plain_tool_past_its_deadline_is_told_and_the_episode_goes_on_without_it(
    gate: threading.Event,
) -> None:
    async def body() -> None:
        env = hanging(Hanging, "work")()
        await env.areset()
        observation, *_ = await env.astep(tool_call("work"))
        assert observation["messages"][0]["content"] == f"Error: work did not finish within {DEADLINE_S:g} s"
        _, value, terminated, _, _ = await env.astep("done")
        assert (value, terminated) == (1.0, True)
        assert env.log == ["work hangs"]
        gate.set()
        await until(env.ended)
        assert env.log == ["work hangs", "work returns", "end"]

    asyncio.run(body())


def test_a_plain_reward_past_its_deadline_masks(gate: threading.Event) -> None:
    async def body() -> Any:
        env = hanging(Hanging, "worth")()
        await env.areset()
        return await env.astep("done")

    *_, info = asyncio.run(body())
    assert info["mask"] == f"InfraFailure: the rubric did not finish within {DEADLINE_S:g} s"


def test_a_cancelled_episode_does_not_wait_for_a_plain_hook_that_hangs(gate: threading.Event) -> None:
    async def body() -> list[str]:
        env = hanging(Hanging, "begin")()
        task = {"id": "t", "prompt": "Go."}
        running = asyncio.ensure_future(env.areset(options={"task": task}))
        await until(env.hangs)
        running.cancel()
        await asyncio.wait({running}, timeout=SOON_S)
        assert running.cancelled()
        return env.log

    assert asyncio.run(body()) == ["begin hangs"]


def test_no_episode_begins_on_an_environment_whose_last_hook_still_runs(gate: threading.Event) -> None:
    async def body() -> None:
        env = hanging(Hanging, "work")()
        await env.areset()
        await env.astep(tool_call("work"))
        _, info = await env.areset()
        assert info["mask"] == "a hook of the episode before, which was abandoned, still runs"
        gate.set()
        await until(env.ended)
        _, info = await env.areset()
        assert "mask" not in info

    asyncio.run(body())


def test_the_calls_that_a_run_abandoned_are_counted_and_each_hook_is_named_once(
    gate: threading.Event, caplog: pytest.LogCaptureFixture
) -> None:
    async def body() -> None:
        async with EnvFactory(hanging(Hanging, "begin"), {}) as factory:
            envs = [factory.create() for _ in range(3)]
            await asyncio.gather(*(env.areset() for env in envs))
            await asyncio.gather(*(env.aclose() for env in envs))

    asyncio.run(body())
    assert caplog.text.count("Hanging.begin still ran") == 1
    assert "abandoned while they ran: Hanging.begin 3" in caplog.text


def test_a_synchronous_environment_is_closed_after_the_step_that_was_abandoned(gate: threading.Event) -> None:
    log: list[str] = []
    closed = threading.Event()

    class Synchronous(Hanging):
        def step(self, action: str) -> Any:
            gate.wait(60)
            log.append("step returns")
            return super().step(action)

        def close(self) -> None:
            super().close()
            log.append("closed")
            closed.set()

    async def body() -> None:
        env = Synchronous()
        await env.areset()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(DEADLINE_S):
                await env.astep("done")
        await env.aclose()
        assert log == []
        gate.set()
        await until(closed)
        assert (log, env.log) == (["step returns", "closed"], ["end"])

    asyncio.run(body())


def test_a_thread_that_outlives_its_event_loop_says_nothing(
    gate: threading.Event, caplog: pytest.LogCaptureFixture
) -> None:
    returned = threading.Event()

    def late() -> None:
        gate.wait(60)
        returned.set()
        raise KeyError("discarded")

    async def body() -> Calls:
        made = Calls("Env")
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(DEADLINE_S):
                await made.call(late)
        return made

    made = asyncio.run(body())
    caplog.clear()
    gate.set()
    assert returned.wait(SOON_S)
    for stray in made.strays:
        stray.result(SOON_S)
    assert caplog.text == ""
