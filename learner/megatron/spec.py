"""Which module stands in which slot of Megatron's transformer, for any `Operations`."""

from __future__ import annotations

from functools import partial
from typing import Any

from megatron.core.transformer.attention import SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

from .layers import (
    Column,
    FinalNorm,
    GatedMLP,
    HeadNorm,
    InsideRotaryAttention,
    Norm,
    QueryKeyValue,
    RecomputedLayer,
    RotaryAttention,
    Row,
    carry_residual,
)
from .packed_weights import PackedWeights


def block_spec(
    config: Any, weights: PackedWeights, table: Any, *, qk_norm: bool, recompute: bool
) -> TransformerBlockSubmodules:
    """The transformer block of this pipeline stage.

    table      [P, D]  cosines and sines of `Operations.rotary_table`
    recompute  layers are computed again in the backward pass
    """
    operations = weights.operations
    norm = partial(Norm, operations=operations)
    head_norm = partial(HeadNorm, operations=operations) if qk_norm else None
    attention = ModuleSpec(
        module=RotaryAttention,
        params={"attn_mask_type": AttnMaskType.causal, "operations": operations, "table": table},
        submodules=SelfAttentionSubmodules(
            linear_qkv=partial(QueryKeyValue, weights=weights),
            core_attention=InsideRotaryAttention,
            linear_proj=partial(Row, weights=weights),
            q_layernorm=head_norm,
            k_layernorm=head_norm,
        ),
    )
    feed_forward = partial(
        _gated_mlp,
        operations=operations,
        submodules=MLPSubmodules(
            linear_fc1=partial(Column, weights=weights), linear_fc2=partial(Row, weights=weights)
        ),
    )
    layer = ModuleSpec(
        module=RecomputedLayer if recompute else TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=norm,
            self_attention=attention,
            self_attn_bda=carry_residual,
            pre_mlp_layernorm=norm,
            mlp=feed_forward,
            mlp_bda=carry_residual,
        ),
    )
    return TransformerBlockSubmodules(
        layer_specs=[layer] * get_num_layers_to_build(config),
        layer_norm=partial(FinalNorm, operations=operations),
    )


def _gated_mlp(
    *, config: Any, pg_collection: Any, is_mtp_layer: bool, name: str | None, **kwargs: Any
) -> GatedMLP:
    return GatedMLP(
        config=config, tp_group=pg_collection.tp, ffn_hidden_size=config.ffn_hidden_size, name=name, **kwargs
    )
