"""Build the boxes of a run, bring them to where its journal stands, and let the controller work.

    train(recipe, run_dir=..., resume=..., observer=...) -> Summary

A run's folder holds recipe.toml, the journal, checkpoints, weights, metrics.jsonl, TensorBoard events,
summary.json and summary.png. Starting is the slow part (the engine and the learner import much), so
the two are started side by side.
Errors that a breaker raises (exit code 3) end as a Summary, after the journal and the figures are
closed; everything else is raised.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Mapping
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Any

from ..envs.factory import EnvFactory
from ..errors import ConfigError, Interrupted, RunStopped, ungrouped
from ..journal import Journal
from ..learner.audit import Audit
from ..learner.ranks import AnyLearner
from ..rollout.dispatcher import Dispatcher
from ..rollout.engine import Engine
from ..rollout.episode import EpisodeRunner
from ..rollout.resume import restore
from ..rollout.scheduler import Scheduler
from ..sandboxes.pool import InfraBreaker
from ..weight_store import WeightStore
from . import event_loop, preflight, summary_plot
from .continuation import require_same
from .controller import ENGINE, Boxes, Controller, LearnerThread
from .evaluate import Evaluation
from .learner_side import check_launcher, learner_of, let_go
from .metrics_writer import MetricsWriter
from .model_source import model_folder
from .progress import LineObserver, Observer
from .publisher import Publisher
from .recipe import Recipe
from .resume import refuse_differences, restore_learner, unfinished, write_missing_figures
from .rollout_side import episode_runner, open_environment, start_engine
from .runs import JOURNAL, SUMMARY, new_run, save_recipe
from .summary import Summary, summarize, versions
from .weight_sender import check_transport, weight_sender

EXIT_CODES = {"done": 0, "data ended": 0, "interrupted": 130}


def train(
    recipe: Recipe, *, run_dir: Path | None = None, resume: bool = False, observer: Observer | None = None
) -> Summary:
    """Run to the end, to a breaker or to a person's request; writes summary.json and summary.png.

    Raises ConfigError, before there is a folder, for what cannot start.
    run_dir   the run's folder; None makes runs/<name of the recipe> in the current one
    resume    go on with the run in `run_dir`; a new run in a folder that already holds one is refused
    observer  who is told how it goes; None prints a line for each update
    Under torchrun the ranks above 0 call `learner_side.follow_rank_0` instead.
    """
    preflight.check(recipe)
    run_dir = run_dir or new_run(Path("runs"), recipe.name)
    observer = observer or LineObserver(sys.stdout, recipe.updates)
    return event_loop.run(Run(recipe, run_dir, observer).train(resume=resume))


class Run:
    """One process's life of a run."""

    def __init__(self, recipe: Recipe, run_dir: Path, observer: Observer) -> None:
        self._recipe, self._dir, self._observer = recipe, run_dir, observer
        self._in_learner = LearnerThread()

    async def train(self, *, resume: bool) -> Summary:
        contract, reason, code = "", "", RunStopped.exit_code
        try:
            async with AsyncExitStack() as stack:
                stack.callback(self._in_learner.close)
                journal = stack.enter_context(self._open_journal(resume=resume))
                boxes, pending = await self._build(stack, journal)
                contract = boxes.learner.contract
                controller = Controller(self._recipe, self._dir, boxes, self._in_learner)
                reason = await controller.run(*pending)
                code = EXIT_CODES[reason]
        except RunStopped as stopped:
            reason = str(stopped)
            self._observer.note(reason)
        except Interrupted as stopped:
            reason, code = "interrupted", stopped.exit_code
            self._observer.note(str(stopped))
        summary = summarize(self._dir, reason=reason, exit_code=code, contract=contract)
        summary.write()
        summary_plot.draw(self._dir)
        return summary

    def _open_journal(self, *, resume: bool) -> Journal:
        path = self._dir / JOURNAL
        if not resume and path.exists():
            raise ConfigError(
                source="train",
                key="run",
                value=str(self._dir),
                why="already holds a run",
                remedy=f"Go on with it (rz-agent train --resume {self._dir}) or name the new one otherwise.",
            )
        if path.exists():
            require_same(self._recipe, path)
        life = {"recipe": self._recipe.model_dump(mode="json"), "packages": versions()}
        journal = Journal.open(path, run=life)  # takes the lock: what follows is this process's to change
        save_recipe(self._dir, self._recipe)
        (self._dir / SUMMARY).unlink(missing_ok=True)  # it told how the life before this one ended
        return journal

    async def _build(self, stack: AsyncExitStack, journal: Journal) -> tuple[Boxes, Any]:
        recipe, observer = self._recipe, self._observer
        point = journal.resume()
        observer.phase("preparing the model", recipe.model.path)
        model_dir = await asyncio.to_thread(
            model_folder,
            recipe.model,
            lambda text: observer.phase("preparing the model", text),
            observer.stop.is_set,
        )
        store = WeightStore(self._dir / "weights")
        environment = await open_environment(stack, recipe, model_dir)
        observer.phase("starting the engine and the learner")
        engine, learner = await self._start(stack, model_dir, point.update)
        stack.push_async_callback(self._in_learner, let_go, learner)
        self._check_contracts(engine, learner)
        manifest = await self._in_learner(restore_learner, learner, journal, store, self._dir, observer)
        scheduler = self._scheduler()
        restore(scheduler, point)
        sender = await weight_sender(recipe, engine, learner)
        publisher = Publisher(engine, store, sender, observer.note)
        stack.push_async_callback(publisher.close)
        await publisher.publish(manifest)
        scheduler.acknowledged(ENGINE, manifest.version)
        runner = episode_runner(recipe, model_dir, engine, environment)
        boxes = Boxes(
            engine=engine,
            learner=learner,
            scheduler=scheduler,
            dispatcher=self._dispatcher(scheduler, journal, runner, environment),
            journal=journal,
            store=store,
            publisher=publisher,
            audit=Audit(
                score=learner.score, weights=store, contract=learner.contract, share=recipe.audit.share
            ),
            evaluation=Evaluation(recipe, model_dir, engine, environment, recipe.eval.episodes),
            figures=stack.enter_context(self._figures(point.update)),
            observer=observer,
        )
        known = boxes.figures.last_update
        await self._in_learner(write_missing_figures, boxes.journal, boxes.audit, boxes.figures)
        if recipe.audit.on_mismatch == "stop":
            refuse_differences(self._dir, since=known)
        return boxes, (unfinished(point), point.in_training)

    async def _start(self, stack: AsyncExitStack, model_dir: Path, version: int) -> tuple[Engine, AnyLearner]:
        """The two slow parts, side by side where they are in two processes."""
        recipe = self._recipe
        check_launcher(recipe)
        check_transport(recipe)
        if recipe.runtime == "ray":
            from .cluster import connected

            stack.enter_context(connected(recipe))
        build = partial(learner_of, recipe, model_dir, self._dir)
        if recipe.runtime == "local" and recipe.rollout.engine.mode == "inprocess":
            # One process has one torch.distributed world: whoever comes second must find it complete.
            engine = await start_engine(stack, recipe, model_dir, version)
            return engine, await self._in_learner(build)
        with ungrouped():
            async with asyncio.TaskGroup() as starting:
                engine_started = starting.create_task(start_engine(stack, recipe, model_dir, version))
                learner_built = starting.create_task(self._in_learner(build))
        return engine_started.result(), learner_built.result()

    def _scheduler(self) -> Scheduler:
        recipe = self._recipe
        return Scheduler(
            groups_per_batch=recipe.groups_per_batch,
            group_size=recipe.rollout.group_size,
            max_lag=recipe.lag.max_lag,
            total_updates=recipe.updates,
            schedule=recipe.lag.schedule,
        )

    def _dispatcher(
        self, scheduler: Scheduler, journal: Journal, runner: EpisodeRunner, environment: EnvFactory
    ) -> Dispatcher:
        recipe = self._recipe
        order = environment.taskset.order(recipe.seed, recipe.env.split)
        return Dispatcher(
            scheduler=scheduler,
            journal=journal,
            run_episode=runner.run,
            task_at=order.task_at,
            group_size=recipe.rollout.group_size,
            episodes_in_flight=recipe.rollout.episodes_in_flight,
            seed=recipe.seed,
            breaker=InfraBreaker(share=recipe.sandbox.infra_failed_share),
            on_infra_failure=recipe.sandbox.on_infra_failure,
        )

    def _figures(self, update: int) -> MetricsWriter:
        config: Mapping[str, Any] = self._recipe.model_dump(mode="json")
        return MetricsWriter(self._dir, self._recipe.tracking, keep_through=update, config=config)

    def _check_contracts(self, engine: Engine, learner: AnyLearner) -> None:
        if self._recipe.kernels == "aligned" and engine.contract != learner.contract:
            raise ConfigError(
                source="recipe",
                key="kernels",
                value="aligned",
                why=f"but the engine computes with {engine.contract} and the learner with {learner.contract}",
                remedy="Use one machine type and one version of vLLM and torch on both sides; see `doctor`.",
            )
