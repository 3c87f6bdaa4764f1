"""Two real engines as one: where requests go, what an update reaches, and what happens when one dies."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rz_agent.kernels.transfer.sources import InFile, Offer
from rz_agent.rollout.engine import Engine, EngineDead
from rz_agent.rollout.engine_pool import MAX_DEATHS, EnginePool
from rz_agent.rollout.prefix_affinity import PrefixAffinity
from rz_agent.rollout.vllm_inprocess import VllmInProcess
from tiny_engine import PLAIN, EngineHarness
from tiny_qwen import TIED

BLOCK = 32


@asynccontextmanager
async def pool_of_two(
    another: Callable[[EngineHarness], Engine] | None = None,
) -> AsyncIterator[tuple[EngineHarness, EnginePool]]:
    """A started pool over two in-process engines; the harness knows what each version must compute."""
    harness = EngineHarness(TIED, "aligned")
    replace = None if another is None else lambda: another(harness)
    engines = [the_same(harness) for _ in range(2)]
    pool = EnginePool(engines, block_size=BLOCK, another=replace)
    harness.engine = pool
    await pool.start()
    try:
        yield harness, pool
    finally:
        await pool.close()


class InTurn(VllmInProcess):
    """vLLM keeps the batch of the step in progress in a global, so engines of one process step in turn."""

    turn = threading.RLock()

    def _build(self) -> None:
        with self.turn:
            super()._build()
        for name in ("step", "collective_rpc"):
            setattr(self._engine, name, self._taking_turns(getattr(self._engine, name)))

    def _taking_turns(self, work: Callable[..., Any]) -> Callable[..., Any]:
        def in_turn(*arguments: Any, **options: Any) -> Any:
            with self.turn:
                return work(*arguments, **options)

        return in_turn


def the_same(harness: EngineHarness) -> Engine:
    return InTurn(harness.config)


def with_a_missing_model(harness: EngineHarness) -> Engine:
    return InTurn(harness.config.model_copy(update={"model": Path("/nowhere")}))


async def until_busy(pool: EnginePool) -> None:
    """Until each engine works on a request, so that a death interrupts some."""
    while not all(seat.load for seat in pool._seats):  # noqa: ASYNC110  the pool tells nobody its load
        await asyncio.sleep(0.001)


# --- routing ----------------------------------------------------------------------------------------------


@given(
    prompt=st.lists(st.integers(0, 5), min_size=0, max_size=200),
    more=st.lists(st.integers(0, 5), max_size=100),
    block=st.integers(1, 40),
)
def test_the_next_turn_finds_the_engine_of_the_turn_before(
    prompt: list[int], more: list[int], block: int
) -> None:
    affinity = PrefixAffinity(block)
    affinity.learn(prompt, 7)
    assert affinity.find([*prompt, *more]) == (7 if len(prompt) >= block else None)


def test_the_longest_known_beginning_wins() -> None:
    affinity = PrefixAffinity(2)
    affinity.learn([1, 2], 0)
    affinity.learn([1, 2, 3, 4], 1)
    affinity.learn([1, 2], 0)
    assert affinity.find([1, 2, 3, 4, 5]) == 1
    assert affinity.find([1, 2, 9, 4, 5]) == 0
    assert affinity.find([9, 2, 3, 4]) is None


def test_what_is_remembered_is_bounded_and_the_oldest_is_forgotten() -> None:
    affinity = PrefixAffinity(1, capacity=3)
    for token in range(5):
        affinity.learn([token], token)
    assert [affinity.find([token]) for token in range(5)] == [None, None, 2, 3, 4]


# --- engines ----------------------------------------------------------------------------------------------


def test_two_engines_share_the_work_and_a_conversation_stays_with_its_engine() -> None:
    async def go() -> None:
        async with pool_of_two() as (harness, pool):
            prompts = harness.prompts(64, 65, 66, 67, seed=1)
            first = await harness.sample(prompts, max_tokens=8)
            assert harness.differing(prompts, first) == (0, 32)
            assert sorted(seat.load for seat in pool._seats) == [0, 0]
            longer = [[*p, *c.token_ids.tolist(), 3] for p, c in zip(prompts, first, strict=True)]
            second = await harness.sample(longer, max_tokens=4)
            assert all(completion.cached_tokens >= 64 for completion in second)
            assert harness.differing(longer, second) == (0, 16)
            seats = {pool._affinity.find(prompt) for prompt in longer}
            assert seats == {0, 1}

    asyncio.run(go())


def test_an_update_reaches_every_engine_before_it_returns() -> None:
    async def go() -> None:
        async with pool_of_two() as (harness, pool):
            manifest = harness.manifest(seed=1)
            await pool.update(manifest)
            assert pool.version == 1
            assert [await engine.checksums() for engine in pool.engines] == [dict(manifest.checksums)] * 2
            assert await pool.checksums() == dict(manifest.checksums)

    asyncio.run(go())


def test_requests_of_a_dead_engine_are_sampled_again_and_its_replacement_serves_the_newest_weights() -> None:
    async def go() -> None:
        async with pool_of_two(the_same) as (harness, pool):
            await harness.publish(seed=1)
            killed, kept = pool.engines
            manifest = harness.manifest(seed=3)
            prepared = await pool.prepare(Offer(version=2, source=InFile(manifest.path)))
            assert prepared.fault is None
            prompts = harness.prompts(*range(20, 32), seed=2)
            sampling = asyncio.create_task(harness.sample(prompts, max_tokens=60))
            await until_busy(pool)
            await killed.close()
            completions = await sampling
            assert harness.differing(prompts, completions) == (0, 60 * len(prompts))
            assert min(c.versions.min() for c in completions) >= 1
            await pool.update(manifest)  # which the replacement has to read from its file
            assert len(pool.engines) == 2
            assert kept in pool.engines
            assert killed not in pool.engines
            assert pool.version == 2
            assert await pool.checksums() == dict(manifest.checksums)

    asyncio.run(go())


def test_a_death_with_nothing_to_replace_it_ends_the_pool_for_everyone() -> None:
    async def go() -> None:
        async with pool_of_two() as (harness, pool):
            sampling = asyncio.create_task(harness.sample(harness.prompts(20, 21), max_tokens=200))
            await until_busy(pool)
            await pool.engines[0].close()
            with pytest.raises(EngineDead, match="nothing replaces it: the engine was closed"):
                await sampling
            with pytest.raises(EngineDead):
                await pool.generate([1], PLAIN, max_tokens=1, stop_token_ids=(), seed=0)
            with pytest.raises(EngineDead):
                await pool.update(harness.manifest(seed=1, version=1))

    asyncio.run(go())


def test_replacements_that_die_too_end_the_pool_instead_of_starting_for_ever() -> None:
    async def go() -> None:
        async with pool_of_two(with_a_missing_model) as (_, pool):
            for engine in pool.engines:
                await engine.close()
            with pytest.raises(EngineDead, match=f"{MAX_DEATHS} engines died since the last update"):
                await pool.generate([1, 2], PLAIN, max_tokens=1, stop_token_ids=(), seed=0)

    asyncio.run(go())


class Refusing:
    """An engine that is well and has no room for what it is asked."""

    version, contract, asked = 0, "", 0

    async def start(self) -> None:
        pass

    async def generate(self, *_: object, **__: object) -> None:
        self.asked += 1
        raise ValueError("a prompt of 9 tokens leaves no room")

    async def close(self) -> None:
        pass


def test_a_request_that_cannot_be_served_is_asked_once_and_costs_no_engine() -> None:
    async def go() -> None:
        engines = [Refusing(), Refusing()]
        pool = EnginePool([cast(Engine, engine) for engine in engines], block_size=BLOCK)
        await pool.start()
        with pytest.raises(ValueError, match="leaves no room"):
            await pool.generate([1] * 9, PLAIN, max_tokens=1, stop_token_ids=(), seed=0)
        assert sum(engine.asked for engine in engines) == 1
        assert len(pool.engines) == 2
        await pool.close()

    asyncio.run(go())
