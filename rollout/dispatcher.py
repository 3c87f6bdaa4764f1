"""Keeps episodes in flight and hands whole batches to the learner.

    scheduler --ticket--> dispatcher --task, index--> EpisodeRunner --Trajectory--> journal --> scheduler

Invariants: every admitted episode reaches the journal exactly once, also when it failed; the
scheduler hears of an episode only after the journal holds it; an episode's task and seeds are pure
functions of the run's seed, its position and its index, so a restarted episode asks the same.

Episodes start one by one as others end, and one group is admitted ahead of them, so that no place in flight
stands empty while a group's admission goes to disk; an episode that is over gives its place away before its
record is on disk.
Who waits: `run` waits for room (in-flight episodes, the lag certificate) and is woken by an episode that is
over, a finished update or an acknowledged version. `next_batch` waits for the scheduler to have
one. Neither waits for the other. A failure of any episode coroutine that is not the episode's own
outcome (a broken journal, a dead engine, a missing log-probability) ends `run` and so the run.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from ..envs.bug import blamed, from_outside
from ..envs.task import Task
from ..errors import ConfigError, EnvironmentBug, RunStopped, ungrouped
from ..journal import GroupProgress, GroupRecord, Journal
from ..sandboxes.pool import InfraBreaker
from ..trajectory import Trajectory
from .episode_request import EpisodeRequest, RunEpisode, Signals, seed_of
from .scheduler import Scheduler

TaskAt = Callable[[int], Task]
SILENT = 64  # episodes in a row without a sampled token


@dataclass(slots=True)
class Tally:
    """What the rollout side did since it was last asked: for the figures of one update."""

    episodes: int = 0
    tokens: int = 0
    masked: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    waited_s: float = 0.0  # of all episodes, for sandboxes
    idle_s: float = 0.0


class Dispatcher:
    """Runs groups of episodes for one training run. All methods belong to one event loop."""

    def __init__(
        self,
        *,
        scheduler: Scheduler,
        journal: Journal,
        run_episode: RunEpisode,
        task_at: TaskAt,
        group_size: int,
        episodes_in_flight: int,
        seed: int,
        breaker: InfraBreaker,
        on_infra_failure: Literal["mask", "retry", "stop"] = "mask",
    ) -> None:
        self._scheduler, self._journal = scheduler, journal
        self._run_episode, self._task_at = run_episode, task_at
        self._group_size, self._room, self._seed = group_size, episodes_in_flight, seed
        self._breaker, self._on_infra_failure = breaker, on_infra_failure
        self._changed = asyncio.Event()
        self._waiting: deque[EpisodeRequest] = deque()  # admitted, and not yet in flight
        self._in_flight = 0
        self._tally = Tally()
        self._silent = 0
        self._idle_since: float | None = time.monotonic()

    async def run(self, unfinished: Sequence[GroupProgress] = ()) -> None:
        """Admit and run groups until the last update; first the `unfinished` ones of a resumed run."""
        try:
            with ungrouped():
                async with asyncio.TaskGroup() as episodes:
                    for group in unfinished:
                        self._queue(group.record, missing=set(range(group.record.size)) - group.finished)
                    while self._waiting or not self._scheduler.finished:
                        await self._start(episodes)
                        if not await self._admit():
                            await self._wait_for_change()
        finally:
            self._changed.set()

    async def next_batch(self) -> list[str] | None:
        """Group ids that the next update trains on; None when all updates are made or the data ended."""
        while not self._scheduler.finished:
            if batch := self._scheduler.next_batch():
                return batch
            await self._wait_for_change()
        return None

    def wake(self) -> None:
        """Say that the scheduler's state changed: an update completed or a version was acknowledged."""
        self._changed.set()

    def take_tally(self) -> Tally:
        """Figures since the last call."""
        self._note_idle()
        tally, self._tally = self._tally, Tally()
        return tally

    async def _wait_for_change(self) -> None:
        # Two coroutines share the event. `set` wakes both even if one clears it at once, and neither
        # awaits between its look at the state and this line, so no change is missed.
        self._changed.clear()
        await self._changed.wait()

    async def _admit(self) -> bool:
        """Admit groups until enough episodes wait for the room there is, and one group more; whether any was.
        They go to disk together."""
        wanted = self._room - self._in_flight - len(self._waiting)
        records = list[GroupRecord]()
        while len(records) * self._group_size <= wanted and (ticket := self._scheduler.admit()):
            records.append(
                GroupRecord(
                    group_id=ticket.group_id,
                    task_id=self._task_of(ticket.position).id,
                    position=ticket.position,
                    size=self._group_size,
                    admitted_version=ticket.version,
                    planned_update=ticket.planned_update,
                )
            )
        if not records:
            return False
        await asyncio.gather(*(self._journal.aadmit(record) for record in records))
        for record in records:
            self._queue(record, missing=range(record.size))
        return True

    def _task_of(self, position: int) -> Task:
        with blamed("taskset", f"order at position {position}"):
            return self._task_at(position)

    def _queue(self, record: GroupRecord, *, missing: Iterable[int]) -> None:
        """Put the group's `missing` episodes behind those that wait."""
        task = self._task_of(record.position)
        if task.id != record.task_id:
            raise ConfigError(
                source="environment",
                key="taskset",
                value=task.id,
                why=f"is now at position {record.position}, where the run had {record.task_id}.",
                remedy="Give the run its tasks again, in their order, or begin a new one.",
            )
        for index in sorted(missing):
            episode_id = f"{record.group_id}-{index}"
            self._waiting.append(
                EpisodeRequest(
                    task=task,
                    group_id=record.group_id,
                    episode_id=episode_id,
                    index=index,
                    seed=seed_of(self._seed, episode_id),
                )
            )

    async def _start(self, episodes: asyncio.TaskGroup) -> None:
        """Start as many of the episodes that wait as there is room for.

        One after the other: episodes that begin in step stay in step, and each turn then waits for them all.
        """
        while self._waiting and self._in_flight < self._room:
            request = self._waiting.popleft()
            self._in_flight += 1
            self._note_idle()
            episodes.create_task(self._run_one(request), name=request.episode_id)
            await asyncio.sleep(0)

    async def _run_one(self, request: EpisodeRequest) -> None:
        try:
            trajectory = await self._played(request)
        finally:
            self._in_flight -= 1
            self._note_idle()
            self._changed.set()
        await self._journal.afinish_episode(trajectory, request.index)
        self._count(trajectory)
        self._scheduler.finish_episode(
            trajectory.group_id, trajectory.oldest_version, masked=trajectory.masked
        )
        self._changed.set()
        self._breaker.record(failed=trajectory.masked)
        self._refuse_silence(trajectory)
        if trajectory.masked and self._on_infra_failure == "stop":
            raise RunStopped(
                f"episode {trajectory.episode_id} lost its infrastructure: {trajectory.mask_reason}\n"
                '  sandbox.on_infra_failure = "stop" ends the run there; repair it and resume, or set "mask".'
            )

    async def _played(self, request: EpisodeRequest) -> Trajectory:
        """The episode, or a second try of it where its infrastructure failed and that is wanted."""
        signals = Signals(
            first_request=lambda: self._scheduler.first_request(request.group_id),
            first_token=lambda version: self._first_token(request.group_id, version),
        )
        trajectory = await self._tried(request, signals)
        if trajectory.masked and self._on_infra_failure == "retry":
            lost = {"episode": request.episode_id, "why": trajectory.mask_reason}
            self._journal.record_event("retry", lost)
            trajectory = await self._tried(request, signals)
        return trajectory

    async def _tried(self, request: EpisodeRequest, signals: Signals) -> Trajectory:
        """The episode; an environment that cancels itself is an error, else its group would never finish."""
        try:
            return await self._run_episode(request, signals)
        except asyncio.CancelledError as error:
            if from_outside(error, asyncio.current_task()):
                raise
            raise EnvironmentBug(
                f"episode {request.episode_id} of task {request.task.id} was cancelled from within\n"
                "  An environment must not raise CancelledError. Fix it and resume the run."
            ) from error

    def _refuse_silence(self, trajectory: Trajectory) -> None:
        """RunStopped when many episodes in a row had no action: their groups leave, and new ones come."""
        if not trajectory.masked:
            self._silent = 0 if trajectory.num_actions else self._silent + 1
        if self._silent >= SILENT:
            raise RunStopped(
                f"the last {self._silent} episodes ended before the policy said a word, the last one on task "
                f"{trajectory.task_id}\n  Their prompts do not fit rollout.context_len, or setup outlasts "
                "rollout.episode_deadline_s: raise it, then resume the run."
            )

    def _first_token(self, group_id: str, version: int) -> None:
        self._scheduler.first_token(group_id, version)
        self._changed.set()

    def _count(self, trajectory: Trajectory) -> None:
        tally = self._tally
        tally.episodes += 1
        tally.masked += trajectory.masked
        tally.tokens += trajectory.num_actions
        tally.prompt_tokens += int(trajectory.metrics.get("rollout/prompt_tokens", 0))
        tally.cached_tokens += int(trajectory.metrics.get("rollout/cached_tokens", 0))
        tally.waited_s += trajectory.metrics.get("rollout/sandbox_waited_s", 0.0)

    def _note_idle(self) -> None:
        now = time.monotonic()
        if self._idle_since is not None:
            self._tally.idle_s += now - self._idle_since
        self._idle_since = None if self._in_flight else now
