"""What an author may rely on: tasks in order, tools from signatures, rubrics, episodes that end."""

from __future__ import annotations

import asyncio
import json
import re
import sys
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Literal

import pytest
from gymnasium.error import ResetNeeded
from hypothesis import given, settings
from hypothesis import strategies as st
from rz_agent.envs import (
    AgentEnv,
    Episode,
    InfraFailure,
    ListTaskset,
    Rubric,
    Task,
    ToolError,
    from_jsonl,
    from_reasoning_gym,
    load,
    metric,
    reward,
    tool,
)
from rz_agent.envs.calls import Calls
from rz_agent.envs.factory import EnvFactory
from rz_agent.envs.tool import tool_spec
from rz_agent.errors import ConfigError, EnvironmentBug, NonFinite

ONE_TASK = ListTaskset([Task(id="only", prompt="Go.", answer="done")], name="one")


def tool_call(name: str, **arguments: object) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


class Base(AgentEnv):
    taskset = ONE_TASK

    @reward
    def right(self, task: Task, episode: Episode) -> float:
        return float(episode.answer == task.answer)


async def first_step(env: AgentEnv, text: str) -> Any:
    await env.areset()
    try:
        return await env.astep(text)
    finally:
        await env.aclose()


# Tasks --------------------------------------------------------------------------------------------------


@settings(max_examples=30, deadline=None)
@given(size=st.integers(1, 20), seed=st.integers(0, 5), start=st.integers(0, 60))
def test_an_order_resumed_at_a_position_goes_on_as_if_never_stopped(size: int, seed: int, start: int) -> None:
    tasks = ListTaskset([Task(id=str(i), prompt="") for i in range(size)], name="t")
    whole = [tasks.order(seed)[p].id for p in range(start + 10)]
    resumed = tasks.order(seed)
    assert [resumed[p].id for p in range(start, start + 10)] == whole[start:]


@settings(max_examples=30, deadline=None)
@given(size=st.integers(1, 20), epoch=st.integers(0, 5))
def test_every_task_is_met_once_an_epoch(size: int, epoch: int) -> None:
    order = ListTaskset([Task(id=str(i), prompt="") for i in range(size)], name="t").order(seed=1)
    met = sorted(int(order[p].id) for p in range(epoch * size, (epoch + 1) * size))
    assert met == list(range(size))


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    tasks = ListTaskset([Task(id=str(i), prompt="") for i in range(30)], name="t")
    orders = [[tasks.order(s)[30 * e + i].id for i in range(30)] for s in (0, 1) for e in (0, 1)]
    assert len({tuple(order) for order in orders}) == 4


def test_a_jsonl_file_fills_tasks_and_keeps_the_other_columns(tmp_path: Path) -> None:
    file = tmp_path / "problems.jsonl"
    rows = [
        {"prompt": "2+2?", "answer": 4, "level": "easy"},
        {
            "id": 7,
            "split": "test",
            "prompt": [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}],
        },
    ]
    file.write_text("\n".join(map(json.dumps, rows)))
    tasks = from_jsonl(file)
    (easy,), (other,) = tasks.load("train"), tasks.load("test")
    assert (easy.id, easy.answer, easy.metadata) == ("problems:1", "4", {"level": "easy"})
    assert (other.id, other.answer, len(other.prompt)) == ("7", None, 2)
    with pytest.raises(ConfigError, match="train, test"):
        tasks.load("validation")


@pytest.mark.parametrize("line", ["{", "[]", '{"answer": "4"}', '{"prompt": 3, "answer": "4"}'])
def test_a_bad_line_of_a_file_is_named(tmp_path: Path, line: str) -> None:
    file = tmp_path / "problems.jsonl"
    file.write_text('{"prompt": "a", "answer": "b"}\n' + line)
    with pytest.raises(ConfigError, match=r"problems.jsonl:2: prompt"):
        from_jsonl(file)


def test_reasoning_gym_entries_depend_on_seed_and_position_only() -> None:
    first, second = (from_reasoning_gym("gcd").order(seed=4) for _ in range(2))
    assert first[9] == second[9]
    assert first[9] != first[8]
    assert from_reasoning_gym("gcd").load("test")[3] == from_reasoning_gym("gcd").order(77, "test")[3]
    with pytest.raises(ConfigError, match="Did you mean 'countdown'"):
        from_reasoning_gym("countdwon")


def test_a_plain_list_is_no_taskset_and_ids_are_unique() -> None:
    with pytest.raises(ConfigError, match="ListTaskset"):
        Base(taskset=[Task(id="a", prompt="")])  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="id = 'a' is met twice"):
        ListTaskset([Task(id="a", prompt=""), Task(id="a", prompt="")], name="t")


# Tools --------------------------------------------------------------------------------------------------


@tool
def move(x: int, how: Literal["fast", "slow"] = "slow", tags: list[str] | None = None) -> str:
    """Move the thing.

    Args:
        x: where to
        how (str): at which speed
    """
    return f"{x}/{how}/{tags}"


def test_a_signature_is_the_schema() -> None:
    function = tool_spec(move).openai()["function"]
    assert (function["name"], function["description"]) == ("move", "Move the thing.")
    properties = function["parameters"]["properties"]
    assert properties["x"] == {"type": "integer", "description": "where to"}
    assert properties["how"]["enum"] == ["fast", "slow"]
    assert properties["how"]["description"] == "at which speed"
    assert function["parameters"]["required"] == ["x"]


@pytest.mark.parametrize(
    "given", [{}, {"x": "far"}, {"x": 1, "y": 2}, {"x": 1, "how": "never"}, {"x": 1, "tags": [1]}]
)
def test_arguments_that_do_not_fit_are_told_to_the_policy(given: dict[str, object]) -> None:
    with pytest.raises(ToolError, match="the arguments of move do not fit"):
        tool_spec(move).arguments(given)


def test_a_tool_the_policy_could_not_understand_is_refused() -> None:
    with pytest.raises(TypeError, match="no docstring"):
        tool(lambda: "")
    with pytest.raises(TypeError, match="x has no type"):

        @tool
        def untyped(x):  # type: ignore[no-untyped-def]
            """Untyped."""


# Rubrics ------------------------------------------------------------------------------------------------


def score(*functions: Any, deadline_s: float = 5.0) -> Any:
    rubric = Rubric(*functions, deadline_s=deadline_s)
    return asyncio.run(rubric.score(ONE_TASK.load("train")[0], Episode(messages=(), answer="done")))


def test_rewards_are_weighted_and_metrics_are_not() -> None:
    @reward(weight=2.0)
    def half(task: Task, episode: Episode) -> float:
        return 0.5

    @reward(weight=-0.25)
    async def penalty(task: Task, episode: Episode) -> float:
        return 1.0

    @metric
    def length(task: Task, episode: Episode) -> int:
        return len(episode.answer)

    result = score(half, penalty, length)
    assert (result.reward, result.rewards, result.metrics) == (
        0.75,
        {"half": 0.5, "penalty": 1.0},
        {"length": 4.0},
    )


def test_a_rubric_that_misses_its_deadline_is_an_infrastructure_failure() -> None:
    @reward
    async def slow(task: Task, episode: Episode) -> float:
        await asyncio.sleep(60)
        return 1.0

    with pytest.raises(InfraFailure, match=r"within 0.05 s"):
        score(slow, deadline_s=0.05)


def test_a_reward_that_is_not_finite_is_an_error_with_its_name() -> None:
    @reward
    def broken(task: Task, episode: Episode) -> float:
        return float("nan")

    with pytest.raises(NonFinite, match=r"reward broken, task only: it returned nan\n.*test_envs_api\.py"):
        score(broken)


@pytest.mark.parametrize("wrong", [lambda task, episode: None, lambda task: 1.0, lambda task, episode: 1 / 0])
def test_a_broken_reward_is_told_with_its_task_and_line(wrong: Any) -> None:
    with pytest.raises(EnvironmentBug, match=r"reward <lambda>, task only: .*\n  at .*test_envs_api\.py:\d+"):
        score(reward(wrong))


# Episodes -----------------------------------------------------------------------------------------------


class Toolbox(Base):
    tools = (move,)
    max_turns = 3

    @tool
    async def fail(self) -> str:
        """Fail."""
        raise ToolError("not today")

    @tool
    def crash(self) -> str:
        """Crash."""
        raise KeyError("bug")

    @tool
    def lose(self) -> str:
        """Lose the place."""
        raise InfraFailure("no sandbox")

    @tool
    async def submit(self, text: str) -> str:
        """Hand it in."""
        self.state["text"] = text
        self.finish()
        return "thanks"

    @metric
    def submitted(self, task: Task, episode: Episode) -> float:
        return len(episode.state.get("text", ""))


@pytest.mark.parametrize(
    ("text", "answers"),
    [
        (tool_call("move", x=1), ["1/slow/None"]),
        (tool_call("move", x="far"), ["Error: the arguments of move do not fit: x:"]),
        (tool_call("moove", x=1), ["Error: there is no tool 'moove'. Did you mean 'move'?"]),
        (tool_call("fail"), ["Error: not today"]),
        (
            "<tool_call>{</tool_call>" + tool_call("move", x=2),
            ["Error: the tool call was not understood", "2/slow"],
        ),
    ],
)
def test_whatever_the_policy_calls_is_answered_and_the_episode_goes_on(text: str, answers: list[str]) -> None:
    observation, value, terminated, truncated, info = asyncio.run(first_step(Toolbox(), text))
    shown = [message["content"] for message in observation["messages"]]
    assert [content.startswith(answer) for content, answer in zip(shown, answers, strict=True)] == [
        True
    ] * len(answers)
    assert {message["role"] for message in observation["messages"]} == {"tool"}
    assert (value, terminated, truncated, "mask" in info) == (0.0, False, False, False)


def test_a_turn_without_a_call_ends_the_episode_with_its_reward() -> None:
    _, value, terminated, truncated, info = asyncio.run(first_step(Toolbox(), "<think>hm</think> done "))
    assert (value, terminated, truncated, info["ended"]) == (1.0, True, False, "answered")
    assert info["metrics"] == {"turns": 1.0, "tool_calls": 0.0, "malformed_calls": 0.0, "submitted": 0.0}


def test_a_tool_can_end_the_episode_and_leave_state_for_the_rubric() -> None:
    text = tool_call("submit", text="abc") + tool_call("move", x=1)
    observation, _, terminated, _, info = asyncio.run(first_step(Toolbox(), text))
    assert [message["content"] for message in observation["messages"]] == ["thanks"]
    assert (terminated, info["ended"], info["metrics"]["submitted"]) == (True, "finished", 3.0)


def test_turns_run_out_and_a_finished_episode_must_be_reset() -> None:
    async def body() -> None:
        env = Toolbox()
        await env.areset()
        steps = [await env.astep(tool_call("move", x=i)) for i in range(3)]
        assert [step[3] for step in steps] == [False, False, True]
        assert steps[-1][4]["ended"] == "turns"
        with pytest.raises(ResetNeeded):
            await env.astep("done")

    asyncio.run(body())


def test_a_bug_in_a_tool_is_told_with_its_task_and_line_and_is_no_way_to_mask_an_episode() -> None:
    with pytest.raises(
        EnvironmentBug, match=r"Toolbox, tool crash, task only: KeyError: 'bug'\n  at .*api\.py:\d+"
    ):
        asyncio.run(first_step(Toolbox(), tool_call("crash")))


def test_infrastructure_that_fails_in_a_tool_masks_the_episode_and_is_no_reward_of_zero() -> None:
    _, value, terminated, truncated, info = asyncio.run(first_step(Toolbox(), tool_call("lose")))
    assert (value, terminated, truncated) == (0.0, False, True)
    assert info["mask"] == "InfraFailure: no sandbox"
    assert "metrics" not in info


def test_an_episode_ended_from_outside_is_scored_as_it_stands() -> None:
    async def body() -> Any:
        env = Toolbox()
        await env.areset()
        await env.astep(tool_call("move", x=1))
        return await env.atruncate("tokens")

    _, value, terminated, truncated, info = asyncio.run(body())
    assert (value, terminated, truncated, info["ended"], info["turn"]) == (0.0, False, True, "tokens", 1)


class Talk(Base):
    def reply(self, text: str) -> str | None:  # type: ignore[override]  # plain where the base is async
        return None if text == "done" else f"you said {text}"


class Buggy(Base):
    async def begin(self, task: Task) -> None:
        if task.id == "bad":
            raise KeyError("setup")

    async def reply(self, text: str) -> str | None:
        raise ValueError("oops")


def test_a_bug_in_a_hook_names_environment_hook_task_and_line() -> None:
    with pytest.raises(
        EnvironmentBug, match=r"Buggy, reply, task only: ValueError: oops\n  at .*api\.py:\d+"
    ):
        asyncio.run(first_step(Buggy(), "hi"))
    with pytest.raises(EnvironmentBug, match=r"Buggy, begin, task bad: KeyError"):
        asyncio.run(Buggy().areset(options={"task": {"id": "bad", "prompt": ""}}))


class Clumsy(Base):
    @classmethod
    @asynccontextmanager
    async def open_shared(cls, options: Any, sandboxes: Any) -> AsyncIterator[None]:
        raise ConnectionError("no database")
        yield


class Misread(Base):
    def parse(self, text: str) -> Any:
        return text.no_such_attribute  # type: ignore[attr-defined]


def test_a_bug_before_and_between_the_hooks_is_blamed_like_one_in_them() -> None:
    async def opened() -> None:
        async with EnvFactory(Clumsy, {}):
            pass

    with pytest.raises(EnvironmentBug, match=r"Clumsy, open_shared: ConnectionError: .*\n  at .*api\.py:\d+"):
        asyncio.run(opened())
    with pytest.raises(EnvironmentBug, match=r"Misread, parse, task only: AttributeError"):
        asyncio.run(first_step(Misread(), "hi"))


def test_an_environment_can_talk_back_over_several_turns() -> None:
    async def body() -> list[Any]:
        env = Talk()
        await env.areset()
        return [await env.astep("hello"), await env.astep("done")]

    first, last = asyncio.run(body())
    assert first[0]["messages"] == ({"role": "user", "content": "you said hello"},)
    assert (first[2], last[1], last[2]) == (False, 1.0, True)


class Guarded(Base):
    """Counts what begins and ends; hangs where told to."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.log: list[str] = []

    async def begin(self, task: Task) -> None:
        self.log.append("begin")
        if "setup" in task.metadata:
            raise InfraFailure("no place to work")

    async def end(self) -> None:
        await asyncio.sleep(0.01)
        self.log.append("end")

    @tool
    async def hang(self) -> str:
        """Hang."""
        await asyncio.sleep(3600)
        return ""


def test_a_cancelled_step_leaves_nothing_behind() -> None:
    async def body() -> list[str]:
        env = Guarded()
        await env.areset()
        step = asyncio.ensure_future(env.astep(tool_call("hang")))
        await asyncio.sleep(0.02)
        step.cancel()
        await asyncio.gather(step, return_exceptions=True)
        assert step.cancelled()
        assert asyncio.all_tasks() == {asyncio.current_task()}
        return env.log

    assert asyncio.run(body()) == ["begin", "end"]


def test_a_setup_that_fails_is_masked_and_undone() -> None:
    async def body() -> Any:
        env = Guarded()
        task = Task(id="t", prompt="Go.", metadata={"setup": "fails"})
        observation, info = await env.areset(options={"task": task})
        return observation, info, env.log

    observation, info, log = asyncio.run(body())
    assert info["mask"] == "InfraFailure: no place to work"
    assert observation["messages"][0]["content"] == "Go."
    assert log == ["begin", "end"]


def test_a_tool_past_its_deadline_is_told_and_the_episode_goes_on() -> None:
    async def body() -> Any:
        env = Guarded()
        await env.areset(options={"task": {"id": "t", "prompt": "Go.", "deadlines": {"tool_s": 0.05}}})
        return await env.astep(tool_call("hang"))

    observation, _, terminated, truncated, _ = asyncio.run(body())
    assert "hang did not finish within 0.05 s" in observation["messages"][0]["content"]
    assert (terminated, truncated) == (False, False)


class Synchronous(Base):
    """Overrides the synchronous half only."""

    def step(self, action: str) -> Any:
        time.sleep(0.2)
        return super().step(action)


def test_a_synchronous_environment_gets_async_twins_that_block_nobody() -> None:
    async def body() -> tuple[float, list[float]]:
        envs = [Synchronous() for _ in range(20)]
        for env in envs:
            await env.areset()
        began = time.monotonic()
        steps = await asyncio.gather(*(env.astep("done") for env in envs))
        seconds = time.monotonic() - began
        for env in envs:
            await env.aclose()
        return seconds, [step[1] for step in steps]

    seconds, rewards = asyncio.run(body())
    assert rewards == [1.0] * 20
    assert seconds < 20 * 0.2


def test_a_cancelled_plain_function_that_soon_returns_is_waited_for() -> None:
    finished = threading.Event()

    def plain() -> None:
        time.sleep(0.2)
        finished.set()

    async def body() -> None:
        running = asyncio.ensure_future(Calls("Env").call(plain))
        await asyncio.sleep(0.02)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        assert running.cancelled()
        assert finished.is_set()

    asyncio.run(body())


@pytest.mark.parametrize("raised", [StopIteration, SystemExit, KeyboardInterrupt])
def test_what_would_stop_the_event_loop_is_an_error_of_the_plain_function(
    raised: type[BaseException],
) -> None:
    def plain() -> None:
        raise raised("enough")

    async def body() -> None:
        async with asyncio.timeout(10):
            with pytest.raises(RuntimeError, match=f"{raised.__name__}: enough") as caught:
                await Calls("Env").call(plain)
        assert isinstance(caught.value.__cause__, raised)

    asyncio.run(body())


@settings(max_examples=30, deadline=None)
@given(st.text() | st.sampled_from([tool_call("move", x=1), "<tool_call>", "<think>"]))
def test_any_text_is_a_legal_action(text: str) -> None:
    env = Toolbox()
    env.reset(seed=0)
    observation, value, terminated, truncated, _ = env.step(text)
    assert env.observation_space.contains(observation)
    assert (type(value), type(terminated), type(truncated)) == (float, bool, bool)
    env.close()


def test_the_example_in_the_documentation_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (Path(__file__).parents[1] / "docs/environments.md").read_text()
    example = re.search(r"```python\n(# guess.py.*?)```", page, re.S)
    assert example is not None
    (tmp_path / "guess.py").write_text(example[1])
    monkeypatch.syspath_prepend(str(tmp_path))

    async def play() -> Any:
        async with load("guess:GuessEnv", hints=True) as factory:
            task = factory.taskset.order(seed=0)[0]
            assert task.answer is not None
            env = factory.create()
            await env.areset(options={"task": task})
            low = await env.astep(tool_call("guess", number=0))
            right = await env.astep(tool_call("guess", number=int(task.answer)))
            await env.aclose()
            return low, right

    low, right = asyncio.run(play())
    sys.modules.pop("guess", None)
    assert low[0]["messages"][0]["content"] == "higher"
    assert (right[1], right[2], right[4]["metrics"]["guesses"]) == (1.0, True, 2.0)
