"""The lag that a set of untrained groups must reach, and the argument that it stays within bounds.

    required_lag(oldest_versions, update, groups_per_batch) -> int
    refuse_too_old, refuse_unplanned      what a resume may not continue with

A token that version v sampled and update u trains on has lag u - v. A group is as old as its oldest
token, v0. Train G groups an update, oldest first, starting at update k: the i-th oldest group
(i = 0, 1, ...) is trained by update k + i // G at lag k + i // G - v0. The largest of these is the
*required lag* R(k). Oldest first is the best order there is (earliest deadline first), so a set of
groups can be trained within lag L if and only if R(k) <= L. Counted by version, R(k) <= L says:

    for every v, at most (v + L - k + 1) * G untrained groups have v0 <= v                 (*)

because those groups must fit into the updates k, ..., v + L.

Theorem. `rollout.scheduler.Scheduler` keeps (*) true, so no token is trained past L; and if episodes
end and engines acknowledge, some update or admission is always possible.

Write e for the lowest version that a live engine has acknowledged: every token sampled from now on
has a version >= e. U is the set of untrained groups: running, finished, and the batch in training
until its update is durable. v0 of a running group is a lower bound of its future oldest token.

1. Admission needs |U| < (e + L - k + 1) * G and adds a group of v0 = e. For v >= e the count in (*)
   is at most |U| + 1 <= (e + L - k + 1) * G <= (v + L - k + 1) * G; for v < e it does not change.
2. v0 of a group only rises: to e when its first request is about to be sent (what is sampled later
   is >= e), and to its true value when it finishes. Groups without a trainable token leave U. Both
   lower the counts. An acknowledgement changes e, which is not in (*).
3. A batch S is picked only if the rest has R(k + 1) <= L, that is (*) for U - S and k + 1. S stays
   in U, counted as G groups, until its update is durable. An admission meanwhile therefore has
   |U - S| + G < (e + L - k + 1) * G, hence |U - S| + 1 <= (e + L - k) * G: step 1 for k + 1. So when
   update k completes, (*) holds for k + 1. If S left the count when picked, an admission during the
   update could use its places twice; if e were the newest version, v0 = e would not bound the
   tokens of the engine that lags: both are violations that a simulation finds.
4. (*) at v = k - L - 1 says that no untrained group is older than k - L: update k trains within L.
5. Progress. Episodes have deadlines, so suppose that nothing runs. With G or more finished groups
   the G oldest are a valid batch (step 3 with max(N - G, 0) <= (v + L - k) * G). With fewer, the
   engines come to acknowledge k, and |U| < G <= (k + L - k + 1) * G admits another group; at the end
   of the data the rest is the last, short batch.

With L = 0 step 1 admits G groups of version k = e and step 3 trains exactly these: synchronous.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ..errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class UntrainedGroup:
    """What the scheduler knows of a group between its admission and the end of its update.

    remaining        episodes that still run
    oldest_version   v0: version of its oldest token that counts, or a lower bound while it runs
    kept_oldest      the same over its finished unmasked episodes; None where they have no action token
    requested        it may have sent a request: its tokens may be as old as oldest_version
    sampled          it has a token
    planned_update   as in its ticket
    """

    group_id: str
    position: int
    remaining: int
    oldest_version: int
    kept_oldest: int | None = None
    requested: bool = False
    sampled: bool = False
    planned_update: int | None = None

    @property
    def finished(self) -> bool:
        return self.remaining == 0


def required_lag(oldest_versions: Iterable[int], update: int, groups_per_batch: int) -> int:
    """Largest lag if these groups are trained oldest first, `groups_per_batch` an update, from `update` on.

    oldest_versions  v0 of each group: version of its oldest token or a lower bound of it
    returns          0 for no groups

    >>> required_lag([3, 3, 4], update=5, groups_per_batch=1)  # lags 2, 3 and 3
    3
    """
    ordered = sorted(oldest_versions)
    return max((update + i // groups_per_batch - v0 for i, v0 in enumerate(ordered)), default=0)


def refuse_too_old(
    training: Sequence[UntrainedGroup],
    waiting: Sequence[UntrainedGroup],
    update: int,
    groups_per_batch: int,
    max_lag: int,
) -> None:
    """Raises ConfigError unless the next updates can train these groups within `max_lag`.

    training  batch recorded for update `update`, which trains it whatever its size; may be empty
    waiting   the other untrained groups
    """
    needed = max(
        required_lag([g.oldest_version for g in training], update, max(len(training), 1)),
        required_lag([g.oldest_version for g in waiting], update + bool(training), groups_per_batch),
    )
    if needed > max_lag:
        raise ConfigError(
            source="resume",
            key="max_lag",
            value=max_lag,
            why=f"is too small for the {len(training) + len(waiting)} untrained groups of this run: from "
            f"update {update} on, with batches of {groups_per_batch}, one would be trained at lag {needed}",
            remedy=f"Resume with max_lag at least {needed}, or with more groups a batch.",
        )


def refuse_unplanned(waiting: Sequence[UntrainedGroup], groups_per_batch: int, max_lag: int) -> None:
    """Raises ConfigError unless "constant" can continue with the updates planned for these groups."""
    planned = Counter(group.planned_update for group in waiting)
    late = any(
        group.planned_update is None or group.planned_update > group.oldest_version + max_lag
        for group in waiting
    )
    if late or any(count > groups_per_batch for count in planned.values()):
        raise ConfigError(
            source="resume",
            key="schedule",
            value="constant",
            why="does not fit the untrained groups of this run, which another schedule, a larger max_lag "
            "or larger batches admitted",
            remedy='Resume with the values that the run began with, or with schedule = "bounded".',
        )
