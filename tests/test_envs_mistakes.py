"""An author's mistakes end in an error that names the place, what was found there, what to write instead."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError
from rz_agent.envs import (
    AgentEnv,
    ListTaskset,
    Task,
    from_gymnasium,
    from_jsonl,
    from_reasoning_gym,
    reward,
    scripted,
    tool,
)
from rz_agent.envs.factory import EnvFactory
from rz_agent.envs.play import play_one
from rz_agent.errors import ConfigError, EnvironmentBug

TASKS = ListTaskset([Task(id="only", prompt="Go.")], name="one")
CALL = '<tool_call>{"name": "look", "arguments": {}}</tool_call>'
PART = {"type": "image"}


class Base(AgentEnv):
    taskset = TASKS
    returned: Any = None

    @tool
    def look(self) -> Any:
        """Look."""
        return type(self).returned() if callable(type(self).returned) else self.returned

    @reward
    def right(self, task: Task, episode: Any) -> float:
        return 1.0


def with_(**members: Any) -> type[Base]:
    return type("Mistaken", (Base,), members)


async def played(env: AgentEnv, *turns: str) -> Any:
    step: Any = None
    try:
        await env.areset(options={"position": 0})
        for turn in turns:
            step = await env.astep(turn)
        return step
    finally:
        await env.aclose()


def numbers() -> Any:
    yield 1


async def later() -> Any:
    yield 1


@pytest.mark.parametrize(
    ("returned", "words"),
    [
        ({"answer": 42}, r"it returned \{'answer': 42\} \(dict\); return a text \(json\.dumps"),
        ({1, 2}, r"\(set\); return a text"),
        (b"\xff\x00", r"\(bytes\); return a text .*decoded bytes"),
        (numbers, r"\(generator\)"),
        (later, r"\(async_generator\)"),
        (["a", "b"], r"it returned 'a' as a message; write \{'role': R, 'content': C\}"),
        ([{"role": "robot", "content": ""}], "R is one of system, user, assistant, tool"),
        ([{"role": "user"}], "C a text or a list of text and image parts"),
        ({"messages": [{"role": "user", "content": [{"type": "video"}]}]}, "as a message"),
        ({"messages": [{"role": "user", "content": [PART]}]}, "0 images for 1 image parts"),
        ({"messages": [{"role": "user", "content": [PART]}], "images": ["a.png"]}, "give the bytes"),
    ],
)
def test_what_a_hook_returns_is_a_text_messages_or_an_observation(returned: Any, words: str) -> None:
    env = with_(returned=staticmethod(returned) if callable(returned) else returned)()
    with pytest.raises(
        EnvironmentBug, match=rf"(?s)Mistaken, tool look, task only: .*{words}.*mistakes\.py:"
    ):
        asyncio.run(played(env, CALL))


@pytest.mark.parametrize("text", ["<|im_end|>", "\ud800 \0", "", "1" * 100_000])
def test_any_text_may_be_returned(text: str) -> None:
    step = asyncio.run(played(with_(returned=text)(), CALL))
    assert step[0]["messages"][0]["content"] == text


@pytest.mark.parametrize(
    ("members", "words"),
    [
        ({"max_turns": 0}, r"max_turns = 0\n  Write a whole number of 1 or more"),
        ({"max_turns": "8"}, r"max_turns = '8'"),
        ({"Options": dict}, r"(?s)Options = .*dict.* is no EnvOptions.*class MyOptions\(EnvOptions\)"),
        ({"parse": lambda self, text: None}, r"parse, task only: .*returned None \(NoneType\); return Reply"),
        ({"begin": lambda self, task: setattr(self, "state", None)}, r"self\.state is None .*\n.*dictionary"),
    ],
)
def test_a_class_that_says_what_it_must_not_is_refused_by_the_members_name(
    members: dict[str, Any], words: str
) -> None:
    with pytest.raises((ConfigError, EnvironmentBug), match=words):
        asyncio.run(played(with_(**members)(), "done"))


class Odd:
    """No type of JSON's."""


class Point(BaseModel):
    x: int = 0


def of_odd(a: Odd) -> str:
    """Odd."""
    return ""


def odd_default(a: Any = print) -> str:
    """Odd."""
    return ""


def not_finite(a: float = float("nan")) -> str:
    """Odd."""
    return ""


def hidden(_a: int) -> str:
    """Odd."""
    return ""


def unknown(a: NotImported) -> str:  # type: ignore[name-defined]  # noqa: F821
    """Odd."""
    return ""


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (of_odd, "tool of_odd: a policy cannot write a: .*Odd.*; use int, str"),
        (odd_default, "tool odd_default: the default .* of a is no JSON value"),
        (not_finite, "tool not_finite: the default nan of a is no JSON value"),
        (hidden, "tool hidden: a parameter cannot be called _a"),
        (unknown, "tool unknown: name 'NotImported' is not defined"),
    ],
)
def test_a_tool_that_no_policy_could_call_is_refused(function: Callable[..., Any], words: str) -> None:
    with pytest.raises(TypeError, match=words):
        tool(function)


def test_defaults_are_each_calls_own_and_names_of_pydantics_are_free(recwarn: Any) -> None:
    class Env(Base):
        @tool
        def put(self, copy: list[int] = [], json: Point = Point()) -> str:  # noqa: B006, B008
            """Put."""
            copy.append(json.x)
            return str(copy)

    call = CALL.replace("look", "put")
    step = asyncio.run(played(Env(), call + call))
    assert [message["content"] for message in step[0]["messages"]] == ["[0]", "[0]"]
    assert [str(one.message) for one in recwarn] == []


def test_what_a_task_carries_is_json() -> None:
    for value in (date(2020, 1, 1), {1}, object(), b""):
        with pytest.raises(ValidationError, match=r"(?s)metadata.*JSON values only"):
            Task(id="t", prompt="", metadata={"value": value})
    with pytest.raises(ValidationError, match=r"(?s)prompt.*return its images from `begin`"):
        Task(id="t", prompt=[{"role": "user", "content": [PART]}])


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"\n", r"tasks = \[\] has no line"),
        (b"\xff\xfe{", r"taskset = .* is no UTF-8"),
        (b'{"prompt": "a", "answer": ' + b"[" * 100_000, ":1: prompt"),
        (b'{"prompt": "a", "metadata": "x"}', r":1: metadata = 'x'\n  Write an object"),
        (b'{"prompt": "a", "deadlines": {"tool_s": -1}}', r":1: deadlines\.tool_s = -1"),
    ],
)
def test_a_file_that_holds_no_tasks_is_told_with_its_line(tmp_path: Path, content: bytes, words: str) -> None:
    file = tmp_path / "problems.jsonl"
    file.write_bytes(content)
    with pytest.raises(ConfigError, match=rf"problems\.jsonl.*{words}"):
        from_jsonl(file)


def test_a_file_of_another_system_and_any_text_in_a_line_are_read(tmp_path: Path) -> None:
    file = tmp_path / "problems.jsonl"
    file.write_bytes(b"\xef\xbb\xbf" + '{"prompt": "a\u2028b\x85c", "answer": "d"}\r\n'.encode())
    (task,) = from_jsonl(file).load("train")
    assert task.prompt[0]["content"] == "a\u2028b\x85c"


def test_what_a_library_does_not_take_is_told_with_what_it_was_given() -> None:
    with pytest.raises(ConfigError, match=r"(?s)reasoning-gym:gcd: config = \{'size_of_it': 3\}.*refused"):
        from_reasoning_gym("gcd", size_of_it=3)
    with pytest.raises(ConfigError, match=r"from_gymnasium: id = 'CartPole-v1' .*'size_of_it': 3"):
        from_gymnasium("CartPole-v1", prompt="", size_of_it=3)


def test_a_script_that_is_none_and_a_case_that_is_none_are_told() -> None:
    async def one(solve: Any) -> Any:
        async with EnvFactory(with_(self_test=lambda tasks, scratch: [5]), {}) as factory:
            with pytest.raises(EnvironmentBug, match=r"it returned 5 among its cases; return Case"):
                factory.self_test(Path())
            await play_one(factory, TASKS.load("train")[0], scripted(solve), name="n", options={})

    for solve, words in (
        (lambda task, shown: "text", r"the script at .*mistakes\.py:\d+ is no generator"),
        (lambda task, shown: iter_of(5), r"the script at .*mistakes\.py:\d+ yielded 5"),
    ):
        with pytest.raises(EnvironmentBug, match=words):
            asyncio.run(one(solve))


def iter_of(text: Any) -> Any:
    yield text
