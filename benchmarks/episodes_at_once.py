"""How much of a slow environment's own rate the rollout loop keeps: episodes/s seen over episodes/s ideal.

    python benchmarks/episodes_at_once.py --model .cache/bench-tiny [--waves 8]

Each turn the environment thinks for 50 ms. The model is a null: it answers at once, with the same few words.
All else is what a training run has: renderer, scheduler, episode runner, journal on disk. `--waves` times as
many episodes are played as are in flight, from the first admission to the last record: the start, with all of
them at once, and the end, with none to follow, are part of it, and not all of it.
The ideal is episodes x turns x 50 ms / episodes in flight. "bare" is what the event loop alone keeps of it
here: as many coroutines that call the null model, sleep, and do nothing else.
All of it is one thread's work, and 200 in flight ask for 4,000 turns a second: where a turn costs that thread
more than 0.25 ms, or the machine is busy with other things, it cannot keep up. The last columns say what a
turn of the loop cost that thread, and the whole process. Nearly all of it is Python's own work, which takes a
quarter less in an interpreter built with profile-guided optimization, as distributions build theirs.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import platform
import sys
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, cast

import numpy as np
from one_batch import one_batch
from rich.console import Console
from rich.table import Table
from rz_agent.envs import AgentEnv, Episode, ListTaskset, Task, reward
from rz_agent.recipes import event_loop
from rz_agent.recipes.recipe import Recipe, parse
from rz_agent.recipes.rollout_side import open_environment
from rz_agent.rollout.engine import Completion, Engine
from rz_agent.rollout.renderer import Renderer

THINKS_S = 0.05
TURNS = 8
IN_FLIGHT = (10, 50, 200)
GROUP_SIZE = 4


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

    def __init__(self, renderer: Renderer, words: str) -> None:
        self._said = np.append(renderer.encode(words), np.int32(renderer.stop_token_ids[0]))
        self._logprobs = np.full(len(self._said), -1.0, np.float32)
        self._versions = np.zeros(len(self._said), np.int32)

    async def generate(self, prompt_ids: Sequence[int], sampling: Any, **arguments: Any) -> Completion:
        return Completion(
            token_ids=self._said,
            logprobs=self._logprobs,
            versions=self._versions,
            finish_reason="stop",
            prompt_tokens=len(prompt_ids),
            cached_tokens=0,
        )


async def bare(engine: NullEngine, in_flight: int, waves: int) -> float:
    """Seconds for as many turns without any loop."""

    async def episodes() -> None:
        for _ in range(waves * TURNS):
            await engine.generate((), None)
            await asyncio.sleep(THINKS_S)

    began = time.perf_counter()
    await asyncio.gather(*(episodes() for _ in range(in_flight)))
    return time.perf_counter() - began


def recipe_of(model: Path, in_flight: int) -> Recipe:
    """A run of the slow environment with so many episodes in flight."""
    rollout = {"group_size": GROUP_SIZE, "episodes_in_flight": in_flight, "max_turns": TURNS}
    tables = {"env": {"id": f"{__name__}:SlowEnv"}, "model": {"path": str(model)}, "rollout": rollout}
    return parse(tables, "benchmark")


async def measured(model: Path, in_flight: int, waves: int) -> list[str]:
    """The row of one number of episodes in flight."""
    recipe = recipe_of(model, in_flight)
    null = NullEngine(Renderer(model), "It is 7, I think.")
    engine = cast(Engine, null)
    episodes = in_flight * waves // GROUP_SIZE * GROUP_SIZE
    async with AsyncExitStack() as stack:
        environment = await open_environment(stack, recipe)
        await one_batch(recipe, model, engine, environment, episodes=GROUP_SIZE)  # imports, caches
        thread, process = time.thread_time(), time.process_time()
        _, seconds = await one_batch(recipe, model, engine, environment, episodes=episodes)
        spent = [time.thread_time() - thread, time.process_time() - process]
    ideal = episodes * TURNS * THINKS_S / in_flight
    most = waves * TURNS * THINKS_S / await bare(null, in_flight, waves)
    times = [f"{ideal:.2f}", f"{seconds:.2f}", f"{ideal / seconds:.3f}", f"{most:.3f}"]
    return [str(in_flight), str(episodes), *times, *(f"{1000 * s / (episodes * TURNS):.3f}" for s in spent)]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model", type=Path, required=True, help="a folder with a tokenizer and chat template"
    )
    parser.add_argument("--waves", type=int, default=8, help="episodes of each place in flight (default: 8)")
    parser.add_argument("--in-flight", type=int, nargs="+", default=IN_FLIGHT, help="how many at once")
    given = parser.parse_args()
    table = Table(
        "in flight", "episodes", "ideal s", "seen s", "share", "bare", "thread ms/turn", "CPU ms/turn"
    )
    for in_flight in given.in_flight:
        table.add_row(*event_loop.run(measured(given.model, in_flight, given.waves)))
    Console(width=100).print(table)
    python = f"Python {platform.python_version()} of {sys.base_prefix}"
    print(f"cores {os.cpu_count()}, load average {os.getloadavg()[0]:.1f}, {python}")


if __name__ == "__main__":
    main()
