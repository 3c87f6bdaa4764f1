"""What an environment remembers of the running episode: the conversation and the counts.

Invariant: one Progress an episode; `finished` is set by the environment only, the counts by `record` only.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

from ..errors import EnvironmentBug
from ..sandboxes.deadline import deadline
from .message import Message
from .rubric import Ended, Episode
from .task import Task
from .tool_calls import Reply


class Progress:
    """The running episode, until it is frozen into an `Episode` for the rubric."""

    def __init__(self, task: Task) -> None:
        self.task = task
        self.messages: list[Message] = []
        self.finished = False
        self.turns = self.calls = self.malformed = 0
        self._answer = ""
        self._statuses: list[str] = []
        self._began = time.monotonic()
        self._waited_s = 0.0

    @property
    def overdue(self) -> bool:
        limit = self.task.deadlines.episode_s
        return limit is not None and time.monotonic() - self._began - self._waited_s > limit

    @asynccontextmanager
    async def clock(self, seconds: float) -> AsyncIterator[None]:
        """A deadline of one call; what it stands still counts against the episode neither."""
        async with deadline(seconds) as running:
            try:
                yield
            finally:
                self._waited_s += running.waited_s

    def record(self, text: str, turn: Reply) -> None:
        """One turn of the policy, as it wrote it and as it was understood. TypeError where `parse` said no
        `Reply`."""
        if not isinstance(turn, Reply):
            what = f"it returned {turn!r} ({type(turn).__name__})"
            raise TypeError(f"{what}; return Reply(content=..., calls=...), and not from an async function")
        well_formed = [call for call in turn.calls if call.status == "ok"]
        message = Message(role="assistant", content=text)
        if well_formed:
            message["tool_calls"] = [call.openai() for call in well_formed]
        self.messages.append(message)
        self.turns += 1
        self.calls += len(well_formed)
        self.malformed += len(turn.calls) - len(well_formed)
        self._answer = turn.content.strip()
        self._statuses = [call.status for call in turn.calls]

    def info(self) -> dict[str, Any]:
        """`turn`: actions so far; `calls`: the status of each tool call of the last one."""
        return {"task_id": self.task.id, "turn": self.turns, "calls": list(self._statuses)}

    def counts(self) -> dict[str, float]:
        """The metrics every environment has."""
        return {
            "turns": float(self.turns),
            "tool_calls": float(self.calls),
            "malformed_calls": float(self.malformed),
        }

    def episode(self, state: object, ended: Ended) -> Episode:
        """What the rubric sees."""
        if not isinstance(state, Mapping):
            what = f"self.state is {state!r} at the end of task {self.task.id}"
            raise EnvironmentBug(f"{what}\n  Put what the rubric shall see into the dictionary; keep it one.")
        return Episode(
            messages=tuple(self.messages),
            answer=self._answer,
            state=dict(state),
            turns=self.turns,
            calls=self.calls,
            malformed=self.malformed,
            ended=ended,
        )
