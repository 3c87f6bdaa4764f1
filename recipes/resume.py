"""Bring the learner of a run to where its journal left off; `rollout.resume` does so for the scheduler.

    restore_learner     newest checkpoint, then every later batch again: the same checksums
    write_missing_figures   updates that are durable and not yet in metrics.jsonl
    refuse_differences  a run that its audit stopped stays stopped until a person says otherwise
    unfinished          groups with episodes still to run

Invariants: nothing is sampled before the learner stands at the last published version; a finished
episode is never run again, a consumed batch is trained exactly once in the history that survives
(a batch whose update is not durable is trained as it was recorded), and no position is skipped.
A new run is the resume of an empty journal: there is one path, not two.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ..errors import Interrupted, RunStopped
from ..journal import GroupProgress, Journal, Resume, UpdateRecord
from ..learner.audit import Audit
from ..learner.ranks import AnyLearner
from ..trajectory import Group
from ..weight_store import WeightManifest, WeightStore, tensor_checksums, weights_digest
from .environment_figures import environment_figures
from .metrics_writer import MetricsWriter, read_metrics
from .progress import Observer


def restore_learner(
    learner: AnyLearner, journal: Journal, store: WeightStore, run_dir: Path, observer: Observer
) -> WeightManifest:
    """Load the checkpoint and repeat the batches after it; returns the manifest of the present weights.

    Raises Interrupted between two updates when a person asks for the end, and RunStopped if a repeated
    update does not give the recorded weights bit for bit.
    """
    point = journal.resume()
    if point.checkpoint is not None:
        observer.phase("loading the checkpoint", point.checkpoint)
        learner.load(run_dir / point.checkpoint)
    for record in point.replay:
        if observer.stop.is_set():
            raise Interrupted(
                f"stopped while update {record.update + 1} of {point.update} was to be repeated"
            )
        observer.phase("repeating", f"update {record.update + 1} of {point.update}")
        replay(learner, record, [journal.group(name) for name in record.group_ids], store)
    return store.put(learner.version, learner.weights())


def replay(learner: AnyLearner, record: UpdateRecord, groups: Sequence[Group], store: WeightStore) -> None:
    """Make a recorded update again and keep its weights; RunStopped unless they are the recorded ones."""
    learner.train(groups)
    weights = learner.weights()
    digest = weights_digest(tensor_checksums(weights))
    if digest != record.weights_checksum:
        raise RunStopped(
            f"update {record.update}, repeated from the journal, gives weights {digest[:16]} "
            f"instead of {record.weights_checksum[:16]}\n  The machine, the thread count or a package "
            "differs from the one that made the run; go on there, or start a new run from its export."
        )
    store.put(learner.version, weights)


def write_missing_figures(journal: Journal, audit: Audit, figures: MetricsWriter) -> None:
    """Figures of durable updates that a kill left unwritten: the learner's as recorded, the audit anew."""
    for record in journal.updates()[figures.last_update :]:
        groups = [journal.group(name) for name in record.group_ids]
        figures.write(
            {
                **record.metrics,
                **environment_figures(episode for group in groups for episode in group),
                **audit.check(groups).metrics(),
                "update": record.version,
                "policy_version": record.version,
            }
        )


def refuse_differences(run_dir: Path, since: int) -> None:
    """RunStopped where the last update told of before this life, or one told of now, failed its audit.

    since  the last update whose figures an earlier life wrote
    Going on for one update with "warn" is how a person says that a difference is known.
    """
    for line in read_metrics(run_dir)[max(0, since - 1) :]:
        if line.get("audit/differing"):
            raise RunStopped(
                f"the audit found {line['audit/differing']} differing of {line['audit/tokens']} tokens in "
                f'update {line["update"]}\n  Set audit.on_mismatch = "warn" to go on regardless, or run '
                "`rz-agent audit RUN` for the whole report."
            )


def unfinished(point: Resume) -> list[GroupProgress]:
    """Groups with episodes still to run, by position."""
    return [group for group in point.untrained if not group.complete]
