"""An episode as it can be read, kept and played again.

    recorder = Recorder("python", options, task)
    recorder.began(observation, info)
    recorder.stepped(text, calls, step)         once a turn, in order
    recorder.recording                          so far

    Recording.dump() -> JSON values             Recording.load(values)

Invariant: what is loaded equals what was dumped. A recording says nothing that the environment and the policy
did not say; tokens are the journal's business. Nothing here waits.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from itertools import islice
from typing import Any, Literal

from .message import Observation, count_images, text_of
from .step_result import Step
from .task import Task
from .tool_call import ToolCall

Fate = Literal["running", "terminated", "truncated", "masked"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """One thing that was said.

    role    of the message; "policy" and "context" where it is tokens that are shown (a journal's episode)
    name    the tool that answered
    images  PNG files, each in the text as "[image]"
    calls   the tool calls of a policy's turn: name, arguments, status, error, raw
    fresh   whether the policy was shown a new history here instead of an addition
    """

    role: str
    text: str
    name: str = ""
    images: tuple[bytes, ...] = ()
    calls: tuple[Mapping[str, Any], ...] = ()
    fresh: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """One episode.

    environment  its name, as `load` takes it, and its options
    task         what it was about; None where only its id is known
    said         everything, in order
    fate         how it ended; `reason`: why it was masked, or which limit ended it
    figures      rewards and metrics by name
    """

    environment: str
    task_id: str
    said: tuple[Said, ...]
    options: Mapping[str, Any] = field(default_factory=dict)
    task: Task | None = None
    reward: float = 0.0
    fate: Fate = "running"
    reason: str = ""
    figures: Mapping[str, float] = field(default_factory=dict)

    @property
    def actions(self) -> tuple[str, ...]:
        """The policy's turns: what a replay says."""
        return tuple(one.text for one in self.said if one.role in ("assistant", "policy"))

    def dump(self) -> dict[str, Any]:
        """The recording as JSON values."""
        values = {name: getattr(self, name) for name in _PLAIN}
        said = [
            {**asdict(one), "images": [base64.b64encode(png).decode() for png in one.images]}
            for one in self.said
        ]
        return {**values, "said": said, "task": self.task and self.task.model_dump(mode="json")}

    @classmethod
    def load(cls, values: Mapping[str, Any]) -> Recording:
        """What `dump` gave; raises KeyError, TypeError or ValueError for anything else."""
        said = tuple(
            Said(
                **{**one, "images": tuple(map(base64.b64decode, one["images"])), "calls": tuple(one["calls"])}
            )
            for one in values["said"]
        )
        task = Task.model_validate(values["task"]) if values["task"] is not None else None
        return cls(said=said, task=task, **{name: values[name] for name in _PLAIN})


_PLAIN = ("environment", "task_id", "options", "reward", "fate", "reason", "figures")


class Recorder:
    """Listens to one episode; `recording` is what it has heard so far."""

    def __init__(self, environment: str, options: Mapping[str, Any], task: Task) -> None:
        self.task = task
        self.recording = Recording(
            environment=environment, options=dict(options), task_id=task.id, task=task, said=()
        )

    def began(self, shown: Observation, info: Mapping[str, Any]) -> None:
        """The reset."""
        self._hear(_said_in(shown))
        self._look(info)

    def stepped(self, text: str, calls: Iterable[ToolCall], step: Step) -> None:
        """A turn of the policy, and what came of it."""
        self._hear([Said(role="assistant", text=text, calls=tuple(asdict(call) for call in calls))])
        self.ended(step)

    def ended(self, step: Step) -> None:
        """What came of a turn, or of an end from outside."""
        shown, reward, terminated, truncated, info = step
        self._hear(_said_in(shown))
        heard = self.recording
        figures = {**heard.figures, **info.get("rewards", {}), **info.get("metrics", {})}
        self.recording = replace(heard, reward=heard.reward + reward, figures=figures)
        if terminated or truncated:
            fate: Fate = "terminated" if terminated else "truncated"
            self.recording = replace(self.recording, fate=fate, reason=str(info.get("ended", "")))
        self._look(info)

    def masked(self, reason: str) -> None:
        """The episode was given up for a failure that is not the policy's."""
        self.recording = replace(self.recording, fate="masked", reason=reason)

    def _hear(self, said: Iterable[Said]) -> None:
        self.recording = replace(self.recording, said=(*self.recording.said, *said))

    def _look(self, info: Mapping[str, Any]) -> None:
        if reason := info.get("mask"):
            self.masked(str(reason))


def _said_in(shown: Observation) -> Iterator[Said]:
    images = iter(shown["images"])
    for message in shown["messages"]:
        own = tuple(islice(images, count_images([message])))
        yield Said(
            role=message["role"], text=text_of(message["content"]), name=message.get("name", ""), images=own
        )
