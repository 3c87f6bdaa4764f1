"""Real engines over random models, started once for each kind in a test session.

An `EngineHarness` knows the weights that its engine serves, so a test can score what was sampled. Tests move
the version on (`publish`) and never back; each test asks the harness for the present weights.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from rz_agent.kernels import Operations, operations
from rz_agent.kernels.vllm_settings import KernelsName
from rz_agent.rollout.engine import Completion, Engine, make_engine
from rz_agent.rollout.engine_config import EngineConfig, Mode
from rz_agent.trajectory import Sampling
from rz_agent.weight_store import WeightManifest, WeightStore
from tiny_qwen import BFLOAT16, TIED, UNTIED, Shape, Weights, packed_logprobs, random_weights, write_model

PLAIN = Sampling()
SHAPES = {"tied": TIED, "untied": UNTIED, "bfloat16": BFLOAT16}


class EngineHarness:
    """An engine, the model it serves and every version it has served."""

    def __init__(self, shape: Shape, kernels: KernelsName, mode: Mode = "inprocess") -> None:
        self.shape = shape
        self._directory = tempfile.TemporaryDirectory(prefix="rz-engine-")
        root = Path(self._directory.name)
        self.weights: dict[int, Weights] = {0: random_weights(shape, seed=0)}
        self.store = WeightStore(root / "weights")
        self.config = EngineConfig(
            model=write_model(root / "model", shape, self.weights[0]),
            dtype="bfloat16" if shape.dtype == torch.bfloat16 else "float32",
            max_model_len=shape.max_positions,
            max_num_seqs=40,
            max_num_batched_tokens=160,
            kv_cache_gb=0.1,
            kernels=kernels,
            mode=mode,
        )
        self.engine: Engine = make_engine(self.config)

    @property
    def present(self) -> Weights:
        return self.weights[self.engine.version]

    def manifest(self, seed: int, version: int | None = None) -> WeightManifest:
        """Put other random weights into the store, as the next version."""
        version = self.engine.version + 1 if version is None else version
        self.weights[version] = random_weights(self.shape, seed=seed)
        return self.store.put(version, self.weights[version])

    async def publish(self, seed: int) -> None:
        await self.engine.update(self.manifest(seed))

    async def sample(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        max_tokens: int | Sequence[int] = 16,
        sampling: Sampling = PLAIN,
        seed: int | None = 0,
    ) -> list[Completion]:
        """All prompts at once; the i-th draws with seed + i."""
        budgets = [max_tokens] * len(prompts) if isinstance(max_tokens, int) else max_tokens
        return await asyncio.gather(
            *(
                self.engine.generate(
                    prompt,
                    sampling,
                    max_tokens=budget,
                    stop_token_ids=(),
                    seed=None if seed is None else seed + i,
                )
                for i, (prompt, budget) in enumerate(zip(prompts, budgets, strict=True))
            )
        )

    def prompts(self, *lengths: int, seed: int = 0) -> list[list[int]]:
        generator = torch.Generator().manual_seed(seed)
        return [torch.randint(0, self.shape.vocab, (n,), generator=generator).tolist() for n in lengths]

    def differing(
        self,
        prompts: Sequence[Sequence[int]],
        completions: Sequence[Completion],
        *,
        scorer: Operations | None = None,
        temperature: float = 1.0,
    ) -> tuple[int, int]:
        """(tokens whose log-probability is not exactly the scorer's at the token's version, tokens)."""
        scorer = operations("aligned") if scorer is None else scorer
        sequences = [[*p, *c.token_ids.tolist()] for p, c in zip(prompts, completions, strict=True)]
        different = total = 0
        versions = sorted({int(v) for c in completions for v in c.versions})
        for version in versions:
            scored = packed_logprobs(scorer, self.shape, self.weights[version], sequences, temperature)
            for prompt, completion, truth in zip(prompts, completions, scored, strict=True):
                of_version = completion.versions == version
                expected = truth[len(prompt) - 1 :].numpy()
                different += int((expected != completion.logprobs)[of_version].sum())
                total += int(of_version.sum())
        return different, total


@functools.cache
def engine_of(model: str, kernels: KernelsName = "aligned") -> EngineHarness:
    """The session's in-process engine for a model of SHAPES."""
    harness = EngineHarness(SHAPES[model], kernels)
    asyncio.run(harness.engine.start())
    return harness


def ragged(count: int, longest: int = 90) -> list[int]:
    """Prompt lengths of a ragged batch, the same each time."""
    lengths = itertools.cycle([5, 33, 1, 64, longest, 17, 32, 2, 96])
    return [next(lengths) for _ in range(count)]


def bits(values: np.ndarray) -> np.ndarray:
    """The bit patterns of float32 values: NaN equals NaN, and -0 does not equal 0."""
    return values.view(np.int32)
