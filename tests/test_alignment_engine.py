"""Every sampled token can be recomputed, bit for bit, from the ids before it: engine against a packed run."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from rz_agent.kernels import operations
from rz_agent.rollout.engine import Completion
from rz_agent.trajectory import Sampling
from tiny_engine import SHAPES, bits, engine_of, ragged
from tiny_qwen import packed_logprobs

MODELS = list(SHAPES)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("batch", [1, 2, 3, 5, 16, 33])
def test_no_token_differs_whatever_the_batch(model: str, batch: int) -> None:
    harness = engine_of(model)
    prompts = harness.prompts(*ragged(batch), seed=batch)
    completions = asyncio.run(harness.sample(prompts, max_tokens=12))
    assert harness.differing(prompts, completions) == (0, 12 * batch)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("temperature", [0.7, 1.3])
def test_no_token_differs_at_another_temperature(model: str, temperature: float) -> None:
    harness = engine_of(model)
    prompts = harness.prompts(*ragged(9), seed=1)
    completions = asyncio.run(harness.sample(prompts, sampling=Sampling(temperature=temperature)))
    assert harness.differing(prompts, completions, temperature=temperature) == (0, 16 * 9)


@pytest.mark.parametrize("model", MODELS)
def test_no_token_differs_when_prefills_are_cut_into_chunks_beside_decoding(model: str) -> None:
    """Prompts of many steps' worth of tokens, so each is prefilled in pieces, and past a tile of keys."""
    harness = engine_of(model)
    prompts = harness.prompts(700, 3, 1100, 161, 40, seed=2)
    assert max(map(len, prompts)) > 4 * harness.config.max_num_batched_tokens
    completions = asyncio.run(harness.sample(prompts, max_tokens=[20, 40, 10, 3, 33]))
    assert harness.differing(prompts, completions) == (0, 106)


@pytest.mark.parametrize("model", MODELS)
def test_a_prefix_read_from_the_cache_gives_the_bits_of_a_cold_prefill(model: str) -> None:
    harness = engine_of(model)
    prompts = harness.prompts(200, 97, seed=3)
    asyncio.run(harness.publish(seed=3))
    cold, warm = (asyncio.run(harness.sample(prompts)) for _ in range(2))
    assert [c.cached_tokens for c in cold] == [0, 0]
    assert all(
        c.cached_tokens >= len(p) - 2 * harness.config.block_size for p, c in zip(prompts, warm, strict=True)
    )
    for a, b in zip(cold, warm, strict=True):
        assert (a.token_ids == b.token_ids).all()
        assert (bits(a.logprobs) == bits(b.logprobs)).all()
    assert harness.differing(prompts, warm) == (0, 32)


@pytest.mark.parametrize("model", MODELS)
def test_no_token_of_a_conversation_differs_turn_after_turn(model: str) -> None:
    """Each turn continues the previous ids with an observation; its prefix comes from the cache."""
    harness = engine_of(model)
    conversations = harness.prompts(*ragged(7), seed=4)
    observations = harness.prompts(*[31, 4, 60] * 7, seed=5)
    cached = 0
    for turn in range(3):
        completions = asyncio.run(harness.sample(conversations, max_tokens=[9 + i for i in range(7)]))
        assert harness.differing(conversations, completions) == (0, 84)
        cached += sum(c.cached_tokens for c in completions)
        conversations = [
            [*ids, *c.token_ids.tolist(), *observations[7 * turn + i]]
            for i, (ids, c) in enumerate(zip(conversations, completions, strict=True))
        ]
    assert cached > 0


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_a_score_equals_what_decoding_said(model: str, temperature: float) -> None:
    harness = engine_of(model)
    prompts = harness.prompts(400, 3, 50, seed=6)
    completions = asyncio.run(harness.sample(prompts, sampling=Sampling(temperature=temperature)))
    for prompt, completion in zip(prompts, completions, strict=True):
        ids = [*prompt, *completion.token_ids.tolist()]
        for cold in (True, False):
            scored = asyncio.run(harness.engine.score(ids, temperature=temperature, cold=cold))
            assert scored.shape == (len(ids),)
            assert np.isnan(scored[0])
            assert (bits(scored[len(prompt) :]) == bits(completion.logprobs)).all()


@pytest.mark.parametrize("model", MODELS)
def test_a_seeded_request_is_the_same_alone_and_in_any_company(model: str) -> None:
    """Tokens and log-probabilities, although its long prompt is prefilled in chunks."""
    harness = engine_of(model)
    prompts = harness.prompts(333, 7, 90, seed=7)
    together = asyncio.run(harness.sample(prompts, seed=40))
    for i, (prompt, completion) in enumerate(zip(prompts, together, strict=True)):
        alone = asyncio.run(harness.sample([prompt], seed=40 + i))[0]
        assert (alone.token_ids == completion.token_ids).all()
        assert (bits(alone.logprobs) == bits(completion.logprobs)).all()


@pytest.mark.parametrize("model", MODELS)
def test_each_token_of_a_request_in_flight_across_updates_has_the_bits_of_its_own_version(model: str) -> None:
    harness = engine_of(model)
    prompts = harness.prompts(5, 170, 60, seed=8)
    first = harness.engine.version

    async def updated_while_running() -> list[Completion]:
        running = asyncio.create_task(harness.sample(prompts, max_tokens=300))
        for seed in (81, 82):
            await asyncio.sleep(0.4)
            await harness.publish(seed)
        return await running

    completions = asyncio.run(updated_while_running())
    versions = np.concatenate([c.versions for c in completions])
    assert set(versions.tolist()) == {first, first + 1, first + 2}
    assert all((np.diff(c.versions) >= 0).all() for c in completions)
    assert harness.differing(prompts, completions) == (0, 900)


def test_aligned_engine_and_learner_name_the_same_contract() -> None:
    assert engine_of("tied").engine.contract == operations("aligned").contract()


# --- the check can see a difference -----------------------------------------------------------------------


def test_a_standard_learner_differs_from_the_engine_in_most_tokens() -> None:
    harness = engine_of("tied")
    prompts = harness.prompts(*ragged(9), seed=1)
    completions = asyncio.run(harness.sample(prompts))
    different, tokens = harness.differing(prompts, completions, scorer=operations("standard"))
    assert different > tokens / 2


def test_a_stock_engine_differs_from_the_aligned_learner_past_one_tile_of_keys() -> None:
    harness = engine_of("tied", "standard")
    assert harness.engine.contract != operations("aligned").contract()
    prompts = harness.prompts(700, 1100, 900, seed=9)
    completions = asyncio.run(harness.sample(prompts))
    different, _ = harness.differing(prompts, completions)
    assert different > 0


def test_a_stock_engine_serves_the_weights_that_it_was_updated_to() -> None:
    """Tied embeddings included: the output head's packed copy follows."""
    harness = engine_of("tied", "standard")
    asyncio.run(harness.publish(seed=10))
    prompts = harness.prompts(20, 30, seed=10)
    completions = asyncio.run(harness.sample(prompts))
    for prompt, completion in zip(prompts, completions, strict=True):
        assert (completion.versions == harness.engine.version).all()
        scored = asyncio.run(harness.engine.score([*prompt, *completion.token_ids.tolist()]))
        assert np.abs(scored[len(prompt) :] - completion.logprobs).max() < 1e-4
    # Against the model itself, not the engine's own word.
    standard = operations("standard")
    sequences = [[*p, *c.token_ids.tolist()] for p, c in zip(prompts, completions, strict=True)]
    truth = packed_logprobs(standard, harness.shape, harness.present, sequences)
    for prompt, completion, expected in zip(prompts, completions, truth, strict=True):
        assert np.abs(expected[len(prompt) - 1 :].numpy() - completion.logprobs).max() < 1e-3
