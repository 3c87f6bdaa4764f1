"""One batch of episodes through the whole rollout loop, and nothing beside it: what the benchmarks time.

    await one_batch(recipe, model, engine, environment, episodes=200) -> tokens, seconds

Renderer, scheduler, dispatcher, episode runner and a journal on disk are those of a training run; there is no
learner, and the clock stands while they are made.
Waits: for the batch, or for the failure of one of its episodes.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from pathlib import Path

from rz_agent.envs.factory import EnvFactory
from rz_agent.journal import Journal
from rz_agent.recipes.recipe import Recipe
from rz_agent.recipes.rollout_side import episode_runner
from rz_agent.rollout.dispatcher import Dispatcher
from rz_agent.rollout.engine import Engine
from rz_agent.rollout.scheduler import Scheduler
from rz_agent.sandboxes.pool import InfraBreaker


async def one_batch(
    recipe: Recipe, model: Path, engine: Engine, environment: EnvFactory, *, episodes: int
) -> tuple[int, float]:
    """Sampled tokens and seconds. `episodes` is a multiple of the recipe's group size; a masked one fails."""
    rollout = recipe.rollout
    scheduler = Scheduler(
        groups_per_batch=episodes // rollout.group_size,
        group_size=rollout.group_size,
        max_lag=0,
        total_updates=1,
    )
    scheduler.acknowledged("engine", 0)
    with tempfile.TemporaryDirectory() as folder, Journal.open(Path(folder) / "j.sqlite", run={}) as journal:
        dispatcher = Dispatcher(
            scheduler=scheduler,
            journal=journal,
            run_episode=episode_runner(recipe, model, engine, environment).run,
            task_at=environment.taskset.order(recipe.seed).task_at,
            group_size=rollout.group_size,
            episodes_in_flight=rollout.episodes_in_flight,
            seed=recipe.seed,
            breaker=InfraBreaker(share=1.0),
        )
        began = time.perf_counter()
        rollouts = asyncio.create_task(dispatcher.run())
        batch = asyncio.create_task(dispatcher.next_batch())
        await asyncio.wait({rollouts, batch}, return_when=asyncio.FIRST_COMPLETED)
        if rollouts.done():
            await rollouts
        seconds = time.perf_counter() - began
        rollouts.cancel()
        await asyncio.gather(rollouts, return_exceptions=True)
        tally = dispatcher.take_tally()
    if tally.masked:
        raise RuntimeError(f"{tally.masked} of {tally.episodes} episodes were masked: nothing was measured")
    return tally.tokens, seconds
