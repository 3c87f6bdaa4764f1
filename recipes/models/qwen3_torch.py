"""Qwen3 in plain torch, small enough to train in a minute: the tiny model's warm start and its check.

    forward(ids)             whole sequences, for training
    step(tokens, t, cache)   one token a row, for sampling

Parameters carry Hugging Face's names (tied embeddings, so no lm_head) and the arithmetic gives the
bits of transformers' Qwen3ForCausalLM in float32. Architecture: Qwen3 technical report, section 2:
pre-norm, grouped-query attention with RMS-normed queries and keys, rotary positions, SwiGLU.
Neither the engine nor the learner of a run uses this module.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True, slots=True, kw_only=True)
class Qwen3Shape:
    """Sizes of the model; the defaults are the tiny model's, 0.64 million parameters."""

    vocabulary: int = 384
    hidden: int = 128
    layers: int = 3
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    intermediate: int = 384
    context: int = 1024
    rope_theta: float = 10000.0
    eps: float = 1e-6

    def hf_config(self, *, end: int, pad: int) -> dict[str, object]:
        """The `config.json` that transformers and vLLM read."""
        return {
            "architectures": ["Qwen3ForCausalLM"],
            "model_type": "qwen3",
            "vocab_size": self.vocabulary,
            "hidden_size": self.hidden,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "intermediate_size": self.intermediate,
            "max_position_embeddings": self.context,
            "rope_theta": self.rope_theta,
            "rms_norm_eps": self.eps,
            "hidden_act": "silu",
            "attention_bias": False,
            "attention_dropout": 0.0,
            "tie_word_embeddings": True,
            "use_sliding_window": False,
            "initializer_range": 0.02,
            "bos_token_id": None,
            "eos_token_id": end,
            "pad_token_id": pad,
            "torch_dtype": "float32",
            "use_cache": True,
        }


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(size)), eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), self.weight, self.eps)


class Attention(nn.Module):
    def __init__(self, shape: Qwen3Shape) -> None:
        super().__init__()
        self.shape = shape
        queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        self.q_proj = nn.Linear(shape.hidden, queries, bias=False)
        self.k_proj = nn.Linear(shape.hidden, keys, bias=False)
        self.v_proj = nn.Linear(shape.hidden, keys, bias=False)
        self.o_proj = nn.Linear(queries, shape.hidden, bias=False)
        self.q_norm, self.k_norm = (RMSNorm(shape.head_dim, shape.eps) for _ in range(2))

    def heads(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[B, T, hidden] -> queries [B, heads, T, D], keys and values [B, kv_heads, T, D]."""

        def split(y: Tensor, heads: int) -> Tensor:
            return y.view(*x.shape[:2], heads, self.shape.head_dim)

        q = self.q_norm(split(self.q_proj(x), self.shape.heads)).transpose(1, 2)
        k = self.k_norm(split(self.k_proj(x), self.shape.kv_heads)).transpose(1, 2)
        v = split(self.v_proj(x), self.shape.kv_heads).transpose(1, 2)
        return _rotate(q, cos, sin), _rotate(k, cos, sin), v


class MLP(nn.Module):
    def __init__(self, shape: Qwen3Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden, shape.intermediate, bias=False)
        self.up_proj = nn.Linear(shape.hidden, shape.intermediate, bias=False)
        self.down_proj = nn.Linear(shape.intermediate, shape.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Layer(nn.Module):
    def __init__(self, shape: Qwen3Shape) -> None:
        super().__init__()
        self.self_attn, self.mlp = Attention(shape), MLP(shape)
        self.input_layernorm = RMSNorm(shape.hidden, shape.eps)
        self.post_attention_layernorm = RMSNorm(shape.hidden, shape.eps)

    def finish(self, x: Tensor, attended: Tensor) -> Tensor:
        """Attention's output [B, heads, T, D] and the MLP, each added to the residual [B, T, hidden]."""
        x = x + self.self_attn.o_proj(attended.transpose(1, 2).reshape(*x.shape[:2], -1))
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class Body(nn.Module):
    def __init__(self, shape: Qwen3Shape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocabulary, shape.hidden)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.layers))
        self.norm = RMSNorm(shape.hidden, shape.eps)


class Qwen3(nn.Module):
    """The model; `seed` fixes its initial weights without touching torch's own generator."""

    cos: Tensor
    sin: Tensor

    def __init__(self, shape: Qwen3Shape, *, seed: int = 0) -> None:
        super().__init__()
        self.shape = shape
        with torch.random.fork_rng(devices=[]):
            self.model = Body(shape)
        self._initialise(torch.Generator().manual_seed(seed))
        inverse = 1 / (shape.rope_theta ** (torch.arange(0, shape.head_dim, 2).float() / shape.head_dim))
        angles = torch.outer(torch.arange(shape.context).float(), inverse).repeat(1, 2)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    @torch.no_grad()
    def _initialise(self, generator: torch.Generator) -> None:
        """Variance kept through each projection, halved deviation where a branch joins the residual."""
        for name, parameter in self.named_parameters():
            if parameter.dim() < 2:
                continue
            joins = name.endswith(("o_proj.weight", "down_proj.weight"))
            std = (0.5 if joins else 1.0) / math.sqrt(parameter.shape[1])
            parameter.normal_(0.0, 0.02 if "embed" in name else std, generator=generator)

    def forward(self, ids: Tensor) -> Tensor:
        """[B, T] ids -> [B, T, vocabulary] logits."""
        x, shape = self.model.embed_tokens(ids), self.shape
        cos, sin = self.cos[: ids.shape[1]], self.sin[: ids.shape[1]]
        group = shape.heads // shape.kv_heads
        for layer in self._layers():
            q, k, v = layer.self_attn.heads(layer.input_layernorm(x), cos, sin)
            k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
            x = layer.finish(x, F.scaled_dot_product_attention(q, k, v, is_causal=True))
        return self._logits(x)

    def new_cache(self, rows: int, length: int) -> list[Tensor]:
        """Keys and values of each layer, [2, rows, kv_heads, length, head_dim]."""
        shape = self.shape
        size = (2, rows, shape.kv_heads, length, shape.head_dim)
        return [torch.zeros(size) for _ in range(shape.layers)]

    @torch.no_grad()
    def step(self, tokens: Tensor, position: int, cache: list[Tensor]) -> Tensor:
        """[B] tokens, all at `position` -> [B, vocabulary] logits; writes that place of the cache."""
        x, shape = self.model.embed_tokens(tokens)[:, None], self.shape
        cos, sin = self.cos[position : position + 1], self.sin[position : position + 1]
        for layer, kept in zip(self._layers(), cache, strict=True):
            q, k, v = layer.self_attn.heads(layer.input_layernorm(x), cos, sin)
            kept[0, :, :, position], kept[1, :, :, position] = k[:, :, 0], v[:, :, 0]
            keys, values = kept[0, :, :, : position + 1], kept[1, :, :, : position + 1]
            q = q.reshape(len(tokens), shape.kv_heads, -1, shape.head_dim)
            scores = torch.softmax(q @ keys.transpose(-1, -2) / math.sqrt(shape.head_dim), -1)
            x = layer.finish(x, (scores @ values).reshape(len(tokens), shape.heads, 1, shape.head_dim))
        return self._logits(x[:, 0])

    def _layers(self) -> list[Layer]:
        return [layer for layer in self.model.layers if isinstance(layer, Layer)]

    def _logits(self, x: Tensor) -> Tensor:
        return F.linear(self.model.norm(x), self.model.embed_tokens.weight)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    low, high = x.chunk(2, -1)
    return x * cos + torch.cat((-high, low), -1) * sin
