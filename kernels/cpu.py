"""The aligned operations on a CPU: vLLM's own compiled forward, and a backward written by hand.

    linear       `PackedWeight` of cpu_linear           backward: two products in float32
    rotary       vLLM's `rotary_embedding`              backward: the rotation by the negative angle
    attention    vLLM's paged kernel, cut into pieces   backward: attention_backward
    the others   the formulas that vLLM runs on a CPU   backward: autograd

Invariant: for a given token every operation yields the bits that the plugin makes vLLM yield, whatever is
packed beside it. float32 and bfloat16; nothing waits.
"""

from __future__ import annotations

import itertools
from typing import Any, cast

import torch
from torch import Tensor

from . import cpu_attention, cpu_library, formulas
from .attention_backward import attention_gradients
from .contract import contract_hash
from .cpu_linear import PackedWeight
from .operations import OperationsName, Packed


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, packed: PackedWeight) -> Tensor:
        ctx.save_for_backward(x, weight)
        return packed(x.detach())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        needs_dx, needs_dw, _ = ctx.needs_input_grad
        return *formulas.linear_gradients(grads[0], x, weight, needs_dx, needs_dw), None


class _Rotary(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, positions: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(positions, table)
        # The operation works in place on [T, H * D].
        out = [x.detach().clone(memory_format=torch.contiguous_format) for x in (q, k)]
        flat = [x.view(x.shape[0], -1) for x in out]
        torch.ops._C.rotary_embedding(positions, flat[0], flat[1], q.shape[-1], table, True, 0, False)
        return out[0], out[1]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None]:
        positions, table = ctx.saved_tensors
        back = formulas.rotating_back(table)
        dq, dk = (formulas.rotate(grad, positions, back) for grad in grads)
        return dq, dk, None, None


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: tuple[int, ...], scale: float
    ) -> Tensor:
        q, k, v = (x.detach().contiguous() for x in (q, k, v))
        lengths = [b - a for a, b in itertools.pairwise(cu_seqlens)]
        out = cpu_attention.packed_causal(q, k, v, lengths, scale)
        ctx.save_for_backward(q, k, v, out)
        ctx.cu_seqlens, ctx.scale = cu_seqlens, scale
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        q, k, v, out = ctx.saved_tensors
        return *attention_gradients(q, k, v, out, grads[0], ctx.cu_seqlens, ctx.scale), None, None


class AlignedCpu:
    """`Operations` "aligned" on a CPU."""

    name: OperationsName = "aligned"

    def __init__(self) -> None:
        cpu_library.load()

    def contract(self) -> str:
        choices = {
            "linear": "tiles5|rows16|widened|float32x2",
            "attention": f"paged, {cpu_attention.QUERY_TOKENS} queries, no split over keys",
            "norm": "float32 mean, unrounded residual sum",
            "rotary": "table in the dtype",
            "logprobs": "float32 log_softmax of logits / temperature",
        }
        return contract_hash(self.name, {"device": "cpu", **choices, **cpu_library.describe()})

    def pack(self, weight: Tensor) -> PackedWeight:
        return PackedWeight(weight)

    def linear(self, x: Tensor, weight: Tensor, packed: Packed) -> Tensor:
        if not isinstance(packed, PackedWeight) or packed.shape != tuple(weight.shape):
            raise ValueError(f"weight {tuple(weight.shape)} needs its own pack() result, got {packed!r}")
        return cast(Tensor, _Linear.apply(x, weight, packed))  # type: ignore[no-untyped-call]

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return formulas.rms_norm(x, weight, eps)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        return formulas.add_rms_norm(x, residual, weight, eps)

    def rotary_table(self, head_dim: int, base: float, max_positions: int, dtype: torch.dtype) -> Tensor:
        return formulas.rotary_table(head_dim, base, max_positions, dtype)

    def rotary(self, q: Tensor, k: Tensor, positions: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
        rotated = _Rotary.apply(q, k, positions, table)  # type: ignore[no-untyped-call]
        return cast(tuple[Tensor, Tensor], rotated)

    def attention(self, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: tuple[int, ...], scale: float) -> Tensor:
        return cast(Tensor, _Attention.apply(q, k, v, cu_seqlens, scale))  # type: ignore[no-untyped-call]

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        if gate_up.shape[-1] % 64:
            # The remainder of a vector is computed by scalar code with other roundings, at thread-dependent
            # places.
            raise ValueError(
                f"feed-forward width {gate_up.shape[-1] // 2} is not a multiple of 32, so its bits depend on "
                'the batch; pad the model or use kernels = "standard"'
            )
        return formulas.silu_and_mul(gate_up)

    def token_logprobs(self, logits: Tensor, ids: Tensor, temperature: float) -> Tensor:
        return formulas.token_logprobs(logits, ids, temperature)
