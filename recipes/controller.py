"""The training loop: takes a batch, makes an update, publishes it, audits it, writes it down.

    Dispatcher --group ids--> Controller --groups--> Learner --weights--> WeightStore --> Engine
                                   |                    |
                                   +--> Journal         +--> Audit (the batch, at its tokens' versions)

The order of one update k, and why:

    1  journal.consume(k, batch)    before the step: a killed step is repeated with the same batch
    2  learner.train(batch)         version k -> k + 1
    3  publisher.put                version k + 1 is on disk; the engine fetches it meanwhile
    4  journal.complete(k)          the update is durable; only now may anyone see its version
    5  publisher.publish, scheduler the engine takes it over between two steps and proves it by checksum
    6  audit, evaluation, figures   beside the rollouts that already sample from k + 1; a checkpoint where
                                    one is due (without it a resume repeats the update from the journal)

Who waits: the controller for a batch (5 wakes the rollout side, which may be waiting to admit) and
for each step in turn; rollouts go on during all of them. Everything the learner computes runs in one
thread of its own, so the event loop keeps serving episodes meanwhile.
The run ends when the updates are made, when the data ends, when a person asks (after a checkpoint), or
when anything raises: a differing token, a number that is not finite, a dead engine.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import ParamSpec, TypeVar

from ..errors import RunStopped
from ..journal import GroupProgress, Journal
from ..learner.audit import Audit, AuditReport, ColdScore, Difference
from ..learner.diagnostics import Metrics
from ..learner.ranks import AnyLearner
from ..rollout.dispatcher import Dispatcher, Tally
from ..rollout.engine import Engine
from ..rollout.scheduler import Scheduler
from ..trajectory import Group
from ..weight_store import WeightManifest, WeightStore
from .environment_figures import environment_figures
from .evaluate import Evaluation
from .metrics_writer import MetricsWriter
from .progress import Observer
from .publisher import Publisher
from .recipe import Recipe

P = ParamSpec("P")
R = TypeVar("R")
ENGINE = "engine"
EXPLAINED = 4  # segments whose difference is traced to its cause: each costs dozens of scorings


@dataclass(frozen=True, slots=True, kw_only=True)
class Boxes:
    """The parts of a run, already built and, after a resume, already where the journal left off."""

    engine: Engine
    learner: AnyLearner
    scheduler: Scheduler
    dispatcher: Dispatcher
    journal: Journal
    store: WeightStore
    publisher: Publisher
    audit: Audit
    evaluation: Evaluation
    figures: MetricsWriter
    observer: Observer


@dataclass(slots=True)
class Totals:
    """Counts over the updates that this process made."""

    updates: int = 0
    episodes: int = 0
    masked: int = 0
    audit_tokens: int = 0
    audit_differing: int = 0
    audit_max_abs_diff: float = 0.0
    named: list[Difference] = field(default_factory=list)


class StepClock:
    """Wall seconds of the parts of an update, each from the end of the part before it."""

    def __init__(self) -> None:
        self._last, self._seconds = time.monotonic(), dict[str, float]()

    def mark(self, part: str) -> None:
        """`part` ends now."""
        now = time.monotonic()
        self._seconds[part], self._last = now - self._last, now

    def figures(self) -> dict[str, float]:
        """Seconds of "waited", "trained", "published" and, up to now, "audited"."""
        self.mark("audited")
        return dict(self._seconds)


class LearnerThread:
    """Runs the learner's work in one thread: torch and Megatron keep state by thread."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="learner")

    async def __call__(self, work: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        return await asyncio.get_running_loop().run_in_executor(self._pool, lambda: work(*args, **kwargs))

    def close(self) -> None:
        self._pool.shutdown(wait=True)


class Controller:
    """Makes the updates of one run."""

    def __init__(self, recipe: Recipe, run_dir: Path, boxes: Boxes, learner_thread: LearnerThread) -> None:
        self._recipe, self._run_dir, self._boxes = recipe, run_dir, boxes
        self._in_learner = learner_thread
        self.totals = Totals()
        self._clock = StepClock()

    async def run(self, unfinished: Sequence[GroupProgress], in_training: Sequence[str]) -> str:
        """Make updates to the end; returns why it ended: "done", "data ended" or "interrupted".

        unfinished   groups of a resumed run with episodes still to run
        in_training  the batch that a resumed run had begun to train on
        """
        boxes = self._boxes
        rollouts = asyncio.create_task(boxes.dispatcher.run(unfinished), name="rollouts")
        try:
            batch: Sequence[str] | None = in_training or await self._next_batch(rollouts)
            while batch:
                await self._update(batch)
                if boxes.observer.stop.is_set():
                    break
                batch = await self._next_batch(rollouts)
        finally:
            rollouts.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await rollouts
        await self._save(boxes.scheduler.update)
        if boxes.scheduler.update >= self._recipe.updates:
            return "done"
        return "interrupted" if boxes.observer.stop.is_set() else "data ended"

    async def _next_batch(self, rollouts: asyncio.Task[None]) -> list[str] | None:
        """The next batch; None at the end or when a person asked to stop. Raises what ended the rollouts."""
        if not self._boxes.scheduler.finished:
            self._boxes.observer.phase("waiting for episodes")
        batch = asyncio.create_task(self._boxes.dispatcher.next_batch())
        stop = asyncio.create_task(_until_set(self._boxes.observer.stop))
        try:
            await asyncio.wait({batch, stop, rollouts}, return_when=asyncio.FIRST_COMPLETED)
            if rollouts.done() and (failure := rollouts.exception()):
                raise failure
            return await batch if batch.done() or rollouts.done() else None
        finally:
            batch.cancel()
            stop.cancel()

    async def _update(self, batch: Sequence[str]) -> None:
        boxes, update = self._boxes, self._boxes.scheduler.update
        self._clock.mark("waited")
        boxes.observer.phase("training", f"update {update + 1}")
        if tuple(boxes.journal.consumed(update)) != tuple(batch):
            await asyncio.to_thread(boxes.journal.consume, update, batch)
        groups = await asyncio.to_thread(lambda: [boxes.journal.group(name) for name in batch])
        metrics = await self._in_learner(boxes.learner.train, groups)
        self._clock.mark("trained")
        manifest = await self._make_durable(update, metrics)
        boxes.scheduler.completed(update)
        transfer = await boxes.publisher.publish(manifest)
        boxes.scheduler.acknowledged(ENGINE, manifest.version)
        boxes.dispatcher.wake()
        self._clock.mark("published")
        report = await self._in_learner(boxes.audit.check, groups)
        measured = await self._evaluate(update + 1)
        said = environment_figures(episode for group in groups for episode in group)
        self._write(update, {**metrics, **transfer, **said, **measured}, report)
        if report.differing:
            await self._judge(report, groups)
        if (update + 1) % self._recipe.checkpoint.every == 0:  # the last state is saved when the run ends
            await self._save(update + 1)
        await asyncio.to_thread(forget_weights, boxes.store, boxes.scheduler, self._recipe.audit.every)

    async def _evaluate(self, version: int) -> dict[str, float]:
        """The held-out figures where they are due; rollouts go on, the learner waits."""
        chosen = self._recipe.eval
        if not chosen.every or version % chosen.every:
            return {}
        self._boxes.observer.phase("evaluating", f"version {version}")
        found = await self._boxes.evaluation.run()
        return {f"eval/{chosen.split}/{name}": value for name, value in found.items()}

    async def _make_durable(self, update: int, metrics: Metrics) -> WeightManifest:
        """The version's weights, then the journal's word that the update is done."""
        boxes, version = self._boxes, update + 1
        weights = await self._in_learner(boxes.learner.weights)
        manifest = await boxes.publisher.put(version, weights)
        await asyncio.to_thread(
            boxes.journal.complete,
            update,
            version=version,
            weights_checksum=manifest.digest,
            metrics=metrics,
        )
        return manifest

    async def _save(self, version: int) -> None:
        """A checkpoint of the present state, unless there is one; older ones go."""
        path = checkpoint_name(version)
        recorded = await asyncio.to_thread(self._boxes.journal.checkpoint)
        if version and recorded != (version, path):  # the folder alone may be half a killed life's work
            self._boxes.observer.phase("saving a checkpoint", path)
            await self._in_learner(self._boxes.learner.save, self._run_dir / path)
            await asyncio.to_thread(self._boxes.journal.record_checkpoint, version, path)
            forget_checkpoints(self._run_dir, self._recipe.checkpoint.keep)

    def _write(self, update: int, metrics: Metrics, report: AuditReport) -> None:
        tally, totals = self._boxes.dispatcher.take_tally(), self.totals
        figures = {
            **metrics,
            **report.metrics(),
            **rollout_figures(tally, self._clock.figures()),
            "update": update + 1,
            "policy_version": update + 1,
        }
        totals.updates += 1
        totals.episodes += tally.episodes
        totals.masked += tally.masked
        totals.audit_tokens += report.tokens
        totals.audit_differing += report.differing
        totals.audit_max_abs_diff = max(totals.audit_max_abs_diff, report.max_abs_diff)
        self._boxes.figures.write(figures)
        self._boxes.observer.update(figures)

    async def _judge(self, report: AuditReport, groups: Sequence[Group]) -> None:
        """Name the cause of the first differences; stop the run unless the recipe says to warn."""
        boxes = self._boxes
        explained = await explain(report.differences, groups, boxes, self._in_learner)
        for difference in explained:
            boxes.journal.record_event("audit", {"difference": str(difference)})
            boxes.observer.note(str(difference))
        self.totals.named += explained
        if self._recipe.audit.on_mismatch == "stop":
            raise RunStopped(
                f"the audit found {report.differing} differing of {report.tokens} tokens "
                f"(largest difference {report.max_abs_diff:.3g}): {explained[0]}\n  Set audit.on_mismatch = "
                '"warn" to go on regardless, or run `rz-agent audit RUN` for the whole report.'
            )


async def explain(
    differences: Sequence[Difference], groups: Sequence[Group], boxes: Boxes, in_learner: LearnerThread
) -> list[Difference]:
    """The first difference of each of the first few segments, with its cause."""
    trajectories = {t.episode_id: t for group in groups for t in group}
    first = {(d.episode_id, d.segment, d.version): d for d in reversed(differences)}
    explained = []
    for difference in list(first.values())[::-1][:EXPLAINED]:
        segment = trajectories[difference.episode_id].segments[difference.segment]
        version = boxes.engine.version
        cold = await boxes.engine.score(
            segment.token_ids.tolist(), temperature=segment.sampling.temperature, cold=True
        )
        cause = await in_learner(
            boxes.audit.diagnose, segment, difference.version, ColdScore(version=version, logprobs=cold)
        )
        explained.append(replace(difference, cause=cause))
    return explained


def rollout_figures(tally: Tally, seconds: Mapping[str, float]) -> dict[str, float]:
    """What the rollout side did during one update, as rates and shares of its wall time."""
    total = sum(seconds.values())
    figures = {
        "time/rollout_wait_s": seconds["waited"],
        "time/publish_s": seconds["published"],
        "time/audit_s": seconds["audited"],
        "throughput/tokens_per_s": tally.tokens / total,
        "throughput/episodes_per_s": tally.episodes / total,
        "rollout/idle_share": min(1.0, tally.idle_s / total),
        "learner/idle_share": seconds["waited"] / total,
    }
    if tally.episodes:
        figures["sandbox/infra_failed_rate"] = tally.masked / tally.episodes
        figures["sandbox/waited_s"] = tally.waited_s / tally.episodes
    if tally.prompt_tokens:
        figures["cache/hit_share"] = tally.cached_tokens / tally.prompt_tokens
    return figures


def forget_weights(store: WeightStore, scheduler: Scheduler, every: int) -> None:
    """Keep the versions that untrained tokens may carry (each `every`-th) and the newest."""
    oldest = min([scheduler.update, *(group.oldest_version for group in scheduler.untrained)])
    store.retain([v for v in store.versions() if v >= oldest and (v % every == 0 or v == scheduler.update)])


def checkpoint_name(version: int) -> str:
    """Where a version's checkpoint lies, below the run's folder."""
    return f"checkpoints/{version:06d}"


def forget_checkpoints(run_dir: Path, keep: int) -> None:
    """Remove all but the newest checkpoints, once the journal names the newest."""
    for old in sorted((run_dir / "checkpoints").glob("[0-9]*"))[:-keep]:
        shutil.rmtree(old)


async def _until_set(event: threading.Event) -> None:
    while not event.is_set():  # noqa: ASYNC110  a signal handler sets it, outside of any event loop
        await asyncio.sleep(0.1)
