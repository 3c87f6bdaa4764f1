"""A training run in simulated time: real scheduler, made-up durations, failures, lagging engines, kills.

Each episode has a heavy-tailed duration and samples a token at each of its turns from any live engine, so
its tokens mix versions. Engines take each published version after a delay of their own and may be replaced.
A group is now and then masked by an infrastructure failure. A kill may strike before or after any
record; the next life starts from the records alone, as a resume does.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from rz_agent.rollout.lag_certificate import UntrainedGroup
from rz_agent.rollout.scheduler import Schedule, Scheduler, Ticket


class Killed(Exception):
    """The process dies here."""


class Stuck(AssertionError):
    """Nothing can happen any more and the run is not finished."""


class LagViolation(AssertionError):
    """A token was trained past the bound."""


@dataclass(frozen=True, kw_only=True)
class World:
    seed: int
    groups_per_batch: int = 2
    group_size: int = 2
    max_lag: int = 1
    total_updates: int = 12
    schedule: Schedule = "bounded"
    positions: int | None = None
    engines: int = 2
    slots: int = 8
    tail: float = 1.1
    masked_share: float = 0.0
    lost_share: float = 0.0
    kills: int = 0
    engine_delay: float = 1.0


@dataclass
class Episode:
    tokens: list[int]
    masked: bool


@dataclass
class Records:
    """What survives a kill: what the journal would hold, in plain containers."""

    group_size: int
    tickets: dict[str, Ticket] = field(default_factory=dict)
    episodes: dict[tuple[str, int], Episode] = field(default_factory=dict)
    batches: dict[int, list[str]] = field(default_factory=dict)
    completed: int = 0

    def admit(self, ticket: Ticket) -> None:
        self.tickets[ticket.group_id] = ticket

    def finish_episode(self, name: str, index: int, episode: Episode) -> None:
        self.episodes[name, index] = episode

    def consume(self, update: int, batch: list[str]) -> None:
        self.batches[update] = batch

    def complete(self, update: int) -> None:
        self.completed = update + 1

    def restore(self, scheduler: Scheduler) -> None:
        """Tell a new scheduler where the run stands."""
        scheduler.restore(
            update=self.completed,
            next_position=len(self.tickets),
            groups=[self._untrained(t) for t in self.tickets.values() if t.group_id not in self._gone()],
            in_training=self.batches.get(self.completed, []),
        )

    def trained(self) -> list[str]:
        return [name for u in range(self.completed) for name in self.batches[u]]

    def kept_versions(self, name: str) -> list[int]:
        episodes = (self.episodes.get((name, i)) for i in range(self.group_size))
        return [v for e in episodes if e is not None and not e.masked for v in e.tokens]

    def left(self) -> set[str]:
        """Groups that finished without a token that counts."""
        return {t for t in self.tickets if not self.missing(t) and not self.kept_versions(t)}

    def missing(self, name: str) -> list[int]:
        return [i for i in range(self.group_size) if (name, i) not in self.episodes]

    def unfinished(self) -> list[str]:
        return [name for name in self.tickets if self.missing(name)]

    def _gone(self) -> set[str]:
        return {*self.trained(), *self.left()}

    def _untrained(self, ticket: Ticket) -> UntrainedGroup:
        kept = self.kept_versions(ticket.group_id)
        return UntrainedGroup(
            group_id=ticket.group_id,
            position=ticket.position,
            remaining=len(self.missing(ticket.group_id)),
            oldest_version=min([*kept, self.completed]),
            kept_oldest=min(kept, default=None),
            requested=bool(kept),
            sampled=bool(kept),
            planned_update=ticket.planned_update,
        )


class Run:
    """One run over all its lives. `lags[u]` are the lags of the tokens that update u trained on."""

    def __init__(
        self, world: World, scheduler: type[Scheduler] = Scheduler, records: Records | None = None
    ) -> None:
        self.world, self._type = world, scheduler
        self.random = random.Random(world.seed)
        self.records = records or Records(world.group_size)
        self.lags: dict[int, list[int]] = {}
        self.lives = 0
        self._kills_left = world.kills
        self._until_kill = self._next_kill()

    def finish(self) -> Run:
        while True:
            try:
                self.lives += 1
                Life(self).live()
                return self
            except Killed:
                continue

    def record(self, write: Callable[[], None]) -> None:
        """Write to the records; a kill strikes just before or just after."""
        self._until_kill -= 1
        dies = self._kills_left > 0 and self._until_kill <= 0
        before = self.random.random() < 0.5
        if dies:
            self._kills_left -= 1
            self._until_kill = self._next_kill()
        if dies and before:
            raise Killed
        write()
        if dies:
            raise Killed

    def _next_kill(self) -> int:
        return self.random.randint(1, 60)

    def new_scheduler(self) -> Scheduler:
        world = self.world
        return self._type(
            groups_per_batch=world.groups_per_batch,
            group_size=world.group_size,
            max_lag=world.max_lag,
            total_updates=world.total_updates,
            schedule=world.schedule,
            positions=world.positions,
        )


class Life:
    """One process of the run, from its start to its end or its kill."""

    def __init__(self, run: Run) -> None:
        self.run, self.world, self.random = run, run.world, run.random
        self.scheduler = run.new_scheduler()
        self.time = 0.0
        self.queue: list[tuple[float, int, Callable[[], None]]] = []
        self.order = itertools.count()
        self.in_flight = 0
        self.engines: dict[str, int] = {}
        self.names = (f"engine{i}" for i in itertools.count())
        self.restarting: list[str] = []
        self._restore()
        for _ in range(self.world.engines):
            self._join()

    # Simulated time

    def live(self) -> None:
        if self.scheduler.in_training:
            self._train(list(self.scheduler.in_training))
        while not self.scheduler.finished:
            self._pump()
            if not self.queue:
                raise Stuck(f"update {self.scheduler.update}: {self.scheduler.untrained}")
            self.time, _, event = heapq.heappop(self.queue)
            event()

    def _after(self, delay: float, event: Callable[[], None]) -> None:
        heapq.heappush(self.queue, (self.time + delay, next(self.order), event))

    def _pump(self) -> None:
        while self.restarting and self.in_flight < self.world.slots:
            self._start_group(self.restarting.pop(0))
        while self.in_flight < self.world.slots and (ticket := self.scheduler.admit()) is not None:
            self.run.record(partial(self.run.records.admit, ticket))
            self._start_group(ticket.group_id)
        if not self.scheduler.in_training and (batch := self.scheduler.next_batch()) is not None:
            update = self.scheduler.update
            self.run.record(lambda: self.run.records.consume(update, batch))
            self._train(batch)

    def _restore(self) -> None:
        if self.run.records.tickets:
            self.run.records.restore(self.scheduler)
            self.restarting = self.run.records.unfinished()

    # Engines

    def _join(self) -> None:
        name = next(self.names)
        lowest = self.scheduler.lowest_version
        newest = self.scheduler.update
        version = self.random.randint(newest if lowest is None else lowest, newest)
        self.engines[name] = version
        self.scheduler.acknowledged(name, version)
        self._after(self._delay(), lambda: self._load(name, newest))

    def _publish(self, version: int) -> None:
        for name in list(self.engines):
            self._after(self._delay(), partial(self._load, name, version))
        if len(self.engines) > 1 and self.random.random() < self.world.lost_share:
            lost = self.random.choice(sorted(self.engines))
            del self.engines[lost]
            self.scheduler.engine_lost(lost)
            self._after(self._delay(), self._join)

    def _load(self, name: str, version: int) -> None:
        if name in self.engines and version > self.engines[name]:
            self.engines[name] = version
            self.scheduler.acknowledged(name, version)

    def _delay(self) -> float:
        return self.world.engine_delay * (self.random.paretovariate(self.world.tail) - 1)

    # Episodes

    def _start_group(self, name: str) -> None:
        for index in self.run.records.missing(name):
            self.in_flight += 1
            turns = self.random.randint(1, 4)
            pause = self.random.paretovariate(self.world.tail) / turns
            boot = self.random.random() * 3
            self._after(boot, partial(self._turn, name, index, turns, pause, []))

    def _turn(self, name: str, index: int, left: int, pause: float, tokens: list[int]) -> None:
        if not tokens:
            self.scheduler.first_request(name)
        tokens.append(self.engines[self.random.choice(sorted(self.engines))])
        if len(tokens) == 1:
            self.scheduler.first_token(name, tokens[0])
        if left:
            self._after(pause, lambda: self._turn(name, index, left - 1, pause, tokens))
            return
        self.in_flight -= 1
        episode = Episode(tokens, self.random.random() < self.world.masked_share)
        self.run.record(lambda: self.run.records.finish_episode(name, index, episode))
        self.scheduler.finish_episode(name, min(tokens), masked=episode.masked)

    # Updates

    def _train(self, batch: list[str]) -> None:
        update = self.scheduler.update
        lags = [update - v for name in batch for v in self.run.records.kept_versions(name)]
        if max(lags) > self.world.max_lag:
            raise LagViolation(f"update {update} trains at lag {max(lags)} > {self.world.max_lag}")
        self.run.lags[update] = lags
        self._after(self.random.paretovariate(self.world.tail), lambda: self._complete(update))

    def _complete(self, update: int) -> None:
        self.run.record(lambda: self.run.records.complete(update))
        self.scheduler.completed(update)
        self._publish(update + 1)
