"""The smallest model that shows that the engine samples and the learner scores: one layer, random weights."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

from ..learner.learner import Learner
from ..learner.learner_config import LearnerConfig
from ..rollout.engine import Completion, make_engine
from ..rollout.engine_config import DtypeName, EngineConfig
from ..trajectory import Float32, Sampling, Segment
from .models.qwen3_torch import Qwen3, Qwen3Shape

PROMPT = 8  # tokens


def _dtype() -> DtypeName:
    """One that has aligned kernels on this machine's device."""
    return "bfloat16" if torch.cuda.is_available() else "float32"


def one_layer_model(folder: Path) -> Path:
    """Write a random one-layer model as a Hugging Face folder without a tokenizer."""
    shape = Qwen3Shape(layers=1)
    (folder / "config.json").write_text(json.dumps(shape.hf_config(end=1, pad=0)))
    save_file(Qwen3(shape, seed=0).state_dict(), folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def sampled(folder: Path, tokens: int) -> Completion:
    """Start an engine in this process on the model in `folder` and draw `tokens` tokens."""

    async def draw() -> Completion:
        config = EngineConfig(
            model=folder, dtype=_dtype(), mode="inprocess", max_model_len=64, kv_cache_gb=0.1
        )
        engine = make_engine(config)
        try:
            await engine.start()
            return await engine.generate(
                range(PROMPT), Sampling(), max_tokens=tokens, stop_token_ids=(), seed=0
            )
        finally:
            await engine.close()

    return asyncio.run(draw())


def scored(folder: Path, sample: Completion) -> Float32:
    """The learner's log-probabilities, float32 [n], of what `sampled` drew."""
    drawn, prompt = len(sample.token_ids), sample.prompt_tokens
    nothing, none = np.full(prompt, np.nan, np.float32), np.full(prompt, -1, np.int32)
    segment = Segment(
        token_ids=np.concatenate([np.arange(prompt, dtype=np.int32), sample.token_ids]),
        action_mask=np.arange(prompt + drawn) >= prompt,
        behaviour_logprobs=np.concatenate([nothing, sample.logprobs]),
        policy_version=np.concatenate([none, sample.versions]),
    )
    (scores,) = Learner(folder, LearnerConfig(dtype=_dtype(), threads=1)).score([segment])
    return scores[segment.action_mask]


def made_up(tokens: int) -> Completion:
    """What an engine might have drawn, for a look at the learner alone."""
    return Completion(
        token_ids=np.arange(tokens, dtype=np.int32),
        logprobs=np.full(tokens, -1.0, np.float32),
        versions=np.zeros(tokens, np.int32),
        finish_reason="length",
        prompt_tokens=PROMPT,
        cached_tokens=0,
    )
