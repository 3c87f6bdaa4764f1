"""The aligned operations on CUDA, in bfloat16: the engine's kernels forward, and a backward of our own.

    linear, norm, rotary,        our Triton kernels, which     backward: cuBLAS for the products, Triton for
    activation, log-probability  the plugin gives the engine   the rest
    attention                    vLLM's FlashAttention-3       backward: Triton, from its log-sum-exp

Invariant: for a given token every operation yields the bits that the plugin makes vLLM yield, whatever is
packed beside it. The backward is deterministic. Nothing waits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from ..errors import ConfigError
from . import cuda_attention, cuda_gradients, cuda_library, cuda_linear, cuda_rows, formulas
from .contract import contract_hash
from .operations import OperationsName, Packed


@dataclass(frozen=True, slots=True, eq=False)
class CudaWeight:
    """Nothing is rearranged: the kernel reads the weight itself, which is kept alive and never written."""

    weight: Tensor

    @property
    def shape(self) -> tuple[int, int]:
        return self.weight.shape[0], self.weight.shape[1]

    def __call__(self, x: Tensor) -> Tensor:
        return cuda_linear.product(x, self.weight)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, packed: CudaWeight) -> Tensor:
        ctx.save_for_backward(x, weight)
        return packed(x.detach())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        needs_dx, needs_dw, _ = ctx.needs_input_grad
        return *formulas.linear_gradients(grads[0], x, weight, needs_dx, needs_dw), None


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.eps = eps
        return cuda_rows.rms_norm(x.detach(), weight.detach(), eps)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight = ctx.saved_tensors
        return *cuda_gradients.rms_norm_gradients(x, weight, grads[0], ctx.eps), None


class _AddNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        normed, total = cuda_rows.add_rms_norm(x.detach(), residual.detach(), weight.detach(), eps)
        # The rounded sum stands for the unrounded one here: a gradient need not be its last bit.
        ctx.save_for_backward(total, weight)
        ctx.eps = eps
        return normed, total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        total, weight = ctx.saved_tensors
        dx, dw = cuda_gradients.rms_norm_gradients(total, weight, grads[0], ctx.eps, more=grads[1])
        return dx, dx, dw, None


class _Rotary(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, positions: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(positions, table)
        return (
            cuda_rows.rotate(q.detach(), positions, table),
            cuda_rows.rotate(k.detach(), positions, table),
        )

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None]:
        positions, table = ctx.saved_tensors
        back = formulas.rotating_back(table)
        dq, dk = (cuda_rows.rotate(grad, positions, back) for grad in grads)
        return dq, dk, None, None


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: tuple[int, ...], scale: float
    ) -> Tensor:
        q, k = cuda_rows.ready(q.detach()), cuda_rows.ready(k.detach())
        out, log_sums = cuda_attention.forward(q, k, cuda_rows.ready(v.detach()), cu_seqlens, scale)
        # v as it came: it is a part of what the norms of q and k keep already.
        ctx.save_for_backward(q, k, v, out, log_sums)
        ctx.cu_seqlens, ctx.scale = cu_seqlens, scale
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        q, k, v, out, log_sums = ctx.saved_tensors
        found = cuda_attention.gradients(
            q, k, cuda_rows.ready(v), out, log_sums, grads[0], ctx.cu_seqlens, ctx.scale
        )
        return *found, None, None


class _SiluAndMul(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up)
        return cuda_rows.silu_and_mul(gate_up.detach())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return cuda_gradients.silu_gradients(ctx.saved_tensors[0], grads[0])


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, ids: Tensor, temperature: float) -> Tensor:
        found = cuda_rows.ready(logits.detach())
        if temperature != 1.0:
            rows = torch.full((len(found),), temperature, dtype=torch.float32, device=found.device)
            found = cuda_rows.tempered(found, rows)
        logprobs, log_sums = cuda_rows.token_logprobs(found, ids)
        ctx.save_for_backward(found, ids, log_sums)
        ctx.temperature = temperature
        return logprobs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        logits, ids, log_sums = ctx.saved_tensors
        return cuda_rows.logit_gradients(logits, ids, log_sums, grads[0] / ctx.temperature), None, None


class AlignedCuda:
    """`Operations` "aligned" on CUDA."""

    name: OperationsName = "aligned"

    def __init__(self) -> None:
        cuda_library.load()
        cuda_linear.require_whole_sums()

    def contract(self) -> str:
        choices = {
            "linear": f"triton {cuda_linear.TILES}, cublaslt without workspace",
            "attention": f"one split, {cuda_library.load()}",
            "norm": f"float32 mean in tiles of {cuda_rows.TILE}, unrounded residual sum",
            "rotary": "table in the dtype",
            "logprobs": "logits / temperature rounded to the dtype, then float32",
        }
        return contract_hash(self.name, {**choices, **cuda_library.describe()})

    def pack(self, weight: Tensor) -> CudaWeight:
        if weight.dtype != torch.bfloat16:
            raise ConfigError(
                source="kernels",
                key="model.dtype",
                value=str(weight.dtype).removeprefix("torch."),
                why="has no aligned kernels on CUDA.",
                remedy='Use model.dtype = "bfloat16", or kernels = "standard".',
            )
        return CudaWeight(cuda_rows.ready(weight.detach()))

    def linear(self, x: Tensor, weight: Tensor, packed: Packed) -> Tensor:
        if not isinstance(packed, CudaWeight) or packed.shape != tuple(weight.shape):
            raise ValueError(f"weight {tuple(weight.shape)} needs its own pack() result, got {packed!r}")
        return cast(Tensor, _Linear.apply(x, weight, packed))  # type: ignore[no-untyped-call]

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return cast(Tensor, _Norm.apply(x, weight, eps))  # type: ignore[no-untyped-call]

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        found = _AddNorm.apply(x, residual, weight, eps)  # type: ignore[no-untyped-call]
        return cast(tuple[Tensor, Tensor], found)

    def rotary_table(self, head_dim: int, base: float, max_positions: int, dtype: torch.dtype) -> Tensor:
        # On the GPU, whose cosines are not a CPU's, because the engine makes its table there.
        with torch.device("cuda"):
            return formulas.rotary_table(head_dim, base, max_positions, dtype)

    def rotary(self, q: Tensor, k: Tensor, positions: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
        rotated = _Rotary.apply(q, k, positions, table)  # type: ignore[no-untyped-call]
        return cast(tuple[Tensor, Tensor], rotated)

    def attention(self, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: tuple[int, ...], scale: float) -> Tensor:
        return cast(Tensor, _Attention.apply(q, k, v, cu_seqlens, scale))  # type: ignore[no-untyped-call]

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        return cast(Tensor, _SiluAndMul.apply(gate_up))  # type: ignore[no-untyped-call]

    def token_logprobs(self, logits: Tensor, ids: Tensor, temperature: float) -> Tensor:
        formulas.check_temperature(temperature)
        return cast(Tensor, _TokenLogprobs.apply(logits, ids, temperature))  # type: ignore[no-untyped-call]
