"""A tiny random Qwen3 or Llama, and groups of episodes for it: what the learner's tests share."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rz_agent.trajectory import Group, Sampling, Segment, Trajectory

VOCABULARY = 96


def build_model(
    directory: Path, *, family: str = "qwen3", tied: bool = True, layers: int = 2, seed: int = 0
) -> Any:
    """Write a random model as a Hugging Face folder; returns the transformers model in float32."""
    from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config

    shape = {
        "vocab_size": VOCABULARY,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "tie_word_embeddings": tied,
        "initializer_range": 0.15,
        "bos_token_id": 0,
        "eos_token_id": 1,
    }
    config = (Qwen3Config if family == "qwen3" else LlamaConfig)(head_dim=32, **shape)
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.copy_(1 + 0.2 * torch.randn_like(parameter))
    model.save_pretrained(directory)
    return model


def segment(
    rng: np.random.Generator,
    turns: Sequence[tuple[int, int]],
    *,
    version: int = 0,
    temperature: float = 1.0,
    logprobs: np.ndarray | None = None,
) -> Segment:
    """Random tokens: for each turn, some observed and then some sampled ones."""
    mask = np.concatenate([[False] * seen + [True] * acted for seen, acted in turns])
    sampled = rng.uniform(-6, -2, len(mask)).astype(np.float32) if logprobs is None else logprobs
    return Segment(
        token_ids=rng.integers(2, VOCABULARY, len(mask)).astype(np.int32),
        action_mask=mask,
        behaviour_logprobs=np.where(mask, sampled, np.nan),
        policy_version=np.where(mask, version, -1),
        sampling=Sampling(temperature=temperature),
    )


def with_logprobs(held: Segment, logprobs: np.ndarray) -> Segment:
    """The same segment with other behaviour log-probabilities (NaN off action)."""
    return Segment(
        token_ids=held.token_ids,
        action_mask=held.action_mask,
        behaviour_logprobs=logprobs,
        policy_version=held.policy_version,
        sampling=held.sampling,
    )


def group(
    name: str, episodes: Sequence[tuple[float, Sequence[Segment]]], *, masked: Sequence[int] = ()
) -> Group:
    """Episodes as (reward, segments); those at the indices in `masked` are masked."""
    return Group(
        group_id=name,
        task_id=f"task-{name}",
        trajectories=tuple(
            Trajectory(
                episode_id=f"{name}.{index}",
                group_id=name,
                task_id=f"task-{name}",
                segments=tuple(segments),
                reward=reward,
                status="masked" if index in masked else "ok",
                mask_reason="sandbox died" if index in masked else "",
            )
            for index, (reward, segments) in enumerate(episodes)
        ),
    )


def ragged_groups(seed: int = 0, *, version: int = 0) -> list[Group]:
    """Two groups of three: one to three turns, one episode of two segments, lengths from 5 to 40."""
    rng = np.random.default_rng(seed)
    return [
        group(
            "a",
            [
                (1.0, [segment(rng, [(4, 6)], version=version)]),
                (
                    0.0,
                    [
                        segment(rng, [(9, 11), (5, 15)], version=version),
                        segment(rng, [(7, 2)], version=version),
                    ],
                ),
                (0.0, [segment(rng, [(3, 2)], version=version)]),
            ],
        ),
        group(
            "b",
            [
                (0.5, [segment(rng, [(4, 3), (2, 3), (1, 4)], version=version)]),
                (0.25, [segment(rng, [(12, 17)], version=version)]),
                (1.0, [segment(rng, [(5, 9)], version=version, temperature=0.7)]),
            ],
        ),
    ]
