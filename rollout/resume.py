"""From the journal's record of a run to a scheduler that goes on with it.

Invariant: the episodes that were running start anew, at the resumed version or a newer one, so only finished
episodes make a group old. Nothing waits here.
"""

from __future__ import annotations

from ..journal import GroupProgress, Resume
from .lag_certificate import UntrainedGroup
from .scheduler import Scheduler


def restore(scheduler: Scheduler, facts: Resume) -> None:
    """Raises ConfigError where the scheduler's max_lag or batch size cannot continue the run."""
    scheduler.restore(
        update=facts.update,
        next_position=facts.next_position,
        groups=[_untrained(group, facts.update) for group in facts.untrained],
        in_training=facts.in_training,
    )


def _untrained(group: GroupProgress, update: int) -> UntrainedGroup:
    kept = group.oldest_version
    return UntrainedGroup(
        group_id=group.record.group_id,
        position=group.record.position,
        remaining=group.record.size - len(group.finished),
        oldest_version=update if kept is None else min(kept, update),
        kept_oldest=kept,
        requested=kept is not None,
        sampled=kept is not None,
        planned_update=group.record.planned_update,
    )
