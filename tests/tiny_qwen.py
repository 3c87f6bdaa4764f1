"""A random Qwen3 for tests: its folder for the engine, and the same model written with `Operations`.

The forward below is the whole model in a few lines, over any packing of sequences: what a learner computes.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from rz_agent.kernels import Operations
from safetensors.torch import save_file
from torch import Tensor

Weights = Mapping[str, Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Sizes of a model; the vocabulary is no multiple of 64, so the engine pads it."""

    dtype: torch.dtype = torch.float32
    hidden: int = 128
    layers: int = 2
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    width: int = 384
    vocab: int = 300
    tied: bool = True
    max_positions: int = 1536
    eps: float = 1e-6
    base: float = 10000.0


TIED = Shape()
UNTIED = Shape(hidden=256, heads=4, kv_heads=2, head_dim=64, width=512, vocab=330, tied=False)
BFLOAT16 = Shape(dtype=torch.bfloat16)


def random_weights(shape: Shape, seed: int) -> dict[str, Tensor]:
    """Weights in Hugging Face names; large enough that the distribution over tokens is far from uniform."""
    generator = torch.Generator().manual_seed(seed)

    def matrix(rows: int, columns: int) -> Tensor:
        return (torch.randn(rows, columns, generator=generator) * 0.08).to(shape.dtype)

    def scale(size: int) -> Tensor:
        return (1 + 0.2 * torch.randn(size, generator=generator)).to(shape.dtype)

    weights = {
        "model.embed_tokens.weight": matrix(shape.vocab, shape.hidden),
        "model.norm.weight": scale(shape.hidden),
    }
    if not shape.tied:
        weights["lm_head.weight"] = matrix(shape.vocab, shape.hidden)
    for layer in range(shape.layers):
        at = f"model.layers.{layer}."
        weights |= {
            f"{at}input_layernorm.weight": scale(shape.hidden),
            f"{at}post_attention_layernorm.weight": scale(shape.hidden),
            f"{at}self_attn.q_proj.weight": matrix(shape.heads * shape.head_dim, shape.hidden),
            f"{at}self_attn.k_proj.weight": matrix(shape.kv_heads * shape.head_dim, shape.hidden),
            f"{at}self_attn.v_proj.weight": matrix(shape.kv_heads * shape.head_dim, shape.hidden),
            f"{at}self_attn.o_proj.weight": matrix(shape.hidden, shape.heads * shape.head_dim),
            f"{at}self_attn.q_norm.weight": scale(shape.head_dim),
            f"{at}self_attn.k_norm.weight": scale(shape.head_dim),
            f"{at}mlp.gate_proj.weight": matrix(shape.width, shape.hidden),
            f"{at}mlp.up_proj.weight": matrix(shape.width, shape.hidden),
            f"{at}mlp.down_proj.weight": matrix(shape.hidden, shape.width),
        }
    return weights


def write_model(directory: Path, shape: Shape, weights: Weights) -> Path:
    """A model folder. It also holds a generation_config.json that no engine may listen to."""
    directory.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": shape.hidden,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "intermediate_size": shape.width,
        "vocab_size": shape.vocab,
        "tie_word_embeddings": shape.tied,
        "max_position_embeddings": shape.max_positions,
        "rms_norm_eps": shape.eps,
        "rope_theta": shape.base,
        "hidden_act": "silu",
        "attention_bias": False,
        "torch_dtype": str(shape.dtype).removeprefix("torch."),
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    (directory / "config.json").write_text(json.dumps(config))
    hostile = {
        "temperature": 0.1,
        "top_k": 2,
        "top_p": 0.5,
        "repetition_penalty": 1.7,
        "eos_token_id": [2, 3],
    }
    (directory / "generation_config.json").write_text(json.dumps(hostile))
    save_file(dict(weights), directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def packed_logprobs(
    operations: Operations,
    shape: Shape,
    weights: Weights,
    sequences: Sequence[Sequence[int]],
    temperature: float = 1.0,
) -> list[Tensor]:
    """Log-probability of every token but the first of each sequence, all sequences in one packed forward."""
    cu_seqlens = (0, *itertools.accumulate(len(ids) for ids in sequences))
    ids = torch.tensor([i for sequence in sequences for i in sequence])
    logits = packed_logits(operations, shape, weights, ids, cu_seqlens)
    return [
        operations.token_logprobs(logits[start : end - 1], ids[start + 1 : end], temperature)
        for start, end in itertools.pairwise(cu_seqlens)
    ]


def packed_logits(
    operations: Operations, shape: Shape, weights: Weights, ids: Tensor, cu_seqlens: tuple[int, ...]
) -> Tensor:
    """float [T, V] of the packed ids [T]."""
    positions = torch.cat([torch.arange(end - start) for start, end in itertools.pairwise(cu_seqlens)])
    table = operations.rotary_table(shape.head_dim, shape.base, shape.max_positions, shape.dtype)
    hidden = weights["model.embed_tokens.weight"][ids]
    residual = torch.zeros_like(hidden)
    for layer in range(shape.layers):
        at = f"model.layers.{layer}."
        hidden, residual = _norm(operations, shape, hidden, residual, weights[f"{at}input_layernorm.weight"])
        hidden = _attend(operations, shape, weights, at + "self_attn.", hidden, positions, table, cu_seqlens)
        after = weights[f"{at}post_attention_layernorm.weight"]
        hidden, residual = _norm(operations, shape, hidden, residual, after)
        gate_up = torch.cat([weights[f"{at}mlp.{name}_proj.weight"] for name in ("gate", "up")])
        wide = operations.silu_and_mul(_linear(operations, hidden, gate_up))
        hidden = _linear(operations, wide, weights[f"{at}mlp.down_proj.weight"])
    hidden, _ = _norm(operations, shape, hidden, residual, weights["model.norm.weight"])
    return _linear(
        operations, hidden, weights["model.embed_tokens.weight" if shape.tied else "lm_head.weight"]
    )


def _norm(
    operations: Operations, shape: Shape, hidden: Tensor, residual: Tensor, weight: Tensor
) -> tuple[Tensor, Tensor]:
    return operations.add_rms_norm(hidden, residual, weight, shape.eps)


def _linear(operations: Operations, x: Tensor, weight: Tensor) -> Tensor:
    return operations.linear(x, weight, operations.pack(weight))


def _attend(
    operations: Operations,
    shape: Shape,
    weights: Weights,
    at: str,
    hidden: Tensor,
    positions: Tensor,
    table: Tensor,
    cu_seqlens: tuple[int, ...],
) -> Tensor:
    tokens, size = hidden.shape[0], shape.head_dim
    merged = torch.cat([weights[f"{at}{name}_proj.weight"] for name in "qkv"])
    sizes = [shape.heads * size, shape.kv_heads * size, shape.kv_heads * size]
    projected = torch.split(_linear(operations, hidden, merged), sizes, dim=-1)
    q, k, v = (x.view(tokens, -1, size) for x in projected)
    q = operations.rms_norm(q, weights[f"{at}q_norm.weight"], shape.eps)
    k = operations.rms_norm(k, weights[f"{at}k_norm.weight"], shape.eps)
    q, k = operations.rotary(q, k, positions, table)
    mixed = operations.attention(q, k, v, cu_seqlens, size**-0.5)
    return _linear(operations, mixed.reshape(tokens, -1), weights[f"{at}o_proj.weight"])
