"""REINFORCE Zero without a scheduler and without a journal: sample G groups, train on them, repeat.

The judge of `max_lag = 0`: it shares the engine, the episode loop and the learner with a run, and
nothing that decides what is sampled when.
"""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path

from rz_agent.envs import Task
from rz_agent.learner.learner import Learner
from rz_agent.recipes.recipe import Recipe
from rz_agent.recipes.rollout_side import episode_runner, open_environment, start_engine
from rz_agent.rollout.episode import EpisodeRunner
from rz_agent.rollout.episode_request import EpisodeRequest, Signals, seed_of
from rz_agent.trajectory import Group
from rz_agent.weight_store import WeightStore

UNHEARD = Signals(first_request=lambda: None, first_token=lambda version: None)


async def synchronous_loop(recipe: Recipe, model_dir: Path, scratch: Path) -> list[dict[str, object]]:
    """The learner's figures of each update, and the digest of the weights that it made."""
    figures: list[dict[str, object]] = []
    async with AsyncExitStack() as stack:
        environment = await open_environment(stack, recipe)
        engine = await start_engine(stack, recipe, model_dir, version=0)
        learner = Learner(model_dir, recipe.learner_config())
        store = WeightStore(scratch / "weights")
        runner = episode_runner(recipe, model_dir, engine, environment)
        tasks = environment.taskset.order(recipe.seed, recipe.env.split)
        for update in range(recipe.updates):
            positions = range(update * recipe.groups_per_batch, (update + 1) * recipe.groups_per_batch)
            groups = [await sample(runner, recipe, position, tasks[position]) for position in positions]
            made = learner.train(groups)
            manifest = store.put(learner.version, learner.weights())
            await engine.update(manifest)
            figures.append({**made, "digest": manifest.digest})
    return figures


async def sample(runner: EpisodeRunner, recipe: Recipe, position: int, task: Task) -> Group:
    """All episodes of one group, side by side."""
    name = f"g{position:07d}"
    requests = [
        EpisodeRequest(
            task=task,
            group_id=name,
            episode_id=f"{name}-{index}",
            index=index,
            seed=seed_of(recipe.seed, f"{name}-{index}"),
        )
        for index in range(recipe.rollout.group_size)
    ]
    played = await asyncio.gather(*(runner.run(request, UNHEARD) for request in requests))
    return Group(group_id=name, task_id=task.id, trajectories=tuple(played))
