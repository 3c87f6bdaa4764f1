"""A Qwen3 of a published shape with random weights: log-probabilities are spread and disagreement shows.

    folder = write_model(Path("model"), shape("0.6b", context=4096))

Made on the spot: its size is what a benchmark needs of it. Untied where the published one is tied, because
tied random weights repeat one token for ever.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from rz_agent.learner.megatron.architecture import Architecture
from rz_agent.learner.megatron.weight_map import tensor_names
from safetensors.torch import save_file

# (layers, hidden, feed-forward, heads, key-value heads, head width, vocabulary)
SHAPES: Mapping[str, tuple[int, ...]] = {
    "small": (4, 512, 1536, 16, 8, 64, 32000),
    "0.6b": (28, 1024, 3072, 16, 8, 128, 151936),
    "4b": (36, 2560, 9728, 32, 8, 128, 151936),
}
_WIDTHS = {"lm_head": 0.08, "embed_tokens": 1.0}  # deviation of a tensor's elements; others 0.04


def shape(name: str, context: int) -> dict[str, Any]:
    """A `config.json` in Hugging Face layout, for so many positions."""
    layers, hidden, feed_forward, heads, kv_heads, head_dim, vocabulary = SHAPES[name]
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": vocabulary,
        "hidden_size": hidden,
        "intermediate_size": feed_forward,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "max_position_embeddings": context,
        "rope_theta": 1e6,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }


def write_model(folder: Path, config: Mapping[str, Any]) -> Path:
    """A model folder with weights in bfloat16."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    weights = random_weights(Architecture.read(folder), seed=0)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


def random_weights(model: Architecture, seed: int) -> dict[str, torch.Tensor]:
    """Every tensor in bfloat16 on the CPU; norms near 1, matrices wide enough that tokens compete."""
    place = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator(place).manual_seed(seed)
    heads, kv_heads = model.heads * model.head_dim, model.kv_heads * model.head_dim
    shapes = {
        "q_proj": (heads, model.hidden),
        "k_proj": (kv_heads, model.hidden),
        "v_proj": (kv_heads, model.hidden),
        "o_proj": (model.hidden, heads),
        "gate_proj": (model.feed_forward, model.hidden),
        "up_proj": (model.feed_forward, model.hidden),
        "down_proj": (model.hidden, model.feed_forward),
        "embed_tokens": (model.vocabulary, model.hidden),
        "lm_head": (model.vocabulary, model.hidden),
        "q_norm": (model.head_dim,),
        "k_norm": (model.head_dim,),
    }
    found = {}
    for name in tensor_names(model):
        kind = name.split(".")[-2]
        size = shapes.get(kind, (model.hidden,))
        drawn = torch.randn(size, generator=generator, device=place)
        width = _WIDTHS.get(kind, 0.04)
        found[name] = (drawn * width if len(size) > 1 else 1 + 0.1 * drawn).to(torch.bfloat16).cpu()
    return found
