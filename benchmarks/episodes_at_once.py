"""How much of a slow environment's own rate the rollout loop keeps: episodes/s seen over episodes/s ideal.

    python benchmarks/episodes_at_once.py --model .cache/bench-tiny [--episodes 200]

The model is a null: it answers at once, with the same few tokens. Each turn the environment thinks for 50 ms.
All else is what a training run has: renderer, scheduler, episode runner, journal on disk. The ideal is
episodes x turns x 50 ms / episodes in flight. Where that asks for more turns a second than a core makes, the
share falls; the last column says what a turn of the loop cost.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import tempfile
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, cast

import numpy as np
from rich.console import Console
from rich.table import Table
from rz_agent.envs import AgentEnv, Episode, ListTaskset, Task, reward
from rz_agent.journal import Journal
from rz_agent.recipes.recipe import Recipe, parse
from rz_agent.recipes.rollout_side import episode_runner, open_environment
from rz_agent.rollout.dispatcher import Dispatcher
from rz_agent.rollout.engine import Completion, Engine
from rz_agent.rollout.scheduler import Scheduler
from rz_agent.sandboxes.pool import InfraBreaker

THINKS_S = 0.05
TURNS = 8
IN_FLIGHT = (10, 50, 200)


class SlowEnv(AgentEnv):
    """Eight turns of any text, 50 ms each."""

    taskset = ListTaskset([Task(id=str(n), prompt=f"Count to {n}.") for n in range(1000)], name="slow")
    max_turns = TURNS

    async def reply(self, text: str) -> str | None:
        await asyncio.sleep(THINKS_S)
        return "Go on."

    @reward
    def none(self, task: Task, episode: Episode) -> float:
        return 0.0


class NullEngine:
    """Says the same at once, whatever it is asked."""

    version, contract = 0, "null"

    def __init__(self, said: Sequence[int]) -> None:
        self._ids = np.array(said, np.int32)

    async def generate(self, prompt_ids: Sequence[int], sampling: Any, **arguments: Any) -> Completion:
        stop = np.array(arguments["stop_token_ids"][:1], np.int32)
        ids = np.concatenate([self._ids, stop])
        return Completion(
            token_ids=ids,
            logprobs=np.full(len(ids), -1.0, np.float32),
            versions=np.zeros(len(ids), np.int32),
            finish_reason="stop",
            prompt_tokens=len(prompt_ids),
            cached_tokens=0,
        )


async def played(recipe: Recipe, model: Path, environment: Any, episodes: int) -> float:
    """Seconds for all episodes of one batch."""
    scheduler = Scheduler(
        groups_per_batch=episodes // recipe.rollout.group_size,
        group_size=recipe.rollout.group_size,
        max_lag=0,
        total_updates=1,
    )
    scheduler.acknowledged("engine", 0)
    with tempfile.TemporaryDirectory() as folder, Journal.open(Path(folder) / "j.sqlite", run={}) as journal:
        dispatcher = Dispatcher(
            scheduler=scheduler,
            journal=journal,
            run_episode=episode_runner(recipe, model, cast(Engine, NullEngine([5, 6, 7])), environment).run,
            task_at=environment.taskset.order(recipe.seed).task_at,
            group_size=recipe.rollout.group_size,
            episodes_in_flight=recipe.rollout.episodes_in_flight,
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
        assert dispatcher.take_tally().masked == 0
    return seconds


async def measure(model: Path, episodes: int) -> Table:
    """One row for each number of episodes in flight."""
    table = Table("in flight", "ideal s", "seen s", "share of the ideal", "CPU ms a turn")
    for in_flight in IN_FLIGHT:
        tables = {
            "env": {"id": "episodes_at_once:SlowEnv"},
            "model": {"path": str(model)},
            "rollout": {"group_size": 4, "episodes_in_flight": in_flight, "max_turns": TURNS},
        }
        recipe = parse(tables, "benchmark")
        async with AsyncExitStack() as stack:
            environment = await open_environment(stack, recipe)
            await played(recipe, model, environment, in_flight)  # imports, caches
            before = time.process_time()
            seconds = await played(recipe, model, environment, episodes)
            cpu = 1000 * (time.process_time() - before) / (episodes * TURNS)
        ideal = episodes * TURNS * THINKS_S / in_flight
        table.add_row(
            str(in_flight), f"{ideal:.2f}", f"{seconds:.2f}", f"{ideal / seconds:.3f}", f"{cpu:.2f}"
        )
    return table


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model", type=Path, required=True, help="a folder with a tokenizer and chat template"
    )
    parser.add_argument("--episodes", type=int, default=200)
    arguments = parser.parse_args()
    Console(width=100).print(asyncio.run(measure(arguments.model, arguments.episodes)))
    print(f"cores {os.cpu_count()}, load average {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
