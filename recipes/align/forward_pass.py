"""The operations of one forward pass of a Qwen-style decoder, in order: the table that both sides fill.

Each is named for what it computes, the same on both sides:

    kind          name of the method of `kernels.Operations` that computes it
    module        vLLM's module that does: below `model.layers.N.`, or whole where it is in no layer
"""

from __future__ import annotations

from dataclasses import dataclass

from .capture import Operation


@dataclass(frozen=True, slots=True)
class Part:
    """One row of the table."""

    name: str
    kind: str
    module: str


LAYER = (
    Part("input_norm", "norm", "input_layernorm"),
    Part("qkv", "linear", "self_attn.qkv_proj"),
    Part("q_norm", "norm", "self_attn.q_norm"),
    Part("k_norm", "norm", "self_attn.k_norm"),
    Part("rotary", "rotary", "self_attn.rotary_emb"),
    Part("attention", "attention", "self_attn.attn"),
    Part("output_projection", "linear", "self_attn.o_proj"),
    Part("post_norm", "norm", "post_attention_layernorm"),
    Part("gate_up", "linear", "mlp.gate_up_proj"),
    Part("silu_and_mul", "silu_and_mul", "mlp.act_fn"),
    Part("down", "linear", "mlp.down_proj"),
)
EMBEDDING = Part("embedding", "", "model.embed_tokens")
FINAL_NORM = Part("final_norm", "norm", "model.norm")
LOGITS = Operation(None, "logits")
LOGPROB = Operation(None, "logprob")


def in_layer(qk_norm: bool) -> tuple[Part, ...]:
    """The parts of a layer, in order."""
    return tuple(part for part in LAYER if qk_norm or part.name not in ("q_norm", "k_norm"))


def operations(layers: int, *, qk_norm: bool) -> tuple[Operation, ...]:
    """Every operation of a forward pass, in the order they run.

    >>> [str(operation) for operation in operations(1, qk_norm=False)][:3]
    ['embedding', 'layer 0 input_norm', 'layer 0 qkv']
    """
    inside = [Operation(layer, part.name) for layer in range(layers) for part in in_layer(qk_norm)]
    return (Operation(None, EMBEDDING.name), *inside, Operation(None, FINAL_NORM.name), LOGITS, LOGPROB)
