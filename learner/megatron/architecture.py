"""What a Hugging Face folder's config.json says about a decoder that this learner can train.

Qwen3 (dense) and Llama, tied and untied. Everything that would change the arithmetic and is not implemented
(biases, scaled rotary embeddings, sliding windows, other activations) is refused by name instead of being
ignored.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...errors import ConfigError

_FAMILIES = {"qwen3": True, "llama": False}
"""Model type, and whether it normalises queries and keys."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """Shapes of the model."""

    family: str
    layers: int
    hidden: int
    feed_forward: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    norm_eps: float
    rotary_base: float
    max_positions: int
    tied: bool
    qk_norm: bool

    @classmethod
    def read(cls, model_dir: Path) -> Architecture:
        """From `model_dir`/config.json; raises ConfigError for a model that would be computed wrongly."""
        path = model_dir / "config.json"
        config = json.loads(path.read_text(encoding="utf-8"))
        family = config["model_type"]
        if family not in _FAMILIES:
            raise _refuse(path, "model_type", family, f"Use one of {sorted(_FAMILIES)}.")
        for key, wanted in {
            "hidden_act": "silu",
            "attention_bias": False,
            "mlp_bias": False,
            "use_sliding_window": False,
        }.items():
            if config.get(key, wanted) != wanted:
                raise _refuse(path, key, config[key], f"Only {wanted!r} is implemented.")
        return cls(
            family=family,
            layers=config["num_hidden_layers"],
            hidden=config["hidden_size"],
            feed_forward=config["intermediate_size"],
            heads=config["num_attention_heads"],
            kv_heads=config["num_key_value_heads"],
            head_dim=config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"],
            vocabulary=config["vocab_size"],
            norm_eps=config["rms_norm_eps"],
            rotary_base=_rotary_base(path, config),
            max_positions=config["max_position_embeddings"],
            tied=config.get("tie_word_embeddings", False),
            qk_norm=_FAMILIES[family],
        )

    def require_divisible(self, tensor: int, pipeline: int) -> None:
        """Raise ConfigError where the model cannot be split over that many ranks."""
        for key, what, count, size in (
            ("tensor_parallel", "key-value heads", self.kv_heads, tensor),
            ("tensor_parallel", "vocabulary", self.vocabulary, tensor),
            ("tensor_parallel", "feed-forward width", self.feed_forward, tensor),
            ("tensor_parallel", "hidden width", self.hidden, tensor),
            ("pipeline_parallel", "layers", self.layers, pipeline),
        ):
            if count % size:
                raise ConfigError(
                    source="recipe",
                    key=f"learner.{key}",
                    value=size,
                    why=f"does not divide {count} ({what})",
                    remedy=f"Use a divisor of the {what}.",
                )


def _rotary_base(path: Path, config: Mapping[str, Any]) -> float:
    rotary = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = rotary.get("rope_type", rotary.get("type", "default"))
    if kind != "default":
        raise _refuse(path, "rope_type", kind, "Only 'default' is implemented.")
    if config.get("rope_interleaved"):
        raise _refuse(path, "rope_interleaved", True, "Only half-split rotary embeddings are implemented.")
    return float(rotary.get("rope_theta", config.get("rope_theta", 10000.0)))


def _refuse(path: Path, key: str, value: object, remedy: str) -> ConfigError:
    return ConfigError(source=str(path), key=key, value=value, why="is not implemented", remedy=remedy)
