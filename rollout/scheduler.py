"""When a group of episodes may start, and which groups an update trains on.

    admit() -> Ticket | None        rollout asks; None when one more group could break the bound
    next_batch() -> [id] | None     learner asks; None rather than pass by a group that would grow too old
    finish_episode, completed, acknowledged    what happened: episodes, updates, engines

Version k is the number of durable updates; update k trains with the weights of version k.
Invariant: no token is trained on more than `max_lag` updates after the version that sampled it.
Proof: `rollout.lag_certificate`. Further invariants: positions are admitted in order without a gap; a
position is trained at most once; the same events in the same order give the same decisions; a batch
is ordered by position, so with `max_lag = 0` it does not depend on how long episodes took.

Schedules:
- "bounded" trains as soon as G finished groups may go, oldest first.
- "constant" plans the update of a group when it is admitted: update k trains the G groups admitted at
  version max(0, k - L). Version 0 admits (L + 1) * G groups, for the updates 0..L, which therefore have
  lag 0, 1, ..., L; each later version v admits G groups, for update v + L, at lag exactly L. To keep it
  exact, update k waits until the groups of version k have their first tokens: afterwards the version
  moves on. Exceptions are younger, never older: the replacement of a group that left, the
  groups that a resume restarts, and the last updates when the data ends.

Waits: the learner, for finished groups; the rollout side, for updates. The scheduler itself is a state
machine: it never blocks, holds no clock, no thread and no tensor, and reads no journal. It is not
thread-safe: one event loop owns it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from ..errors import RunStopped
from .lag_certificate import UntrainedGroup, refuse_too_old, refuse_unplanned, required_lag

Schedule = Literal["bounded", "constant"]


class StaleToken(RunStopped):
    """An engine served a version that it may no longer serve; the lag bound is void."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ticket:
    """Leave to start one group.

    position         index of its task in the seeded order
    version          e at admission: no token of the group will be older
    planned_update   the update that will train it ("constant"), None where that is open ("bounded")
    """

    group_id: str
    position: int
    version: int
    planned_update: int | None


def group_id(position: int) -> str:
    """Name of the group at a position of the task order; the same in every life of a run."""
    return f"g{position:07d}"


class Scheduler:
    """The lag certificate as a state machine.

    groups_per_batch   G >= 1
    group_size         episodes a group, n >= 1
    max_lag            L >= 0; 0 is synchronous
    total_updates      the run ends after so many
    positions          length of the task order over all epochs; None for no end
    """

    def __init__(
        self,
        *,
        groups_per_batch: int,
        group_size: int,
        max_lag: int,
        total_updates: int,
        schedule: Schedule = "bounded",
        positions: int | None = None,
    ) -> None:
        for name, value, least in (
            ("groups_per_batch", groups_per_batch, 1),
            ("group_size", group_size, 1),
            ("max_lag", max_lag, 0),
            ("total_updates", total_updates, 0),
        ):
            if value < least:
                raise ValueError(f"{name} = {value}: it must be at least {least}")
        self.groups_per_batch = groups_per_batch
        self.group_size = group_size
        self.max_lag = max_lag
        self.total_updates = total_updates
        self.schedule = schedule
        self.positions = positions
        self.update = 0
        self.next_position = 0
        self.in_training: tuple[str, ...] = ()
        self._groups: dict[str, UntrainedGroup] = {}
        self._finished = 0  # of them: `next_batch` is asked whenever anything happened
        self._engines: dict[str, int] = {}
        self._lowest: int | None = None  # e; never falls, also while no engine is alive

    # What the run looks like now

    @property
    def lowest_version(self) -> int | None:
        """e: every token sampled from now on has at least this version; None before the first engine."""
        return self._lowest

    @property
    def untrained(self) -> tuple[UntrainedGroup, ...]:
        """Groups running, finished and in training, in the order of their positions."""
        return tuple(sorted(self._groups.values(), key=lambda group: group.position))

    @property
    def data_ended(self) -> bool:
        return self.positions is not None and self.next_position >= self.positions

    @property
    def exhausted(self) -> bool:
        """No group will be admitted any more."""
        return self.update >= self.total_updates or self.data_ended

    @property
    def finished(self) -> bool:
        """All updates are made, or the data ended and all of it is trained."""
        return self.update >= self.total_updates or (self.data_ended and not self._groups)

    def waiting_for(self) -> tuple[str, ...]:
        """Running groups, oldest first: what the learner waits for while `next_batch` gives None."""
        running = [group for group in self._groups.values() if not group.finished]
        return tuple(group.group_id for group in sorted(running, key=_age))

    # Engines

    def acknowledged(self, engine: str, version: int) -> None:
        """The engine holds `version` and serves nothing older. Its first call lets it join.

        An engine that joins or replaces another must hold at least `lowest_version` before it serves.
        """
        if version > self.update:
            raise ValueError(f"engine {engine} acknowledges version {version}, the newest is {self.update}")
        held = self._engines.get(engine, self._lowest)
        if held is not None and version < held:
            raise StaleToken(f"engine {engine} is at version {version} but must serve {held} or newer")
        self._engines[engine] = version
        self._raise_lowest()

    def engine_lost(self, engine: str) -> None:
        """The engine serves no more: its requests are dead or moved to engines that are alive."""
        self._engines.pop(engine, None)
        self._raise_lowest()

    def _raise_lowest(self) -> None:
        if self._engines:
            lowest = min(self._engines.values())
            self._lowest = lowest if self._lowest is None else max(lowest, self._lowest)

    # Groups

    def admit(self) -> Ticket | None:
        """Leave for the group at `next_position`, or None: ask again after any event. Needs a live engine."""
        version = self.lowest_version
        if version is None or not self._engines or self.data_ended or not self._has_room(version):
            return None
        ticket = Ticket(
            group_id=group_id(self.next_position),
            position=self.next_position,
            version=version,
            planned_update=self._open_update(version),
        )
        self._groups[ticket.group_id] = UntrainedGroup(
            group_id=ticket.group_id,
            position=ticket.position,
            remaining=self.group_size,
            oldest_version=version,
            planned_update=ticket.planned_update,
        )
        self.next_position += 1
        return ticket

    def _has_room(self, version: int) -> bool:
        if self.schedule == "constant":
            return self._open_update(version) is not None
        last_update = min(version + self.max_lag, self.total_updates - 1)
        return self._places_taken() < (last_update - self.update + 1) * self.groups_per_batch

    def _places_taken(self) -> int:
        """Untrained groups; the batch in training takes G places however short it is."""
        short = max(self.groups_per_batch - len(self.in_training), 0) if self.in_training else 0
        return len(self._groups) + short

    def _open_update(self, version: int) -> int | None:
        """ "constant": the first update within `max_lag` of `version` that has fewer than G groups."""
        if self.schedule != "constant":
            return None
        planned = Counter(group.planned_update for group in self._groups.values())
        first = self.update + bool(self.in_training)
        last = min(version + self.max_lag, self.total_updates - 1)
        return next((u for u in range(first, last + 1) if planned[u] < self.groups_per_batch), None)

    def first_request(self, group_id: str) -> None:
        """The group is about to send a request; only its first counts. Optional: without it a group
        that starts slowly counts as old as its admission."""
        group = self._running(group_id)
        if not group.requested and self._lowest is not None:
            oldest = max(group.oldest_version, self._lowest)
            self._groups[group_id] = replace(group, oldest_version=oldest, requested=True)

    def first_token(self, group_id: str, version: int) -> None:
        """An episode of the group has its first token, sampled by `version`; "constant" waits for the first.

        It proves nothing about the other episodes, whose engines may lag, so v0 stays as it is.
        """
        group = self._running(group_id)
        self._check_served(group, version)
        self._groups[group_id] = replace(group, requested=True, sampled=True)

    def finish_episode(self, group_id: str, oldest_version: int | None, *, masked: bool) -> None:
        """An episode ended; `oldest_version` is `Trajectory.oldest_version`.

        A group whose episodes have all ended without an unmasked action token leaves: it is never
        trained, and another position takes its place.
        Raises StaleToken for a token older than the certificate allows.
        """
        group = self._running(group_id)
        kept = group.kept_oldest
        if oldest_version is not None:
            self._check_served(group, oldest_version)
            if not masked:
                kept = oldest_version if kept is None else min(kept, oldest_version)
        group = replace(group, remaining=group.remaining - 1, kept_oldest=kept, requested=True)
        if not group.finished:
            self._groups[group_id] = group
        elif kept is None:
            del self._groups[group_id]
        else:
            self._groups[group_id] = replace(group, oldest_version=kept, sampled=True)
            self._finished += 1

    def _check_served(self, group: UntrainedGroup, version: int) -> None:
        if not group.oldest_version <= version <= self.update:
            raise StaleToken(
                f"group {group.group_id} has a token of version {version}; engines may have served it "
                f"versions {group.oldest_version} to {self.update} only"
            )

    def _running(self, group_id: str) -> UntrainedGroup:
        group = self._groups.get(group_id)
        if group is None or group.finished:
            raise ValueError(f"group {group_id} is {'finished' if group else 'not known'}, not running")
        return group

    # Updates

    def next_batch(self) -> list[str] | None:
        """Groups of the next update in the order of their positions, or None: ask again after any event.

        The batch is in training from here to `completed`; journal it before its step.
        """
        if self.in_training:
            raise ValueError(f"update {self.update} is in training: call completed({self.update}) first")
        if self.update >= self.total_updates:
            return None
        batch = self._planned_batch() if self.schedule == "constant" else self._oldest_batch()
        if not batch:
            return None
        self.in_training = tuple(g.group_id for g in sorted(batch, key=lambda group: group.position))
        return list(self.in_training)

    def _oldest_batch(self) -> list[UntrainedGroup]:
        """The G oldest finished groups, if those left behind can still be trained in time.

        No other choice of G leaves a smaller required lag, so checking this one is enough.
        """
        last = self.data_ended and self._finished == len(self._groups)
        if self._finished < self.groups_per_batch and not last:
            return []
        finished = [group for group in self._groups.values() if group.finished]
        batch = sorted(finished, key=_age)[: self.groups_per_batch]
        chosen = {group.group_id for group in batch}
        rest = [g.oldest_version for g in self._groups.values() if g.group_id not in chosen]
        fits = required_lag(rest, self.update + 1, self.groups_per_batch) <= self.max_lag
        return batch if fits else []

    def _planned_batch(self) -> list[UntrainedGroup]:
        """The groups planned for this update, once every group of this version has its first token."""
        planned = Counter(group.planned_update for group in self._groups.values())
        reach = range(self.update, min(self.update + self.max_lag, self.total_updates - 1) + 1)
        admitted = self.data_ended or all(planned[u] == self.groups_per_batch for u in reach)
        if not admitted or not all(group.sampled for group in self._groups.values()):
            return []
        due = min((u for u in planned if u is not None), default=None)
        batch = [group for group in self._groups.values() if group.planned_update == due]
        return batch if all(group.finished for group in batch) else []

    def completed(self, update: int) -> None:
        """Update `update` is durable: its groups leave the count and version `update + 1` exists."""
        if not self.in_training or update != self.update:
            raise ValueError(f"update {update} completed, in training is {self._describe_training()}")
        for trained in self.in_training:
            del self._groups[trained]
        self._finished -= len(self.in_training)
        self.in_training = ()
        self.update += 1

    def _describe_training(self) -> str:
        return f"update {self.update}" if self.in_training else "none"

    # Resume

    def restore(
        self,
        *,
        update: int,
        next_position: int,
        groups: Iterable[UntrainedGroup],
        in_training: Sequence[str] = (),
    ) -> None:
        """Continue from recorded facts; only on a scheduler that has done nothing yet.

        update       durable updates; every engine restarts at this version or a newer one
        groups       all untrained groups, those of `in_training` among them. The remaining episodes of a
                     group start anew, so its v0 is that of its finished episodes, or `update` without any
        in_training  batch recorded for update `update`, which is not durable: it is trained again as it was

        Too many untrained groups merely close admission until they are trained. Raises ConfigError
        where they cannot be trained within `max_lag`, as after a resume with a smaller L or G.
        """
        if self._groups or self.update or self.next_position or self._engines:
            raise ValueError("restore() continues a run; this scheduler has already begun another")
        known = {group.group_id: group for group in groups}
        for name in in_training:
            if name not in known or not known[name].finished:
                raise ValueError(f"group {name} is in training but not among the finished untrained groups")
        training = [known[name] for name in in_training]
        waiting = [group for group in known.values() if group.group_id not in set(in_training)]
        refuse_too_old(training, waiting, update, self.groups_per_batch, self.max_lag)
        if self.schedule == "constant":
            refuse_unplanned(waiting, self.groups_per_batch, self.max_lag)
        self.update, self.next_position = update, next_position
        self._groups, self.in_training = known, tuple(in_training)
        self._finished = sum(group.finished for group in known.values())
        self._lowest = update


def _age(group: UntrainedGroup) -> tuple[int, int]:
    return group.oldest_version, group.position
