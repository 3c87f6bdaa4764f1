"""The engine's promises beside the bits: requests, updates, cancellation, death. All on real vLLM engines."""

from __future__ import annotations

import asyncio
import math
import multiprocessing
import os
import random
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from rz_agent.errors import MissingLogprob, NonFinite
from rz_agent.kernels import operations, vllm_versions
from rz_agent.rollout import vllm_request
from rz_agent.rollout.engine import EngineDead
from rz_agent.rollout.engine_config import EngineConfig
from rz_agent.rollout.vllm_inprocess import VllmInProcess
from rz_agent.trajectory import Sampling
from safetensors.torch import load_file, save_file
from tiny_engine import EngineHarness, bits, engine_of
from tiny_qwen import BFLOAT16, TIED, packed_logprobs, random_weights
from weight_ways import every_way_beside_requests


@asynccontextmanager
async def own_engine(*, mode: str = "inprocess") -> AsyncIterator[EngineHarness]:
    """An engine that the test may break."""
    harness = EngineHarness(TIED, "aligned", mode)  # type: ignore[arg-type]
    await harness.engine.start()
    try:
        yield harness
    finally:
        await harness.engine.close()


def vllm_model(harness: EngineHarness) -> Any:  # vLLM carries no types here
    engine = harness.engine
    assert isinstance(engine, VllmInProcess)
    return engine._engine.model_executor.driver_worker.model_runner.model


# --- configuration ----------------------------------------------------------------------------------------


def test_a_step_too_small_for_its_requests_is_refused_with_both_values() -> None:
    with pytest.raises(ValidationError, match="max_num_batched_tokens = 8 is smaller than max_num_seqs = 9"):
        EngineConfig(model=Path("m"), max_num_batched_tokens=8, max_num_seqs=9)


@pytest.mark.parametrize(
    "wrong", [{"block_size": 40}, {"dtype": "float16"}, {"kernels": "fast"}, {"treads": 2}]
)
def test_a_setting_that_cannot_run_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ValidationError, match=next(iter(wrong))):
        EngineConfig.model_validate({"model": "m", **wrong})


# --- requests ---------------------------------------------------------------------------------------------


def test_a_completion_has_one_logprob_and_version_for_each_token() -> None:
    harness = engine_of("tied")
    (completion,) = asyncio.run(harness.sample(harness.prompts(9), max_tokens=7))
    assert completion.finish_reason == "length"
    assert completion.token_ids.dtype == np.int32
    assert completion.logprobs.dtype == np.float32
    assert len(completion.token_ids) == len(completion.logprobs) == len(completion.versions) == 7
    assert (completion.versions == harness.engine.version).all()
    assert completion.prompt_tokens == 9


def test_a_stop_token_ends_the_completion_and_belongs_to_it() -> None:
    harness = engine_of("tied")
    prompt = harness.prompts(9)[0]
    free = asyncio.run(harness.sample([prompt], max_tokens=30))[0]
    stop = int(free.token_ids[11])
    first = free.token_ids.tolist().index(stop)
    stopped = asyncio.run(
        harness.engine.generate(prompt, Sampling(), max_tokens=30, stop_token_ids=(stop,), seed=0)
    )
    assert stopped.finish_reason == "stop"
    assert stopped.token_ids.tolist() == free.token_ids[: first + 1].tolist()
    assert (bits(stopped.logprobs) == bits(free.logprobs[: first + 1])).all()


def test_a_models_generation_config_changes_nothing() -> None:
    """The model's folder asks for temperature 0.1, top_k 2 and other stop tokens."""
    harness = engine_of("tied")
    assert (harness.config.model / "generation_config.json").exists()
    prompts = harness.prompts(*[4] * 30, seed=11)
    completions = asyncio.run(harness.sample(prompts, max_tokens=20))
    assert all(len(c.token_ids) == 20 for c in completions)
    assert harness.differing(prompts, completions) == (0, 600)
    assert {2, 3} & {int(t) for c in completions for t in c.token_ids[:-1]}


def test_a_context_that_the_model_lacks_is_refused_at_the_start() -> None:
    config = engine_of("tied").config.model_copy(update={"max_model_len": 1537})
    with pytest.raises(EngineDead, match="max_position_embeddings = 1536"):
        asyncio.run(VllmInProcess(config).start())


def test_a_completion_ends_where_the_context_does() -> None:
    harness = engine_of("tied")
    prompt = harness.prompts(harness.config.max_model_len - 3)[0]
    (completion,) = asyncio.run(harness.sample([prompt], max_tokens=50))
    assert (len(completion.token_ids), completion.finish_reason) == (3, "length")
    ids = [*prompt, *completion.token_ids.tolist()]
    scored = asyncio.run(harness.engine.score(ids))
    assert (bits(scored[len(prompt) :]) == bits(completion.logprobs)).all()


def test_mu_is_the_logprob_under_the_filters() -> None:
    harness = engine_of("tied")
    prompt = harness.prompts(9)[0]
    (completion,) = asyncio.run(harness.sample([prompt], sampling=Sampling(temperature=0.7, top_k=5)))
    ids = [*prompt, *completion.token_ids.tolist()]
    scored = asyncio.run(harness.engine.score(ids, temperature=0.7))[len(prompt) :]
    # Truncation only raises the probability of what is left.
    assert (completion.logprobs > scored).all()
    assert (completion.logprobs <= 0).all()


def test_requests_without_a_seed_draw_differently() -> None:
    harness = engine_of("tied")
    prompt = harness.prompts(9)[0]
    completions = asyncio.run(harness.sample([prompt] * 3, seed=None))
    assert len({tuple(c.token_ids.tolist()) for c in completions}) == 3


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "temperature", "named"),
    [
        ([], 5, 1.0, "a prompt of 0 tokens"),
        ([1] * 1536, 5, 1.0, "max_model_len = 1536"),
        ([1], 0, 1.0, "max_tokens = 0"),
        ([1], 5, 0.0, "temperature = 0.0"),
    ],
)
def test_a_request_that_cannot_be_served_is_refused_and_the_engine_lives(
    prompt: list[int], max_tokens: int, temperature: float, named: str
) -> None:
    harness = engine_of("tied")
    with pytest.raises(ValueError, match=named):
        asyncio.run(
            harness.sample([prompt], max_tokens=max_tokens, sampling=Sampling(temperature=temperature))
        )
    assert len(asyncio.run(harness.sample([[1]]))[0].token_ids) == 16


def test_an_id_outside_the_vocabulary_is_refused_and_the_engine_lives() -> None:
    harness = engine_of("tied")
    with pytest.raises(ValueError, match="prompt id 300 at position 1"):
        asyncio.run(harness.sample([[1, harness.shape.vocab]]))
    assert len(asyncio.run(harness.sample([[1]]))[0].token_ids) == 16


def test_a_cancelled_caller_aborts_its_request_and_no_other() -> None:
    harness = engine_of("tied")
    engine = harness.engine
    assert isinstance(engine, VllmInProcess)

    async def cancel_one() -> tuple[int, int]:
        kept = asyncio.create_task(harness.sample(harness.prompts(9), max_tokens=400))
        dropped = asyncio.create_task(harness.sample(harness.prompts(9, seed=1), max_tokens=1400))
        await asyncio.sleep(0.2)
        dropped.cancel()
        with pytest.raises(asyncio.CancelledError):
            await dropped
        length = len((await kept)[0].token_ids)
        return length, await engine._do(engine._engine.get_num_unfinished_requests)

    assert asyncio.run(cancel_one()) == (400, 0)


def test_a_prompt_of_one_token_scores_as_nan_alone() -> None:
    scored = asyncio.run(engine_of("tied").engine.score([7]))
    assert scored.shape == (1,)
    assert np.isnan(scored[0])


# --- vLLM's answers ---------------------------------------------------------------------------------------


def answer(**changes: Any) -> SimpleNamespace:
    """What vLLM gives for a finished request of three tokens, the last one after an update to version 5."""
    spans = [SimpleNamespace(version="4", start=0, end=2), SimpleNamespace(version="5", start=2, end=3)]
    logprobs = SimpleNamespace(token_ids=[7, 8, 9], logprobs=[-0.5, 0.0, -2.0])
    sampled = {
        "token_ids": [7, 8, 9],
        "logprobs": logprobs,
        "weight_versions": spans,
        "finish_reason": "stop",
    }
    return SimpleNamespace(
        request_id="r1",
        prompt_token_ids=[1, 2],
        num_cached_tokens=None,
        outputs=[SimpleNamespace(**(sampled | changes))],
    )


def flat(token_ids: list[int], logprobs: list[float]) -> SimpleNamespace:
    return SimpleNamespace(token_ids=token_ids, logprobs=logprobs)


@pytest.fixture
def engine_tags_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_versions, "tags_versions", lambda: True)


@pytest.mark.usefixtures("engine_tags_versions")
def test_the_spans_of_an_answer_give_every_token_its_version() -> None:
    made = vllm_request.completion(answer())
    assert made.token_ids.tolist() == [7, 8, 9]
    assert made.logprobs.tolist() == [-0.5, 0.0, -2.0]
    assert made.versions.tolist() == [4, 4, 5]
    assert (made.finish_reason, made.prompt_tokens, made.cached_tokens) == ("stop", 2, 0)


@pytest.mark.usefixtures("engine_tags_versions")
@pytest.mark.parametrize(
    ("changes", "error", "named"),
    [
        ({"logprobs": None}, MissingLogprob, "3 tokens without log-probabilities"),
        ({"logprobs": flat([7, 8], [-1, -1])}, MissingLogprob, "2 log-probabilities for 3 tokens"),
        ({"logprobs": flat([7, 8, 9], [-1, -1])}, MissingLogprob, "2 log-probabilities for 3 tokens"),
        ({"logprobs": flat([7, 9, 8], [-1, -1, -1])}, MissingLogprob, "token 1 is 8, .* that of 9"),
        ({"logprobs": flat([7, 8, 9], [-1, -math.inf, -1])}, NonFinite, "token 1 .* -inf"),
        ({"logprobs": flat([7, 8, 9], [-1, -1, math.nan])}, NonFinite, "token 2 .* nan"),
        ({"logprobs": flat([7, 8, 9], [0.1, -1, -1])}, NonFinite, "token 0 .* 0.1"),
        ({"weight_versions": None}, MissingLogprob, "token 0 of 3 came without a weight version"),
        ({"weight_versions": answer().outputs[0].weight_versions[:1]}, MissingLogprob, "token 2 of 3"),
        ({"finish_reason": "error"}, RuntimeError, "request r1 ended with finish_reason 'error'"),
    ],
)
def test_an_answer_that_lacks_something_of_a_token_is_an_error_and_never_filled_in(
    changes: dict[str, Any], error: type[Exception], named: str
) -> None:
    with pytest.raises(error, match=named):
        vllm_request.completion(answer(**changes))


# --- the prefix cache -------------------------------------------------------------------------------------


def test_a_prefix_of_an_older_version_is_never_read() -> None:
    harness = engine_of("tied")
    prompts = harness.prompts(150, seed=12)

    async def sample_update_sample() -> list[int]:
        cached = []
        for seed in (120, 121):
            await harness.publish(seed)
            for _ in range(2):
                (completion,) = await harness.sample(prompts)
                assert harness.differing(prompts, [completion]) == (0, 16)
                cached.append(completion.cached_tokens)
        return cached

    assert asyncio.run(sample_update_sample()) == [0, 128, 0, 128]


def test_the_salt_of_a_prefix_names_its_version_and_a_cold_request_has_its_own() -> None:
    salts = [vllm_request.salt(version) for version in range(3)]
    cold = [vllm_request.salt(version, cold=number) for version, number in enumerate(range(3))]
    assert len({*salts, *cold}) == 6


def test_the_salt_alone_keeps_an_older_versions_prefix_from_being_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With a cache that an update does not clear."""
    harness = engine_of("tied")
    prompts = harness.prompts(150, seed=21)
    engine: Any = harness.engine
    monkeypatch.setattr(engine._engine, "reset_prefix_cache", lambda **_: True)

    async def sample_update_sample() -> list[int]:
        cached = []
        for seed in (210, 211):
            await harness.publish(seed)
            for _ in range(2):
                (completion,) = await harness.sample(prompts)
                assert harness.differing(prompts, [completion]) == (0, 16)
                cached.append(completion.cached_tokens)
        return cached

    assert asyncio.run(sample_update_sample()) == [0, 128, 0, 128]


def test_a_cold_score_neither_reads_nor_leaves_a_prefix() -> None:
    harness = engine_of("tied")
    prompt = harness.prompts(150, seed=13)[0]

    async def cached_after_score(cold: bool) -> int:
        await harness.publish(seed=13)
        await harness.engine.score(prompt, cold=cold)
        return (await harness.sample([prompt]))[0].cached_tokens

    assert asyncio.run(cached_after_score(cold=True)) == 0
    assert asyncio.run(cached_after_score(cold=False)) == 128


# --- updates ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", ["tied", "untied", "bfloat16"])
def test_after_an_update_every_tensor_held_has_the_manifests_checksum(model: str) -> None:
    harness = engine_of(model)
    manifest = harness.manifest(seed=14)
    asyncio.run(harness.engine.update(manifest))
    assert harness.engine.version == manifest.version
    assert asyncio.run(harness.engine.checksums()) == dict(manifest.checksums)


@pytest.mark.parametrize("model", ["tied", "untied", "bfloat16"])
def test_after_an_update_the_packed_output_head_holds_the_new_weights(model: str) -> None:
    harness = engine_of(model)
    asyncio.run(harness.sample([[1, 2]]))
    asyncio.run(harness.publish(seed=15))
    packed = vllm_model(harness).lm_head.rz_linear._packed
    name = "model.embed_tokens.weight" if harness.shape.tied else "lm_head.weight"
    identity = torch.eye(harness.shape.hidden, dtype=harness.shape.dtype)
    assert torch.equal(packed(identity).t(), harness.present[name])


def test_an_update_to_a_version_that_is_not_newer_is_refused_and_the_engine_lives() -> None:
    harness = engine_of("tied")
    asyncio.run(harness.publish(seed=16))
    served = harness.engine.version
    manifest = replace(harness.store.manifest(served), version=served)
    with pytest.raises(ValueError, match=f"already serves {served}"):
        asyncio.run(harness.engine.update(manifest))
    assert len(asyncio.run(harness.sample([[1]]))[0].token_ids) == 16


@pytest.mark.parametrize("fault", ["damaged", "incomplete"])
def test_an_update_that_does_not_arrive_whole_kills_the_engine_and_wakes_everyone(fault: str) -> None:
    async def broken_update() -> None:
        async with own_engine() as harness:
            manifest = harness.manifest(seed=17)
            tensors = load_file(manifest.path)
            name = "model.layers.1.self_attn.k_proj.weight"
            if fault == "damaged":
                tensors[name][3, 3] += 1
                expected = f"holds {name} with checksum"
            else:
                del tensors[name]
                manifest = replace(
                    manifest, checksums={k: v for k, v in manifest.checksums.items() if k != name}
                )
                expected = "does not cover all of parameter model.layers.1.self_attn.qkv_proj.weight"
            save_file(tensors, manifest.path)
            waiting = asyncio.create_task(harness.sample([[1]], max_tokens=1000))
            await asyncio.sleep(0.1)
            with pytest.raises(EngineDead, match=expected):
                await harness.engine.update(manifest)
            with pytest.raises(EngineDead, match=expected):
                await asyncio.wait_for(waiting, 20)
            with pytest.raises(EngineDead, match=expected):
                await harness.sample([[1]])

    asyncio.run(broken_update())


def test_weights_that_give_nan_stop_the_run_instead_of_becoming_a_number() -> None:
    async def sample_nan() -> None:
        async with own_engine() as harness:
            weights = random_weights(TIED, seed=0)
            weights["model.norm.weight"][5] = float("nan")
            await harness.engine.update(harness.store.put(1, weights))
            with pytest.raises(NonFinite, match="token 0 has log-probability nan"):
                await harness.sample([[1, 2, 3]])
            with pytest.raises(NonFinite, match="nan"):
                await harness.engine.score([1, 2, 3])

    asyncio.run(sample_nan())


# --- life and death ---------------------------------------------------------------------------------------


def test_a_crash_of_the_engine_thread_wakes_everyone_with_its_reason() -> None:
    async def crash() -> None:
        async with own_engine() as harness:
            engine = harness.engine
            assert isinstance(engine, VllmInProcess)
            waiting = asyncio.create_task(harness.sample([[1], [2]], max_tokens=1000))
            await asyncio.sleep(0.1)

            def out_of_memory() -> None:
                # The step after this command reads freed bookkeeping, as after any internal error of vLLM.
                engine._engine.engine_core.engine_core.scheduler.running = None

            await engine._do(out_of_memory)
            with pytest.raises(EngineDead, match="the engine stopped: "):
                await asyncio.wait_for(waiting, 20)
            with pytest.raises(EngineDead, match="the engine stopped: "):
                await engine.score([1, 2])

    asyncio.run(crash())


def test_closing_an_engine_wakes_who_waits_and_can_be_repeated() -> None:
    async def close_early() -> None:
        async with own_engine() as harness:
            waiting = asyncio.create_task(harness.sample([[1]], max_tokens=1500))
            await asyncio.sleep(0.1)
            await harness.engine.close()
            with pytest.raises(EngineDead, match="was closed"):
                await asyncio.wait_for(waiting, 20)

    asyncio.run(close_early())


def test_a_model_that_cannot_be_loaded_says_so_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(EngineDead, match="did not start"):
        asyncio.run(VllmInProcess(EngineConfig(model=tmp_path, mode="inprocess")).start())


def test_building_an_engine_leaves_the_process_as_it_was() -> None:
    """Seeds, thread settings and the environment belong to the learner and the sandboxes too."""
    set_num_threads, environment = torch.set_num_threads, dict(os.environ)
    torch.manual_seed(3)
    np.random.seed(3)
    random.seed(3)
    expected = torch.rand(1).item(), np.random.rand(), random.random()
    torch.manual_seed(3)
    np.random.seed(3)
    random.seed(3)

    async def start_and_stop() -> None:
        async with own_engine():
            pass

    asyncio.run(start_and_stop())
    assert (torch.rand(1).item(), np.random.rand(), random.random()) == expected
    assert torch.set_num_threads is set_num_threads
    ours = ("LD_PRELOAD", "OMP_NUM_THREADS", "VLLM_LOGGING_LEVEL", "VLLM_PLUGINS")
    assert {k: os.environ.get(k) for k in ours} == {k: environment.get(k) for k in ours}


def test_the_plugin_leaves_an_engine_that_did_not_ask_alone() -> None:
    """Stock linear layers that dropped their weights, and the stock attention plan."""
    from rz_agent.kernels.vllm_plugin import install
    from rz_agent.rollout.vllm_process import building_an_engine, release
    from rz_agent.rollout.vllm_request import engine_args
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.engine.llm_engine import LLMEngine
    from vllm.v1.executor.uniproc_executor import UniProcExecutor

    harness = engine_of("tied")
    install()
    foreign = {**engine_args(harness.config), "additional_config": {}}
    with building_an_engine(threads=1):
        config = EngineArgs(**foreign).create_engine_config()
        stock = LLMEngine(config, UniProcExecutor, log_stats=False, multiprocess_mode=False)
    model = stock.model_executor.driver_worker.model_runner.model
    assert not any("rz_linear" in module.__dict__ for module in model.modules())
    assert model.model.layers[0].mlp.down_proj.weight.numel() == 0
    release(stock)


# --- the engine in its own process ------------------------------------------------------------------------


@pytest.mark.slow
def test_the_engine_in_its_own_process_keeps_every_promise_and_its_death_wakes_everyone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One start, many promises: starting it costs most of the test."""

    async def cleared(**_: bool) -> bool:
        return True

    async def session() -> None:
        async with own_engine(mode="async") as harness:
            prompts = harness.prompts(5, 170, 60, 400, seed=18)
            completions = await harness.sample(prompts, sampling=Sampling(temperature=0.7))
            assert harness.differing(prompts, completions, temperature=0.7) == (0, 64)
            assert {int(v) for c in completions for v in c.versions} == {0}

            running = asyncio.create_task(harness.sample(prompts, max_tokens=300))
            dropped = asyncio.create_task(harness.sample(prompts, max_tokens=300))
            await asyncio.sleep(0.3)
            dropped.cancel()
            manifest = harness.manifest(seed=19)
            await harness.engine.update(manifest)
            completions = await running
            assert {int(v) for c in completions for v in c.versions} == {0, 1}
            assert harness.differing(prompts, completions) == (0, 1200)
            assert await harness.engine.checksums() == dict(manifest.checksums)
            with pytest.raises(asyncio.CancelledError):
                await dropped

            (cold,), (warm,) = [await harness.sample([prompts[1]]) for _ in range(2)]
            ids = [*prompts[1], *warm.token_ids.tolist()]
            scored = await harness.engine.score(ids, cold=True)
            assert (bits(scored[170:]) == bits(warm.logprobs)).all()
            assert (bits(cold.logprobs) == bits(warm.logprobs)).all()
            assert warm.cached_tokens > 0
            with pytest.raises(ValueError, match="max_tokens = 0"):
                await harness.sample([[1]], max_tokens=0)

            # The salt alone keeps the versions apart, where an update leaves the cache as it is.
            engine: Any = harness.engine
            with monkeypatch.context() as patched:
                patched.setattr(engine._engine, "reset_prefix_cache", cleared)
                await harness.publish(seed=20)
            (newer,) = await harness.sample([prompts[1]])
            assert newer.cached_tokens == 0
            assert harness.differing([prompts[1]], [newer]) == (0, 16)

            await every_way_beside_requests(harness)

            waiting = asyncio.create_task(harness.sample([[1]], max_tokens=1500))
            await asyncio.sleep(0.2)
            (core,) = [p for p in multiprocessing.active_children() if "EngineCore" in p.name]
            assert core.pid is not None
            os.kill(core.pid, signal.SIGKILL)
            before = time.monotonic()
            with pytest.raises(EngineDead):
                await asyncio.wait_for(waiting, 30)
            with pytest.raises(EngineDead):
                await asyncio.wait_for(harness.sample([[1]]), 30)
            assert time.monotonic() - before < 30

    asyncio.run(session())


@pytest.mark.slow
def test_an_update_that_arrives_damaged_kills_the_engine_in_its_own_process() -> None:
    async def session() -> None:
        async with own_engine(mode="async") as harness:
            manifest = harness.manifest(seed=17)
            tensors = load_file(manifest.path)
            tensors["model.norm.weight"][0] += 1
            save_file(tensors, manifest.path)
            waiting = asyncio.create_task(harness.sample([[1]], max_tokens=1500))
            await asyncio.sleep(0.2)
            with pytest.raises(EngineDead, match=r"the update to version 1 failed: .*model\.norm\.weight"):
                await harness.engine.update(manifest)
            with pytest.raises(EngineDead, match="the update to version 1 failed"):
                await asyncio.wait_for(waiting, 30)

    asyncio.run(session())


def test_bfloat16_scores_agree_with_the_packed_forward() -> None:
    harness = engine_of("bfloat16")
    assert harness.shape == BFLOAT16
    ids = harness.prompts(500, seed=20)[0]
    scored = asyncio.run(harness.engine.score(ids))
    truth = packed_logprobs(operations("aligned"), harness.shape, harness.present, [ids])[0].numpy()
    assert (bits(scored[1:]) == bits(truth)).all()
