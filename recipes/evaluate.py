"""Measure a model on an environment: episodes of a split, no training, no journal.

pass@1 is the share of episodes that reach the full reward, over the episodes that count; masked ones
are reported and left out.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path

from .. import envs
from ..envs.factory import EnvFactory
from ..envs.task import Task, check_split
from ..errors import ungrouped
from ..rollout.engine import Engine
from ..rollout.episode import EpisodeRunner
from ..rollout.episode_request import EpisodeRequest, Signals, seed_of
from ..trajectory import Sampling, Trajectory
from . import event_loop
from .environment_figures import environment_figures
from .model_source import model_folder
from .recipe import Recipe
from .rollout_side import episode_runner, open_environment, start_engine

FULL_REWARD = 1.0
UNHEARD = Signals(first_request=lambda: None, first_token=lambda version: None)


def with_split(recipe: Recipe, asked: str | None, key: str = "--split") -> Recipe:
    """The recipe with the split to evaluate: the one asked for, else `eval.split`, else the only one.

    Raises ConfigError naming `key` where that leaves none. Loads the tasks only, so it can be asked before
    all else.
    """
    taskset = envs.load(recipe.env.id, **recipe.env.options).taskset
    only = len(taskset.splits) == 1
    split = asked or (taskset.splits[0] if only else recipe.eval.split)
    check_split(taskset, split, key=key)
    return recipe.model_copy(update={"eval": recipe.eval.model_copy(update={"split": split})})


def evaluate(recipe: Recipe, model_dir: Path | None = None, episodes: int | None = None) -> dict[str, float]:
    """Figures of a model on the tasks of `eval.split`, in their order, one episode each.

    model_dir  a Hugging Face folder; None takes the recipe's own model
    episodes   how many; None takes `eval.episodes`
    Raises ConfigError for a model or a split that does not exist.

    The engine's process imports the script that starts it, so a script asks whether it is the main one:

        if __name__ == "__main__":
            figures = rz_agent.evaluate(rz_agent.Recipe())
            print(figures["pass@1"], figures["reward/mean"])
    """
    recipe = with_split(recipe, None, key="eval.split")
    if model_dir is None:
        model_dir = model_folder(recipe.model)
    return event_loop.run(
        _evaluate(recipe, model_dir, recipe.eval.episodes if episodes is None else episodes)
    )


async def _evaluate(recipe: Recipe, model_dir: Path, episodes: int) -> dict[str, float]:
    async with AsyncExitStack() as stack:
        environment = await open_environment(stack, recipe, model_dir)
        engine = await start_engine(stack, recipe, model_dir, version=0)
        return await Evaluation(recipe, model_dir, engine, environment, episodes).run()


class Evaluation:
    """A fixed set of tasks, played on a running engine as often as asked, always from the same seeds."""

    def __init__(
        self, recipe: Recipe, model_dir: Path, engine: Engine, environment: EnvFactory, episodes: int
    ) -> None:
        chosen = recipe.eval
        sampling = Sampling(temperature=chosen.temperature, top_p=chosen.top_p, top_k=chosen.top_k)
        self._runner = episode_runner(recipe, model_dir, engine, environment, sampling)
        self._taskset, self._split, self._episodes = environment.taskset, chosen.split, episodes
        self._in_flight, self._seed = recipe.rollout.episodes_in_flight, recipe.seed

    async def run(self) -> dict[str, float]:
        """Figures of the policy that the engine holds now. ConfigError where the taskset lacks the split."""
        tasks = self._taskset.load(self._split)[: self._episodes]
        return figures(await play(self._runner, tasks, self._in_flight, self._seed))


async def play(runner: EpisodeRunner, tasks: Sequence[Task], in_flight: int, seed: int) -> list[Trajectory]:
    """One episode of each task, at most `in_flight` at once, in the order of the tasks."""
    room = asyncio.Semaphore(in_flight)

    async def one(number: int, task: Task) -> Trajectory:
        name = f"e{number:07d}"
        request = EpisodeRequest(
            task=task, group_id=name, episode_id=name, index=0, seed=seed_of("eval", seed, number)
        )
        async with room:
            return await runner.run(request, UNHEARD)

    with ungrouped():
        async with asyncio.TaskGroup() as playing:
            running = [playing.create_task(one(number, task)) for number, task in enumerate(tasks)]
    return [episode.result() for episode in running]


def figures(played: Sequence[Trajectory]) -> dict[str, float]:
    """pass@1, mean reward and counts; a figure over no episode is absent."""
    kept = [episode for episode in played if not episode.masked]
    found = {"episodes": float(len(played)), "masked": float(len(played) - len(kept))}
    if kept:
        found["pass@1"] = sum(episode.reward >= FULL_REWARD for episode in kept) / len(kept)
        found["reward/mean"] = sum(episode.reward for episode in kept) / len(kept)
        found["episode/turns"] = sum(episode.metrics["episode/turns"] for episode in kept) / len(kept)
    return {**found, **environment_figures(kept)}
