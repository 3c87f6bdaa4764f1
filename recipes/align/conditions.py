"""Under which conditions the engine computes the same tokens: what may not change a bit.

    async for name, capture, segments in engine_conditions(plan): ...      the first one is the reference

    alone     each request by itself, nothing cached: one prefill, then one token a step
    warm      the same with the prompt in the prefix cache
    pairs     two requests at a time
    crowd     all at once; the prompts are long enough that a step holds more than 256 tokens
    prefill   prompt and sampled tokens together as one prompt: decoded against prefilled
    chunks    in an engine whose steps hold few tokens, so that prompts are cut
    graphs    all at once in an engine that replays CUDA graphs: on a GPU, and only log-probabilities are seen
    padding   three at a time there: graphs are made for one, two, four, and padded between

Tokens are drawn with a seed of their own, so an engine without a fault draws the same each time; where it
does not, rows are compared up to where the draws part.
Waits: the caller for each engine, which is closed before the next one starts.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from ...kernels.vllm_settings import KernelsName
from ...rollout import vllm_device
from ...rollout.engine import Completion
from ...rollout.engine_config import DtypeName, EngineConfig
from ...rollout.vllm_inprocess import VllmInProcess
from ...trajectory import Float32, Sampling, Segment
from ...weight_store import WeightManifest
from .capture import Capture, Prefix
from .engine_capture import EngineWatch
from .forward_pass import LOGPROB

CROWD = 256  # tokens of a step at which kernels of engines change
_CACHE_GB = 0.5
CHUNK = 48  # tokens of a step that cuts prompts
PADDED = 3  # requests of a step for which no graph is made
GRAPHS = ("graphs", "padding")  # conditions whose operations run unseen


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is run.

    prompts      token ids of each request
    new_tokens   sampled after each
    temperature  of sampling
    context      positions that the model has
    """

    model: Path
    dtype: DtypeName
    kernels: KernelsName
    prompts: tuple[tuple[int, ...], ...]
    new_tokens: int
    temperature: float
    context: int

    @classmethod
    def drawn(
        cls, model: Path, *, dtype: DtypeName, kernels: KernelsName, vocabulary: int, context: int,
        requests: int, new_tokens: int, temperature: float, seed: int,
    ) -> Plan:  # fmt: skip
        """Random prompts, from 2 tokens to the length that fills a step past `CROWD`."""
        rng = np.random.default_rng(seed)
        lengths = np.linspace(2, 2 * (CROWD + CHUNK) // requests, requests).astype(int)
        prompts = tuple(tuple(rng.integers(0, vocabulary, n).tolist()) for n in lengths)
        return cls(
            model=model, dtype=dtype, kernels=kernels, prompts=prompts, new_tokens=new_tokens,
            temperature=temperature, context=context,
        )  # fmt: skip

    @property
    def longest(self) -> int:
        """Tokens of the longest request with what is sampled."""
        return max(map(len, self.prompts)) + self.new_tokens

    @property
    def step_tokens(self) -> int:
        """Tokens of a step that holds all prompts whole."""
        return 2 * (CROWD + CHUNK) + self.longest

    def engine(self, step_tokens: int, *, graphs: bool = False) -> EngineConfig:
        """An engine in this process whose steps hold that many tokens, of one request where the model can."""
        return EngineConfig.model_validate(
            {
                "model": self.model,
                "dtype": self.dtype,
                "kernels": self.kernels,
                "mode": "inprocess",
                "graphs": graphs,
                "max_model_len": max(self.longest, min(step_tokens, self.context - 1)),
                "max_num_seqs": min(step_tokens, len(self.prompts)),
                "max_num_batched_tokens": step_tokens,
                "kv_cache_gb": _CACHE_GB,
            }
        )


class EngineRun:
    """One engine with a watch on its model, asked for the plan's requests in any company."""

    def __init__(self, plan: Plan, engine: VllmInProcess, watch: EngineWatch) -> None:
        self.plan, self.engine, self._watch = plan, engine, watch

    @classmethod
    @asynccontextmanager
    async def of(cls, plan: Plan, step_tokens: int, *, graphs: bool = False) -> AsyncIterator[EngineRun]:
        """A started engine whose steps hold that many tokens; closed after the block.

        graphs  replay CUDA graphs, which no watch sees
        """
        engine, watch = VllmInProcess(plan.engine(step_tokens, graphs=graphs)), EngineWatch()
        await engine.start()
        try:
            if not graphs:
                await engine.on_worker(watch.watch)
            yield cls(plan, engine, watch)
        finally:
            await engine.close()

    @property
    def calls(self) -> dict[str, tuple[str, ...]]:
        """The compiled operations of vLLM that each operation ran."""
        return self._watch.calls

    async def prefix(self, ids: Sequence[int]) -> Capture:
        """One prompt by itself in one step, nothing cached."""
        await self.engine.forget()
        capture = self._watch.capture = Capture()
        await self._ask(0, ids, max_tokens=1)
        return capture

    async def sampled(self, together: int, *, cold: bool = True) -> tuple[Capture, tuple[Segment, ...]]:
        """All requests, so many at a time."""
        if cold:
            await self.engine.forget()
        capture = self._watch.capture = Capture()
        segments: list[Segment] = []
        prompts = list(enumerate(self.plan.prompts))
        for start in range(0, len(prompts), together):
            asked = [self._ask(index, prompt) for index, prompt in prompts[start : start + together]]
            done = await asyncio.gather(*asked)
            segments += [self._segment(p, c) for (_, p), c in zip(prompts[start:], done, strict=False)]
        for segment in segments:
            _file_logprobs(capture, segment, segment.behaviour_logprobs)
        return capture, tuple(segments)

    async def prefilled(self, segments: Sequence[Segment]) -> Capture:
        """Whole sequences as prompts, one at a time, nothing cached."""
        capture = self._watch.capture = Capture()
        for segment in segments:
            scores = await self.engine.score(segment.token_ids.tolist(), temperature=self.plan.temperature)
            _file_logprobs(capture, segment, scores)
        return capture

    async def update(self, manifest: WeightManifest) -> dict[str, str]:
        """Take over new weights; the checksums of what the engine then holds."""
        await self.engine.update(manifest)
        return await self.engine.checksums()

    async def _ask(self, index: int, prompt: Sequence[int], *, max_tokens: int | None = None) -> Completion:
        return await self.engine.generate(
            prompt,
            Sampling(temperature=self.plan.temperature),
            max_tokens=max_tokens or self.plan.new_tokens,
            stop_token_ids=(),
            seed=index,
        )

    def _segment(self, prompt: Sequence[int], sampled: Completion) -> Segment:
        nothing, none = np.full(len(prompt), np.nan, np.float32), np.full(len(prompt), -1, np.int32)
        return Segment(
            token_ids=np.concatenate([np.array(prompt, np.int32), sampled.token_ids]),
            action_mask=np.arange(len(prompt) + len(sampled.token_ids)) >= len(prompt),
            behaviour_logprobs=np.concatenate([nothing, sampled.logprobs]),
            policy_version=np.concatenate([none, sampled.versions]),
            sampling=Sampling(temperature=self.plan.temperature),
        )


def _file_logprobs(capture: Capture, segment: Segment, logprobs: Float32) -> None:
    """Of the action tokens."""
    keys = np.array(Prefix().extend(segment.token_ids.tolist()), dtype=object)[segment.action_mask]
    capture.add(LOGPROB, keys.tolist(), torch.from_numpy(logprobs[segment.action_mask])[:, None])


async def engine_conditions(plan: Plan) -> AsyncIterator[tuple[str, Capture, tuple[Segment, ...]]]:
    """(name, what was computed, the sequences) for each condition, `alone` first."""
    async with EngineRun.of(plan, plan.step_tokens) as run:
        alone, segments = await run.sampled(1)
        yield "alone", alone, segments
        yield "warm", *await run.sampled(1, cold=False)
        yield "pairs", *await run.sampled(2)
        yield "crowd", *await run.sampled(len(plan.prompts))
        yield "prefill", await run.prefilled(segments), segments
    async with EngineRun.of(plan, CHUNK) as run:
        yield "chunks", *await run.sampled(1)
    if vllm_device.device() == "cuda":
        async with EngineRun.of(plan, plan.step_tokens, graphs=True) as run:
            yield "graphs", *await run.sampled(len(plan.prompts))
            yield "padding", *await run.sampled(PADDED)
