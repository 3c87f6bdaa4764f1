"""What an episode is about, and in which order a run meets its tasks.

    Taskset.load(split) -> Sequence[Task]        a finite, lazy list: for evaluation
    Taskset.order(seed, split) -> TaskOrder      the training stream, addressed by position

Invariant: position -> Task is a pure function of (taskset, split, seed). A run that stops at position n
goes on at position n; nothing else has to be remembered, and no task is skipped or met twice in an epoch.
Nothing here waits.
"""

from __future__ import annotations

import json
import random
import reprlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol, TypeGuard, overload, runtime_checkable

from pydantic import BaseModel, ConfigDict, Field, field_validator

from ..errors import ConfigError
from .message import Message, count_images


class Resources(BaseModel):
    """What the sandbox of one task needs beyond the environment's own limits; None leaves them."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    memory_mb: int | None = Field(default=None, gt=0)
    cpus: float | None = Field(default=None, gt=0)
    disk_mb: int | None = Field(default=None, gt=0)


class Deadlines(BaseModel):
    """Wall seconds. Past `setup_s` the episode is masked; past `tool_s`, of all tools of one turn, the policy
    is told so; past `episode_s` the episode is truncated at its next action."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    setup_s: float = Field(default=300.0, gt=0)
    tool_s: float = Field(default=600.0, gt=0)
    episode_s: float | None = Field(default=None, gt=0)


class Task(BaseModel):
    """One thing to do.

    prompt     the messages an episode begins with; a plain string is one user message
    answer     what the rubric compares with, never shown to the policy
    metadata   whatever else the environment or the rubric needs; JSON values only
    image      container or desktop image, where the environment has one

    >>> Task(id="sum", prompt="What is 2 plus 2?", answer="4").prompt[0]["role"]
    'user'
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    id: str
    split: str = "train"
    prompt: tuple[Message, ...]
    answer: str | None = None
    metadata: Mapping[str, Any] = Field(default_factory=dict)
    image: str | None = None
    resources: Resources = Resources()
    deadlines: Deadlines = Deadlines()

    def in_steps_of(self, seconds: float) -> Task:
        """The task where a step may take so long: its tools have half of that, for a step that does not end
        masks its episode, and what a tool does is the policy's choice."""
        tool_s = min(self.deadlines.tool_s, seconds / 2)
        return self.model_copy(update={"deadlines": self.deadlines.model_copy(update={"tool_s": tool_s})})

    @field_validator("metadata")
    @classmethod
    def _json_values(cls, value: Mapping[str, Any]) -> Mapping[str, Any]:
        try:
            json.dumps(value)
        except (TypeError, ValueError, RecursionError) as error:
            raise ValueError(
                f"{error}: JSON values only, for tasks are written down; write a text"
            ) from error
        return value

    @field_validator("prompt")
    @classmethod
    def _no_images(cls, value: tuple[Message, ...]) -> tuple[Message, ...]:
        if count_images(value):
            raise ValueError("a prompt holds text only; return its images from `begin` (`pictured`)")
        return value

    @field_validator("prompt", mode="before")
    @classmethod
    def _one_user_message(cls, value: object) -> object:
        return ({"role": "user", "content": value},) if isinstance(value, str) else value


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskOrder:
    """An endless stream addressed by position: `order[position]` is the same Task whenever it is asked.

    task_at     position >= 0 -> Task, pure
    epoch_size  positions in which every task is met once; None where tasks are generated without end
    """

    task_at: Callable[[int], Task]
    epoch_size: int | None = None

    def __getitem__(self, position: int) -> Task:
        if position < 0:
            raise IndexError(f"position {position}: a task order begins at 0")
        return self.task_at(position)

    def __iter__(self) -> Iterator[Task]:
        """Endless, from position 0."""
        position = 0
        while True:
            yield self.task_at(position)
            position += 1


@runtime_checkable
class Taskset(Protocol):
    """A named set of tasks in splits. `load` and `order` raise `ConfigError` for an unknown split."""

    @property
    def name(self) -> str: ...

    @property
    def splits(self) -> tuple[str, ...]: ...

    def load(self, split: str) -> Sequence[Task]: ...

    def order(self, seed: int, split: str = "train") -> TaskOrder: ...


class LazyTasks(Sequence[Task]):
    """`size` tasks that are made when asked for, by a pure function of the index."""

    def __init__(self, task_at: Callable[[int], Task], size: int) -> None:
        self._task_at, self._size = task_at, size

    def __len__(self) -> int:
        return self._size

    @overload
    def __getitem__(self, index: int) -> Task: ...

    @overload
    def __getitem__(self, index: slice) -> list[Task]: ...

    def __getitem__(self, index: int | slice) -> Task | list[Task]:
        if isinstance(index, slice):
            return [self._task_at(i) for i in range(*index.indices(self._size))]
        if not -self._size <= index < self._size:
            raise IndexError(f"task {index} of {self._size}")
        return self._task_at(index % self._size)


class ListTaskset:
    """Tasks that exist as a list. The order is a fresh permutation each epoch.

    >>> tasks = ListTaskset([Task(id=str(i), prompt="") for i in range(3)], name="three")
    >>> order = tasks.order(seed=0)
    >>> sorted(order[p].id for p in range(3, 6))
    ['0', '1', '2']
    """

    def __init__(self, tasks: Sequence[Task], *, name: str) -> None:
        """Raises `ConfigError` without a task, and where two tasks of a split have one id."""
        self._name = name
        self._tasks: dict[str, list[Task]] = {}
        seen: set[tuple[str, str]] = set()
        for task in tasks:
            if (task.split, task.id) in seen:
                raise ConfigError(
                    source=f"taskset {name}",
                    key="id",
                    value=task.id,
                    why=f"is met twice in split {task.split!r}.",
                    remedy="Give every task an id of its own: the journal knows it by that.",
                )
            seen.add((task.split, task.id))
            self._tasks.setdefault(task.split, []).append(task)
        if not self._tasks:
            raise ConfigError(
                source=f"taskset {name}", key="tasks", value=[], why="is empty.", remedy="Add a task."
            )

    @property
    def name(self) -> str:
        return self._name

    @property
    def splits(self) -> tuple[str, ...]:
        return tuple(self._tasks)

    def load(self, split: str) -> Sequence[Task]:
        check_split(self, split)
        return tuple(self._tasks[split])

    def order(self, seed: int, split: str = "train") -> TaskOrder:
        tasks = self.load(split)
        size = len(tasks)

        @lru_cache(maxsize=2)
        def permutation(epoch: int) -> tuple[int, ...]:
            indices = list(range(size))
            random.Random(f"{self._name}/{split}/{seed}/{epoch}").shuffle(indices)
            return tuple(indices)

        def task_at(position: int) -> Task:
            epoch, place = divmod(position, size)
            return tasks[permutation(epoch)[place]]

        return TaskOrder(task_at=task_at, epoch_size=size)


def checked_taskset(found: object, *, source: str) -> Taskset:
    """`found`, if it is a Taskset; else a `ConfigError` that says how to make one."""
    if _is_taskset(found):
        return found
    raise ConfigError(
        source=source,
        key="taskset",
        value=reprlib.repr(found),
        why=f"is a {type(found).__name__}, no Taskset (name, splits, load, order).",
        remedy='Write ListTaskset([Task(...), ...], name="mine").',
    )


def _is_taskset(found: object) -> TypeGuard[Taskset]:
    # As isinstance says, which looks the protocol's members up anew at each episode.
    return all(hasattr(found, name) for name in ("name", "splits", "load", "order"))


def check_split(taskset: Taskset, split: str, *, key: str = "split") -> None:
    """Raise `ConfigError` unless the taskset has this split, which was asked for by `key`."""
    if split not in taskset.splits:
        raise ConfigError(
            source=f"taskset {taskset.name}",
            key=key,
            value=split,
            remedy=f"Use one of: {', '.join(taskset.splits)}.",
        )
