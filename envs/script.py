"""Agents that are not models: a script says the next turn after it has seen what was shown.

    def solve(task: Task, shown: Observation) -> Script:
        shown = yield call("python", code="6*7")                 what the environment answered
        yield f"\\\\boxed{{{text_of(shown['messages'][-1]['content'])}}}"

    agent = scripted(solve)(task)         or silent(task), replayed(actions)(task)
    text = await agent(shown)             "" where the script has nothing more to say

A script is the oracle of an environment's tests (`self_test.py`) and plays `rz-agent env run --agent
scripted`. It speaks through actions only, as a policy does. An agent lives for one episode.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Generator, Sequence
from typing import Any

from .bug import source_of
from .message import Observation
from .task import Task

Script = Generator[str, Observation, None]
"""Yields the text of each turn and is sent what the environment showed next."""
Solve = Callable[[Task, Observation], Script]
Agent = Callable[[Observation], Awaitable[str]]
NewAgent = Callable[[Task], Agent]


def call(name: str, **arguments: Any) -> str:
    """A turn that calls one tool, in Hermes JSON.

    >>> call("python", code="6*7")
    '<tool_call>{"name": "python", "arguments": {"code": "6*7"}}</tool_call>'
    """
    body = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
    return f"<tool_call>{body}</tool_call>"


def scripted(solve: Solve) -> NewAgent:
    """An agent that follows a script, and says nothing once that has ended."""

    def begin(task: Task) -> Agent:
        running: Script | None = None

        async def act(shown: Observation) -> str:
            nonlocal running
            try:
                if running is None:
                    running = solve(task, shown)
                    if not isinstance(running, Generator):
                        raise TypeError(
                            f"the script at {source_of(solve)} is no generator; yield each turn's text"
                        )
                    return _said(next(running), solve)
                return _said(running.send(shown), solve)
            except StopIteration:
                return ""

        return act

    return begin


def _said(text: object, solve: Solve) -> str:
    if not isinstance(text, str):
        raise TypeError(f"the script at {source_of(solve)} yielded {text!r}; yield each turn's text")
    return text


def replayed(actions: Sequence[str]) -> NewAgent:
    """An agent that says these turns, whatever it is shown."""

    def repeat(task: Task, shown: Observation) -> Script:
        for text in actions:  # noqa: UP028 (yield from would hand what is shown on to the tuple)
            yield text

    return scripted(repeat)


async def _say_nothing(shown: Observation) -> str:
    return ""


def silent(task: Task) -> Agent:
    """An agent that says nothing."""
    return _say_nothing
