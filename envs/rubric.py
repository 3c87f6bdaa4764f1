"""What an episode was worth: weighted rewards and unweighted metrics, within a deadline of their own.

    Episode -> Rubric.score(task, episode) -> Score

Invariants: a rubric sees the record of an episode, never the place where the policy's code ran; a reward that
is not finite, and a function that raises, is an error with the function's name and not a 0; a deadline that
passes, and a failure of the infrastructure, masks the episode.
Waits: the episode for its score; all functions of a rubric run side by side.
"""

from __future__ import annotations

import asyncio
import logging
import math
import reprlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar, overload

from ..errors import NonFinite, ungrouped
from ..sandboxes.deadline import deadline
from ..sandboxes.errors import FileError
from .bug import blamed, source_of, told
from .calls import Calls
from .failure import InfraFailure
from .message import Message
from .task import Task

Function = TypeVar("Function", bound=Callable[..., Any])
log = logging.getLogger(__name__)
Ended = Literal["answered", "finished", "turns", "time", "tokens"]
MARK = "__rz_weight__"


@dataclass(frozen=True, slots=True, kw_only=True)
class Episode:
    """What a rubric may look at.

    messages   the whole conversation, prompt included
    answer     the last assistant turn without its thought and its tool calls
    state      what the environment kept for scoring (a patch, the last guess)
    turns      actions taken; calls: well-formed tool calls; malformed: the others
    ended      "answered": a turn without a tool call; "finished": the environment said so; else the limit
    """

    messages: tuple[Message, ...]
    answer: str = ""
    state: Mapping[str, Any] = field(default_factory=dict)
    turns: int = 0
    calls: int = 0
    malformed: int = 0
    ended: Ended = "answered"


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """reward = sum of weight * rewards[name]; metrics carry no weight."""

    reward: float
    rewards: Mapping[str, float]
    metrics: Mapping[str, float]


@overload
def reward(function: Function, /) -> Function: ...
@overload
def reward(*, weight: float) -> Callable[[Function], Function]: ...


def reward(function: Function | None = None, /, *, weight: float = 1.0) -> Any:
    """Mark `(task, episode) -> float`, plain or async, as a reward; a method of an environment likewise."""
    if not math.isfinite(weight):
        raise ValueError(f"weight {weight} of a reward function is not finite")

    def mark(marked: Function) -> Function:
        setattr(marked, MARK, weight)
        return marked

    return mark if function is None else mark(function)


def metric(function: Function) -> Function:
    """Mark `(task, episode) -> float` as a figure that is reported and never rewarded."""
    setattr(function, MARK, None)
    return function


class Rubric:
    """Reward functions and metrics, with one deadline for all of them.

    >>> @reward(weight=2.0)
    ... async def right(task, episode): return float(episode.answer == task.answer)
    >>> task = Task(id="t", prompt="2+2?", answer="4")
    >>> asyncio.run(Rubric(right).score(task, Episode(messages=(), answer="4"))).reward
    2.0
    """

    def __init__(self, *functions: Callable[..., Any], deadline_s: float = 60.0) -> None:
        self.functions, self.deadline_s = functions, deadline_s
        names = [function.__name__ for function in functions]
        if unmarked := [f.__name__ for f in functions if not hasattr(f, MARK)]:
            raise TypeError(f"{unmarked[0]} is no reward and no metric; decorate it with @reward or @metric")
        if twice := {name for name in names if names.count(name) > 1}:
            raise ValueError(f"two functions of one rubric are called {min(twice)}; rename one")

    @property
    def rewarded(self) -> bool:
        """Whether any function carries a weight."""
        return any(getattr(function, MARK) is not None for function in self.functions)

    async def score(
        self, task: Task, episode: Episode, *, owner: str = "(none)", calls: Calls | None = None
    ) -> Score:
        """Run every function. Raises `InfraFailure` past the deadline, `NonFinite` or `EnvironmentBug` naming
        the function that returned no finite number.

        owner  the environment's name, for messages
        calls  the environment's, which then knows what a deadline left behind
        """
        calls = calls or Calls(owner)
        with ungrouped():
            try:
                async with deadline(self.deadline_s), asyncio.TaskGroup() as running:
                    pending = {
                        f: running.create_task(self._value(f, task, episode, owner, calls))
                        for f in self.functions
                    }
            except TimeoutError as error:
                raise InfraFailure(f"the rubric did not finish within {self.deadline_s:g} s") from error
        values = {function: running_task.result() for function, running_task in pending.items()}
        weights = {function: getattr(function, MARK) for function in self.functions}
        return Score(
            reward=sum((weights[f] * v for f, v in values.items() if weights[f] is not None), 0.0),
            rewards={f.__name__: v for f, v in values.items() if weights[f] is not None},
            metrics={f.__name__: v for f, v in values.items() if weights[f] is None},
        )

    async def _value(
        self, function: Callable[..., Any], task: Task, episode: Episode, owner: str, calls: Calls
    ) -> float:
        kind = "metric" if getattr(function, MARK) is None else "reward"
        hook = f"{kind} {function.__name__}"
        with blamed(owner, hook, task.id, function):
            try:
                value = _number(await calls.call(function, task, episode))
            except FileError as error:
                log.info("%s: %s is 0 for task %s: %s", owner, hook, task.id, error)
                return 0.0
        if not math.isfinite(value):
            raise NonFinite(told(owner, hook, task.id, f"it returned {value}", source_of(function)))
        return value


def _number(returned: Any) -> float:
    try:
        if isinstance(returned, str | bytes):
            raise ValueError
        return float(returned)
    except (TypeError, ValueError):
        raise TypeError(f"it returned {reprlib.repr(returned)}, which is no number") from None
