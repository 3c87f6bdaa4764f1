"""What the harness costs: tokens/s of the whole rollout loop over tokens/s of the bare engine.

Both serve the same requests in one sitting: the loop (environment, renderer, scheduler, journal) runs
first and its requests are written down; then each episode's requests are replayed against the engine
with nothing around them. The prefix cache is emptied before every pass, and the passes alternate.

    python benchmarks/harness_efficiency.py --model models/smollm2 --dtype float32
    python benchmarks/harness_efficiency.py --model .cache/tiny-... --env python
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
from one_batch import one_batch
from rz_agent.envs import AgentEnv, Episode, ListTaskset, Task, reward
from rz_agent.learner.learner import Learner
from rz_agent.recipes.recipe import Recipe, parse
from rz_agent.recipes.rollout_side import open_environment, start_engine
from rz_agent.rollout.engine import Completion, Engine
from rz_agent.weight_store import WeightStore

QUESTION = "Tell me something about the number {n}, in a few words, and then go on when you are asked to."


class NullEnv(AgentEnv):
    """Three turns of any text; costs nothing."""

    taskset = ListTaskset([Task(id=str(n), prompt=QUESTION.format(n=n)) for n in range(1000)], name="null")
    max_turns = 3

    def reply(self, text: str) -> str | None:  # type: ignore[override]  # plain where the base is async
        return "Go on."

    @reward
    def none(self, task: Task, episode: Episode) -> float:
        return 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One call of the engine, and the episode that made it."""

    prompt: Sequence[int]
    arguments: dict[str, Any]


class Recorder:
    """An engine that writes down, by episode, what it was asked. An asyncio task is an episode."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.requests: dict[str, list[Request]] = defaultdict(list)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def generate(self, prompt: Sequence[int], sampling: Any, **arguments: Any) -> Completion:
        task = asyncio.current_task()
        assert task is not None
        self.requests[task.get_name()].append(
            Request(prompt=prompt, arguments={"sampling": sampling, **arguments})
        )
        completion = await self._engine.generate(prompt, sampling, **arguments)
        # Versions go up only to empty the cache; for the scheduler there is one, which nothing trains.
        return replace(completion, versions=np.zeros_like(completion.versions))


async def bare_engine(
    engine: Engine, episodes: Sequence[Sequence[Request]], in_flight: int
) -> tuple[int, float]:
    """Sampled tokens and seconds of the same requests, each episode's one after another."""
    room = asyncio.Semaphore(in_flight)

    async def replay(requests: Sequence[Request]) -> int:
        async with room:
            done = [await engine.generate(request.prompt, **request.arguments) for request in requests]
        return sum(len(completion.token_ids) for completion in done)

    began = time.perf_counter()
    tokens = sum(await asyncio.gather(*(replay(requests) for requests in episodes)))
    return tokens, time.perf_counter() - began


async def measure(recipe: Recipe, model: Path, passes: int) -> None:
    async with AsyncExitStack() as stack:
        environment = await open_environment(stack, recipe, model)
        engine = Recorder(await start_engine(stack, recipe, model, version=0))
        weights = Learner(model, recipe.learner_config()).weights()
        store = WeightStore(stack.enter_context(tempfile.TemporaryDirectory()))
        speeds: dict[str, list[float]] = defaultdict(list)
        version = 0
        for number in range(passes + 1):
            for what in ("loop", "bare"):
                version += 1
                await engine.update(store.put(version, weights))  # empties the prefix cache
                if what == "loop":
                    engine.requests.clear()
                    episodes = recipe.groups_per_batch * recipe.rollout.group_size
                    tokens, seconds = await one_batch(
                        recipe, model, cast(Engine, engine), environment, episodes=episodes
                    )
                else:
                    asked = list(engine.requests.values())
                    tokens, seconds = await bare_engine(
                        engine._engine, asked, recipe.rollout.episodes_in_flight
                    )
                if number:  # the first pass warms up
                    speeds[what].append(tokens / seconds)
                print(f"pass {number} {what}: {tokens} tokens in {seconds:.2f} s", flush=True)
        ratios = [a / b for a, b in zip(speeds["loop"], speeds["bare"], strict=True)]
        print(f"\n{'environment':24} {'loop tok/s':>12} {'bare tok/s':>12} {'loop/bare':>10}")
        loop, bare = statistics.median(speeds["loop"]), statistics.median(speeds["bare"])
        print(f"{recipe.env.id:24} {loop:12.0f} {bare:12.0f} {statistics.median(ratios):10.3f}")


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    arguments.add_argument("--model", type=Path, required=True, help="a Hugging Face folder")
    arguments.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    arguments.add_argument("--env", default="null", help='"null" or an environment of rz-agent')
    arguments.add_argument("--episodes", type=int, default=64)
    arguments.add_argument("--passes", type=int, default=3)
    given = arguments.parse_args()
    recipe = parse(
        {
            "groups_per_batch": given.episodes // 4,
            "model": {"path": str(given.model), "dtype": given.dtype},
            "env": {"id": f"{__name__}:NullEnv" if given.env == "null" else given.env},
            "rollout": {
                "episodes_in_flight": 64,
                "group_size": 4,
                "max_tokens": 48,
                "context_len": 512,
                "engine": {"max_num_seqs": 64},
            },
        },
        "benchmark",
    )
    asyncio.run(measure(recipe, given.model, given.passes))


if __name__ == "__main__":
    main()
