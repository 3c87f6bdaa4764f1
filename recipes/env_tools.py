"""What `rz-agent env check` and `env run` do: try an environment's promises, play it by any agent.

    checked(recipe, only, heard) -> whether all that could be tried held
    chosen_tasks(recipe, number, task_id) -> the tasks to play
    await played(recipe, tasks, agent, heard)                  an agent that is no model
    await played_by_model(recipe, tasks, model_dir)            through the engine, as in an evaluation

Invariant: what is opened here is closed before the function returns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from itertools import islice
from pathlib import Path

from .. import envs
from ..envs.check import Finding, check
from ..envs.play import play_one
from ..envs.recording import Recorder, Recording
from ..envs.script import NewAgent, scripted
from ..envs.task import Task
from ..errors import ConfigError
from ..sandboxes.pool import SandboxPool
from ..trajectory import Sampling
from .evaluate import play
from .recipe import Recipe
from .rollout_side import episode_runner, open_environment, start_engine


async def checked(recipe: Recipe, only: str, heard: Callable[[Finding], None]) -> bool:
    """Try what the environment promises; whether something was tried and nothing failed."""
    async with SandboxPool.of(recipe.sandbox, run_id=recipe.name) as sandboxes:
        findings = await check(recipe.env.id, recipe.env.options, heard=heard, only=only, sandboxes=sandboxes)
    statuses = {finding.status for finding in findings}
    return "failed" not in statuses and "passed" in statuses


def chosen_tasks(recipe: Recipe, number: int, task_id: str | None) -> list[Task]:
    """The first tasks of the split `eval.split`, or the one of that id; ConfigError where it has none."""
    tasks = envs.load(recipe.env.id, **recipe.env.options).taskset.load(recipe.eval.split)
    if task_id is None:
        return list(islice(tasks, number))
    found = next((task for task in tasks if task.id == task_id), None)
    if found is None:
        raise ConfigError(
            source=f"environment {recipe.env.id}",
            key="--task",
            value=task_id,
            why=f"is no task of the split {recipe.eval.split}.",
            remedy=f"Its tasks are called {', '.join(repr(task.id) for task in islice(tasks, 3))}, ...",
        )
    return [found] * number


def own_agent(recipe: Recipe) -> NewAgent:
    """The environment's own scripted agent; ConfigError where it has none."""
    solve = envs.load(recipe.env.id, **recipe.env.options).scripted
    if solve is None:
        raise ConfigError(
            source=f"environment {recipe.env.id}",
            key="--agent",
            value="scripted",
            why="is not there.",
            remedy="Set the class attribute `scripted` (docs/environments.md), or use --agent model.",
        )
    return scripted(solve)


async def played(
    recipe: Recipe, tasks: Sequence[Task], agent: NewAgent, heard: Callable[[Recording], None]
) -> None:
    """One episode of each task, one after another; `heard` is told each as it ends."""
    async with AsyncExitStack() as stack:
        environment = await open_environment(stack, recipe)
        for task in tasks:
            heard(await play_one(environment, task, agent, name=recipe.env.id, options=recipe.env.options))


async def played_by_model(recipe: Recipe, tasks: Sequence[Task], model_dir: Path) -> list[Recording]:
    """One episode of each task, sampled as an evaluation samples."""
    recorders: list[Recorder] = []

    def watch(task: Task) -> Recorder:
        recorders.append(Recorder(recipe.env.id, recipe.env.options, task))
        return recorders[-1]

    chosen = recipe.eval
    sampling = Sampling(temperature=chosen.temperature, top_p=chosen.top_p, top_k=chosen.top_k)
    async with AsyncExitStack() as stack:
        environment = await open_environment(stack, recipe, model_dir)
        engine = await start_engine(stack, recipe, model_dir, version=0)
        runner = episode_runner(recipe, model_dir, engine, environment, sampling, watch)
        await play(runner, tasks, recipe.rollout.episodes_in_flight, recipe.seed)
    return [recorder.recording for recorder in recorders]
