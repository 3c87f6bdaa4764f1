"""`rz/OSWorld-v0`: a computer with a screen, and something to do on it.

    begin    a fresh machine -> the task's own steps -> its first screenshot
    reply    the turn is read -> mouse and keyboard -> a pause -> the next screenshot
    solved   postconfig -> getters and metrics on the machine as it was left

Invariants: what the policy writes reaches the machine as mouse and keyboard events and in no other way; an
action with a fault does nothing and is answered with what is wrong; a machine serves one episode and is gone
with it, whatever happened. What the machine did wrong masks the episode, with a reason that names the stage
(create, setup, step, grading); what the policy did to its machine never does, and slowing it down is such a
thing (`patience.py`).
A turn that says DONE or FAIL ends the episode; FAIL is the right answer to an infeasible task alone.
Waits: an episode for its own machine. The `pause_s` after an action is the program's time to draw.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...errors import RzError
from ...sandboxes.config import SandboxConfig
from ...sandboxes.desktop.actions import Click, Drag, MouseDown, MouseUp, Move, Scroll
from ...sandboxes.pool import SandboxPool
from ..action import Action
from ..context_policy import SlidingImages
from ..env import AgentEnv
from ..failure import InfraFailure, mask_reason
from ..message import Message, Observation, joined
from ..rubric import Ended, Episode, Rubric, metric, reward
from ..self_test import Case
from ..step_result import Info, Step
from ..task import Task, Taskset
from ..tool_calls import Reply
from .actions import Screen, parser
from .actions.parsed import Signal
from .backends.backend import Backend
from .backends.desktop import DesktopBackend
from .backends.http import HttpBackend
from .evaluator import evaluate
from .getters import Place
from .judge import Judge
from .machine import InputEvent, Machine
from .observation import look
from .options import OsworldOptions
from .patience import LOOK_S, patience
from .placeholders import fill
from .prompt import request, system_prompt
from .record import Record
from .scripted import cases, solve
from .setup import run_steps
from .tasks import published, taskset

_DESKTOPS = SandboxConfig.load(
    {"provider": "desktop", "lifetime_s": 7200, "desktop": {"a11y": True}}, source="environment OSWorldEnv"
)
WAIT_S = 5.0  # what WAIT means
ACT_S = 300.0  # for all that one turn does and the look afterwards, besides the pause
SCORING_S = 900.0  # for postconfig, which saves documents and restarts programs, and the metrics
_RUBRIC_S = SCORING_S + 2 * LOOK_S  # whoever is late is found out before the rubric's deadline masks


@dataclass(frozen=True, slots=True)
class Shared:
    """What the episodes of a run share."""

    backend: Backend
    judge: Judge


class OSWorldEnv(AgentEnv):
    """See the module. The reward is the task's own score, from 0 to 1."""

    Options = OsworldOptions
    options: OsworldOptions
    shared: Shared
    scripted = staticmethod(solve)
    rubric = Rubric(deadline_s=_RUBRIC_S)

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.context = SlidingImages(self.options.screenshots)
        self._read = parser(self.options.action_space, self.options.coordinates)
        self._machines = AsyncExitStack()  # the episode's machine and folder
        self._place: Place | None = None
        self._pointer = (0, 0)
        self._malformed = 0
        self._record: Record | None = None

    @classmethod
    def open_shared(
        cls, options: OsworldOptions, sandboxes: SandboxPool | None
    ) -> AbstractAsyncContextManager[Shared]:
        return _shared(options, sandboxes)

    @classmethod
    def load_taskset(cls, options: OsworldOptions) -> Taskset:
        return taskset(options)

    @classmethod
    def longest_step_s(cls, options: OsworldOptions) -> float:
        """The last one, which acts and is scored."""
        return ACT_S + options.pause_s + LOOK_S + _RUBRIC_S

    @classmethod
    def self_test(cls, tasks: Taskset, scratch: Path) -> Iterable[Case]:
        return cases(tasks)

    # -- an episode -------------------------------------------------------------------------------------

    async def begin(self, task: Task) -> Observation:
        if self.options.record:
            self._record = Record(Path(self.options.record), task, self.options)
        with _stage("create", acted=False):
            machine = await self._machines.enter_async_context(self.shared.backend.machine())
        with _stage("setup", acted=False):
            return await self._set_out(task, machine)

    async def _set_out(self, task: Task, machine: Machine) -> Observation:
        folder = self._machines.enter_context(tempfile.TemporaryDirectory(prefix="rz-osworld-"))
        downloads = Path(self.options.downloads) if self.options.downloads else None
        judge = self.shared.judge
        self._place = Place(machine=machine, folder=Path(folder), judge=judge, downloads=downloads)
        self._pointer, self._malformed = (machine.width // 2, machine.height // 2), 0
        await run_steps(published(task).config, self._place)
        await asyncio.sleep(self.options.pause_s)
        asked = request(self.options, fill(published(task).instruction, machine))
        screen = await look(machine, self.options, asked)
        if not (text := system_prompt(self.options, machine)):
            return screen
        system = Observation(messages=(Message(role="system", content=text),), images=())
        return joined([system, screen])

    async def end(self) -> None:
        self._place = None
        await self._machines.aclose()

    def parse(self, text: str) -> Reply:
        # what a turn means depends on where the pointer is: `reply` reads it
        return Reply(content=text)

    async def reply(self, text: str) -> Observation | str | None:
        with _stage("step"):
            async with patience(ACT_S + self.options.pause_s, self._here.machine, "the action"):
                return await self._acted(text)

    async def _acted(self, text: str) -> Observation | str | None:
        machine = self._here.machine
        screen = Screen(width=machine.width, height=machine.height, pointer=self._pointer)
        parsed = await asyncio.to_thread(self._read, text, screen)
        if parsed.error:
            return self._refused(parsed.error)
        self._malformed = 0
        await machine.perform(parsed.events)
        self._pointer = _pointer(parsed.events, self._pointer)
        if parsed.signal in ("done", "fail"):
            self._finished(parsed.signal)
            return None
        await asyncio.sleep(WAIT_S if parsed.signal == "wait" else self.options.pause_s)
        return await look(machine, self.options, "The screen now.")

    def _refused(self, error: str) -> str | None:
        """Nothing was done, so the screen shown last is still the one."""
        self._malformed += 1
        self.state["malformed"] = self.state.get("malformed", 0) + 1
        if self._malformed >= self.options.malformed_limit:
            self.finish()  # which is no FAIL: that would be the right answer to an infeasible task
            return None
        return f"Error: {error}. Nothing was done."

    def _finished(self, signal: Signal) -> None:
        self.state["last_action"] = signal.upper()
        self.finish()

    @property
    def _here(self) -> Place:
        assert self._place is not None, "a hook of an episode runs between begin and end"
        return self._place

    # -- its record -------------------------------------------------------------------------------------

    async def areset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, Info]:
        """See `AgentEnv`. An episode that was given up before is written as it stood."""
        await self._write_record()
        shown, info = await super().areset(seed=seed, options=options)
        if self._record:
            self._record.recorder.began(shown, info)
            await self._heard()
        return shown, info

    async def astep(self, action: str | Action) -> Step:
        """See `AgentEnv`."""
        step = await super().astep(action)
        if self._record:
            self._record.recorder.stepped(action.text if isinstance(action, Action) else action, (), step)
            await self._heard()
        return step

    async def atruncate(self, ended: Ended = "tokens") -> Step:
        """See `AgentEnv`."""
        step = await super().atruncate(ended)
        if self._record:
            self._record.recorder.ended(step)
            await self._heard()
        return step

    async def aclose(self) -> None:
        """See `AgentEnv`."""
        await self._write_record()
        await super().aclose()

    async def _heard(self) -> None:
        if self._record and self._record.over:
            await self._write_record()

    async def _write_record(self) -> None:
        record, self._record = self._record, None
        if record:
            await asyncio.to_thread(record.write)

    # -- its worth --------------------------------------------------------------------------------------

    @reward
    async def solved(self, task: Task, episode: Episode) -> float:
        """The task's own score."""
        last = episode.state.get("last_action")
        with _stage("grading"):
            async with patience(SCORING_S, self._here.machine, "the evaluation"):
                verdict = await evaluate(published(task), self._here, last_action=last, run_steps=run_steps)
        self.state["verdict"] = verdict.as_info()
        return verdict.score

    @metric
    def malformed_actions(self, task: Task, episode: Episode) -> float:
        """Turns that could not be read."""
        return float(episode.state.get("malformed", 0))


def _pointer(events: tuple[InputEvent, ...], before: tuple[int, int]) -> tuple[int, int]:
    """Where the pointer is after these."""
    for event in reversed(events):
        if isinstance(event, Move | Click | Drag | Scroll | MouseDown | MouseUp) and event.x is not None:
            assert event.y is not None, "an event has both or none"
            return event.x, event.y
    return before


@contextmanager
def _stage(name: str, *, acted: bool = True) -> Iterator[None]:
    """A failure that masks the episode says where it happened; every other one passes as it is."""
    try:
        yield
    except RzError as error:
        reason = mask_reason(error, acted=acted)
        if reason is None:
            raise
        raise InfraFailure(f"{name}: {reason}") from error


@asynccontextmanager
async def _shared(options: OsworldOptions, sandboxes: SandboxPool | None) -> AsyncIterator[Shared]:
    async with AsyncExitStack() as stack:
        judge = Judge()
        stack.push_async_callback(judge.aclose)
        if options.backend == "http":
            yield Shared(HttpBackend(options.servers, options.revert, options.password), judge)
            return
        # A pool that was given belongs to the run; its own is closed with the environment.
        pool = sandboxes
        if pool is None:
            pool = await stack.enter_async_context(SandboxPool.of(_DESKTOPS))
        yield Shared(DesktopBackend(pool, options.screen), judge)
