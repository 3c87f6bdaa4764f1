"""Megatron-core's layers with `kernels` operations inside: all that spells a forward pass out is here.

Megatron keeps what it is good at (parameters, sharding, communication); each class here replaces only the
arithmetic of its parent. Two things differ from the stock layers:

- the residual is added by the norm that reads the sum, because engines fuse the two and round the sum only
  once. Between layers the hidden state is therefore [T, 1, 2H]: the layer's output and the residual side by
  side;
- rows of the query-key-value weight are permuted from Megatron's order (per group: queries, key, value) to
  the engine's (all queries, all keys, all values) when packed, so that the parameter keeps the order that
  reshards correctly.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_tensor_model_parallel_region,
)
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ...kernels.operations import Operations
from . import whole_sums
from .packed_weights import PackedWeights


@dataclass(kw_only=True)
class Sequences(PackedSeqParams):  # type: ignore[misc]
    """Where the packed sequences begin, as Megatron hands it through to the attention.

    boundaries  (0, n1, n1 + n2, ..., T)
    positions   int64[T]
    """

    boundaries: tuple[int, ...] = ()
    positions: Tensor = field(default_factory=lambda: torch.empty(0))


class Norm(torch.nn.Module):
    """RMS norm of a hidden state that may carry its residual; returns (normed, residual)."""

    def __init__(self, config: Any, hidden_size: int, eps: float, *, operations: Operations) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        self.eps, self.operations = eps, operations

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        width = self.weight.shape[0]
        if hidden.shape[-1] == width:  # the embedding: nothing has been added yet
            return self.operations.rms_norm(hidden, self.weight, self.eps), hidden
        output, residual = hidden.chunk(2, -1)
        return self.operations.add_rms_norm(output, residual, self.weight, self.eps)


class FinalNorm(Norm):
    """The last norm: nobody reads the residual after it."""

    def forward(self, hidden: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(hidden)[0]


class HeadNorm(Norm):
    """The norm of queries and keys."""

    def forward(self, hidden: Tensor) -> Tensor:  # type: ignore[override]
        return self.operations.rms_norm(hidden, self.weight, self.eps)


def carry_residual(training: bool, fused: bool) -> Any:
    """In place of bias-dropout-add: put output and residual side by side for the next norm to add."""

    def side_by_side(output_with_bias: tuple[Tensor, None], residual: Tensor, dropout: float) -> Tensor:
        output, bias = output_with_bias
        if bias is not None or dropout:
            raise ValueError(f"a bias and a dropout of {dropout} are not part of the aligned model")
        return torch.cat([output, residual], -1)

    return side_by_side


class Column(ColumnParallelLinear):  # type: ignore[misc]
    """A linear map whose output features are split over tensor parallel ranks."""

    def __init__(self, *args: Any, weights: PackedWeights, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.weights = weights

    def _forward_impl(self, input: Tensor, weight: Tensor, *, allreduce_dgrad: bool, **unused: Any) -> Tensor:
        if allreduce_dgrad:
            input = copy_to_tensor_model_parallel_region(input, group=self.tp_group)
        packed = self.weights.get(self, lambda: weight)
        return _flat_linear(self.weights.operations, input, weight, packed)


class Row(RowParallelLinear):  # type: ignore[misc]
    """A linear map whose input features are split over tensor parallel ranks.

    The parent sums the parts, as a usual stack does; aligned, every output is one sum (`whole_sums`).
    """

    def __init__(self, *args: Any, weights: PackedWeights, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.weights = weights

    def forward(self, input_: Tensor) -> tuple[Tensor, Tensor | None]:
        if self.tp_group.size() == 1 or self.weights.operations.name != "aligned":
            summed: tuple[Tensor, Tensor | None] = super().forward(input_)
            return summed
        share = self.weights.get(self, lambda: whole_sums.output_share(self.weight, self.tp_group))
        return whole_sums.linear(input_, self.weight, share, self.tp_group), None

    def _forward_impl(self, input: Tensor, weight: Tensor, **unused: Any) -> Tensor:
        packed = self.weights.get(self, lambda: weight)
        return _flat_linear(self.weights.operations, input, weight, packed)


class QueryKeyValue(Column):
    """The merged projection, with output features in the engine's order."""

    def __init__(self, *args: Any, config: Any, tp_group: Any, **kwargs: Any) -> None:
        super().__init__(*args, config=config, tp_group=tp_group, **kwargs)
        self.register_buffer("rows", _engine_rows(config, tp_group.size()), persistent=False)

    def _forward_impl(self, input: Tensor, weight: Tensor, **kwargs: Any) -> Tensor:
        return super()._forward_impl(input=input, weight=weight.index_select(0, self.rows), **kwargs)


def _engine_rows(config: Any, ranks: int) -> Tensor:
    """int64[N]: for each row in the engine's order, its place in Megatron's."""
    groups = config.num_query_groups // ranks
    queries = config.num_attention_heads // config.num_query_groups
    width = config.kv_channels
    order = torch.arange(groups * (queries + 2) * width).view(groups, queries + 2, width)
    return torch.cat(
        [order[:, :queries].flatten(), order[:, queries].flatten(), order[:, queries + 1].flatten()]
    )


def _flat_linear(operations: Operations, x: Tensor, weight: Tensor, packed: Any) -> Tensor:
    flat = x.reshape(-1, x.shape[-1]).contiguous()
    return operations.linear(flat, weight, packed).view(*x.shape[:-1], -1)


class RotaryAttention(SelfAttention):  # type: ignore[misc]
    """Causal grouped-query attention over packed sequences, rotary embedding included."""

    def __init__(self, *args: Any, operations: Operations, table: Tensor, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.operations, self.table = operations, table

    def forward(
        self, hidden_states: Tensor, *, packed_seq_params: Sequences, **unused: Any
    ) -> tuple[Tensor, Tensor | None]:
        mixed, _ = self.linear_qkv(hidden_states)
        width, heads, groups = (
            self.hidden_size_per_attention_head,
            self.num_attention_heads_per_partition,
            self.num_query_groups_per_partition,
        )
        by_head = mixed.view(mixed.shape[0], heads + 2 * groups, width)
        query, key, value = by_head.split([heads, groups, groups], 1)
        if self.q_layernorm is not None:
            query, key = self.q_layernorm(query), self.k_layernorm(key)
        query, key = self.operations.rotary(query, key, packed_seq_params.positions, self.table)
        mixed = self.operations.attention(query, key, value, packed_seq_params.boundaries, width**-0.5)
        projected: tuple[Tensor, Tensor | None] = self.linear_proj(
            mixed.reshape(hidden_states.shape[0], 1, -1)
        )
        return projected


class InsideRotaryAttention(MegatronModule):  # type: ignore[misc]
    """Fills Megatron's slot of the core attention, which `RotaryAttention` computes; never called."""

    def __init__(self, config: Any, **unused: Any) -> None:
        super().__init__(config=config)


class GatedMLP(MLP):  # type: ignore[misc]
    """down(silu(gate) * up)."""

    def __init__(self, *args: Any, operations: Operations, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.operations = operations

    def forward(self, hidden_states: Tensor, **unused: Any) -> tuple[Tensor, Tensor | None]:
        gate_up, _ = self.linear_fc1(hidden_states)
        activated = self.operations.silu_and_mul(gate_up.view(-1, gate_up.shape[-1]))
        output: tuple[Tensor, Tensor | None] = self.linear_fc2(activated.view(*gate_up.shape[:-1], -1))
        return output


class RecomputedLayer(TransformerLayer):  # type: ignore[misc]
    """A layer that keeps its input alone; nothing in it draws, so that computing it again gives its bits."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return super().forward(*args, **kwargs)
        return checkpoint(super().forward, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)


def gathered_logits(
    hidden: Tensor, weight: Tensor, weights: PackedWeights, owner: object, group: Any
) -> Tensor:
    """Logits [R, V] of the whole vocabulary from hidden [R, H] and this rank's rows of the output layer."""
    hidden = copy_to_tensor_model_parallel_region(hidden, group=group)
    part = weights.operations.linear(hidden, weight, weights.get(owner, lambda: weight))
    logits: Tensor = gather_from_tensor_model_parallel_region(part, group=group)
    return logits
