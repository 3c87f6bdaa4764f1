"""What the journal says: the records of groups, updates and events, and the state that a run resumes from.

Frozen and plain; the episodes themselves are `trajectory.Trajectory`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRecord:
    """An admitted group: `size` episodes of one task.

    position          index in the seeded task order
    admitted_version  no token of it is older
    planned_update    the update that will train it, where the schedule plans that
    """

    group_id: str
    task_id: str
    position: int
    size: int
    admitted_version: int
    planned_update: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupProgress:
    """An admitted group and its finished episodes.

    finished        indices
    oldest_version  lowest version among their unmasked action tokens; None without any
    """

    record: GroupRecord
    finished: frozenset[int]
    oldest_version: int | None

    @property
    def complete(self) -> bool:
        return len(self.finished) == self.record.size

    @property
    def left(self) -> bool:
        """Finished with nothing to train on: all masked, or without an action token."""
        return self.complete and self.oldest_version is None


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateRecord:
    """A durable update: the batch it trained on and the version it made."""

    update: int
    group_ids: tuple[str, ...]
    version: int
    weights_checksum: str
    metrics: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    time: float
    kind: str
    payload: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Resume:
    """Where a run stands: all that a new process needs, read in one transaction.

    update         durable updates, and the version that engines restart at
    next_position  first position that was never admitted
    untrained      groups running or finished and not in a durable update, by position; without those
                   that finished with nothing to train on
    in_training    batch consumed for update `update`, which is not durable; empty if none
    checkpoint     newest checkpoint; None: the initial weights
    replay         durable updates after it, in order: training them again gives their checksums
    """

    update: int
    next_position: int
    untrained: tuple[GroupProgress, ...]
    in_training: tuple[str, ...]
    checkpoint: str | None
    replay: tuple[UpdateRecord, ...]
