"""How fast an engine with aligned kernels decodes, beside the fast one: vLLM as it comes.

    await throughput_gate(plan, vocabulary) -> Gate

Both engines run side by side, each in a process of its own (vLLM's batch invariance is a setting of a
process), and take turns, so that what else the machine does falls on both. Ask for it on an idle machine.
Waits: the caller for two engines; on a GPU vLLM compiles the fast one for a minute.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager

import numpy as np

from ...kernels.vllm_settings import KernelsName
from ...rollout.engine import Engine, make_engine
from ...rollout.engine_config import EngineConfig
from ...trajectory import Sampling
from .conditions import Plan
from .gates import Gate

LEAST = 0.95  # of the fast engine's tokens a second
PASSES = 3
_AT_ONCE, _PROMPT, _NEW = 32, 16, 64
_SIDES: tuple[KernelsName, ...] = ("standard", "aligned")


async def throughput_gate(plan: Plan, vocabulary: int) -> Gate:
    """Decoding `_AT_ONCE` requests: the aligned engine's share of the fast one's rate."""
    rng = np.random.default_rng(0)
    new = min(_NEW, plan.context - _PROMPT - 1)
    async with both_engines(_config(plan, _PROMPT + new)) as engines:
        rates = await alternately(engines, lambda: prompts(rng, _AT_ONCE, _PROMPT, vocabulary), new)
    ratio = statistics.median(a / f for a, f in zip(rates["aligned"], rates["standard"], strict=True))
    aligned, fast = (statistics.median(rates[name]) for name in ("aligned", "standard"))
    return Gate(
        name="throughput",
        holds=ratio >= LEAST,
        says=f"decoding {_AT_ONCE} requests: {aligned:,.0f} tokens/s, {ratio:.2f} of the fast {fast:,.0f}",
    )


def _config(plan: Plan, length: int) -> EngineConfig:
    return plan.engine(max(_AT_ONCE * 2, length)).model_copy(
        update={"mode": "async", "graphs": True, "max_model_len": length, "max_num_seqs": _AT_ONCE}
    )


def prompts(rng: np.random.Generator, count: int, length: int, vocabulary: int) -> list[list[int]]:
    """Random ones, so that no two share a prefix."""
    drawn: list[list[int]] = rng.integers(0, vocabulary, (count, length)).tolist()
    return drawn


@asynccontextmanager
async def both_engines(config: EngineConfig) -> AsyncIterator[Mapping[KernelsName, Engine]]:
    """A fast engine and an aligned one, started one after the other and closed after the block."""
    async with AsyncExitStack() as stack:
        engines: dict[KernelsName, Engine] = {}
        for name in _SIDES:
            engines[name] = make_engine(config.model_copy(update={"kernels": name}))
            stack.push_async_callback(engines[name].close)
            await engines[name].start()
        yield engines


async def alternately(
    engines: Mapping[KernelsName, Engine], draw: Callable[[], Sequence[Sequence[int]]], new: int,
    passes: int = PASSES,
) -> dict[KernelsName, list[float]]:  # fmt: skip
    """Sampled tokens a second of each engine in each pass but a first; both get the same requests."""
    rates: dict[KernelsName, list[float]] = {name: [] for name in engines}
    for number in range(passes + 1):
        asked = draw()
        for name, engine in engines.items():
            rate = await _rate(engine, asked, new)
            if number:
                rates[name].append(rate)
    return rates


async def _rate(engine: Engine, asked: Sequence[Sequence[int]], new: int) -> float:
    began = time.perf_counter()
    done = await asyncio.gather(
        *(
            engine.generate(prompt, Sampling(), max_tokens=new, stop_token_ids=(), seed=seed)
            for seed, prompt in enumerate(asked)
        )
    )
    return sum(len(completion.token_ids) for completion in done) / (time.perf_counter() - began)
