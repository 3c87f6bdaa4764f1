"""A hook that raises what looks like somebody's wish to stop is a bug; a real wish to stop is obeyed."""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import re
import signal
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from types import FrameType
from typing import Any

import pytest
from rz_agent.envs import AgentEnv, Episode, ListTaskset, Task, metric, reward, tool
from rz_agent.envs.bug import blamed
from rz_agent.envs.factory import EnvFactory
from rz_agent.errors import EnvironmentBug
from test_envs_api import tool_call

STOPS = {
    "CancelledError": asyncio.CancelledError,
    "futures.CancelledError": concurrent.futures.CancelledError,
    "SystemExit": SystemExit,
    "KeyboardInterrupt": KeyboardInterrupt,
    "GeneratorExit": GeneratorExit,
}
every_stop = pytest.mark.parametrize("stop", STOPS.values(), ids=STOPS.keys())


class Stopping(AgentEnv):
    """Raises `stop` in the hook called `where`, plain or async."""

    taskset = ListTaskset([Task(id="only", prompt="Go.")], name="one")
    stop: type[BaseException] = SystemExit
    where = ""
    ended = 0

    def at(self, where: str) -> None:
        if where == self.where:
            raise self.stop

    def begin(self, task: Task) -> None:  # type: ignore[override]  # plain where the base is async
        self.at("begin")

    async def reply(self, text: str) -> None:
        self.at("reply")

    def parse(self, text: str) -> Any:
        self.at("parse")
        return super().parse(text)

    async def end(self) -> None:
        type(self).ended += 1
        self.at("end")

    @tool
    def plain(self) -> str:
        """Plain."""
        self.at("tool plain")
        return ""

    @tool
    async def waiting(self) -> str:
        """Async."""
        self.at("tool waiting")
        return ""

    @reward
    def worth(self, task: Task, episode: Episode) -> float:
        self.at("reward worth")
        return 1.0

    @metric
    async def size(self, task: Task, episode: Episode) -> float:
        self.at("metric size")
        return 1.0


class Eager(Stopping):
    async def begin(self, task: Task) -> None:  # type: ignore[override]
        self.at("begin")


class Sharing(Stopping):
    @classmethod
    @asynccontextmanager
    async def open_shared(cls, options: Any, sandboxes: Any) -> AsyncIterator[None]:
        if cls.where == "opening":
            raise cls.stop
        yield
        if cls.where == "closing":
            raise cls.stop


def stopping(base: type[AgentEnv], stop: type[BaseException], where: str) -> type[Any]:
    return type(base.__name__, (base,), {"stop": stop, "where": where, "ended": 0})


async def episode(env: AgentEnv) -> Any:
    """A tool call of each kind, then an answer, in a task that others wait for."""
    await env.areset()
    await env.astep(tool_call("plain") + tool_call("waiting"))
    return await env.astep("done")


async def outcome(coroutine: Any) -> asyncio.Task[Any]:
    running: asyncio.Task[Any] = asyncio.ensure_future(coroutine)
    await asyncio.wait({running}, timeout=20)
    return running


HOOKS = ["begin", "reply", "parse", "tool plain", "tool waiting", "reward worth", "metric size"]


@every_stop
@pytest.mark.parametrize(
    ("base", "hook"),
    [*((Stopping, hook) for hook in HOOKS), (Eager, "begin")],
    ids=lambda v: getattr(v, "__name__", v),
)
def test_a_stop_that_a_hook_raises_by_itself_is_its_bug(
    base: type[AgentEnv], hook: str, stop: type[BaseException]
) -> None:
    env_class = stopping(base, stop, hook)
    ended = asyncio.run(outcome(episode(env_class())))
    assert not ended.cancelled()
    assert isinstance(ended.exception(), EnvironmentBug)
    message = (
        rf"environment {base.__name__}, {hook}, task only: {stop.__name__}\n  at .*test_envs_stops\.py:\d+"
    )
    assert re.match(message, str(ended.exception()))
    assert env_class.ended == 1


@every_stop
def test_a_stop_that_end_raises_leaves_the_episodes_result(
    stop: type[BaseException], caplog: pytest.LogCaptureFixture
) -> None:
    ended = asyncio.run(outcome(episode(stopping(Stopping, stop, "end")())))
    assert ended.result()[1] == 1.0
    assert "Stopping.end failed" in caplog.text


@every_stop
@pytest.mark.parametrize("where", ["opening", "closing"])
def test_a_stop_while_opening_or_closing_what_is_shared_is_its_bug(
    where: str, stop: type[BaseException]
) -> None:
    async def run(alone: bool) -> None:
        env_class = stopping(Sharing, stop, where)
        if alone:
            env = env_class()
            await env.areset()
            await env.aclose()
        else:
            async with EnvFactory(env_class, {}):
                pass

    for alone in (True, False):
        ended = asyncio.run(outcome(run(alone)))
        assert not ended.cancelled()
        with pytest.raises(EnvironmentBug, match=rf"Sharing, open_shared.*: {stop.__name__}"):
            ended.result()


def test_an_episode_that_is_cancelled_is_cancelled() -> None:
    class Slow(Stopping):
        async def reply(self, text: str) -> None:
            await asyncio.sleep(3600)

    async def run() -> asyncio.Task[Any]:
        running = asyncio.ensure_future(episode(Slow()))
        await asyncio.sleep(0.05)
        running.cancel()
        await asyncio.wait({running}, timeout=20)
        return running

    assert asyncio.run(run()).cancelled()


@contextmanager
def handling(number: int, handler: Any) -> Iterator[None]:
    before = signal.signal(number, handler)
    try:
        yield
    finally:
        signal.signal(number, before)


def _terminated(number: int, frame: FrameType | None) -> None:
    sys.exit(128 + number)


def test_a_signal_that_arrives_while_a_hook_runs_is_no_bug_of_the_hook() -> None:
    class Hit(Stopping):
        async def reply(self, text: str) -> None:
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.sleep(3600)

    with handling(signal.SIGTERM, _terminated), pytest.raises(SystemExit) as stopped:
        asyncio.run(episode(Hit()))
    assert stopped.value.code == 128 + signal.SIGTERM


def test_the_first_ctrl_c_cancels_and_the_second_interrupts_also_inside_a_hook() -> None:
    class Hit(Stopping):
        times = 1

        async def reply(self, text: str) -> None:
            for _ in range(self.times):
                signal.raise_signal(signal.SIGINT)
            await asyncio.sleep(3600)

    with handling(signal.SIGINT, signal.default_int_handler):
        for times in (1, 2):
            Hit.times = times
            with pytest.raises(KeyboardInterrupt):
                asyncio.run(episode(Hit()))


def test_an_episode_that_its_loop_left_behind_ends_quietly() -> None:
    async def held() -> None:
        with blamed("Env", "reply"):
            await asyncio.sleep(3600)

    coroutine, loop = held(), asyncio.new_event_loop()
    left = loop.create_task(coroutine)
    loop.run_until_complete(asyncio.sleep(0))
    coroutine.close()
    left.cancel()
    loop.run_until_complete(asyncio.wait({left}))
    loop.close()


class SlowToEnd(AgentEnv):
    taskset = Stopping.taskset
    ended = 0

    async def end(self) -> None:
        await asyncio.sleep(0.2)
        type(self).ended += 1

    @reward
    def nothing(self) -> float:
        return 0.0


def test_a_step_that_is_cancelled_while_it_ends_its_episode_is_cancelled_and_nothing_else() -> None:
    async def body() -> None:
        env = SlowToEnd()
        await env.areset()
        stepping = asyncio.create_task(env.astep("done"))
        await asyncio.sleep(0.1)
        stepping.cancel()
        await asyncio.wait({stepping})
        assert stepping.cancelled()
        assert SlowToEnd.ended == 1

    asyncio.run(body())
