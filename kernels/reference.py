"""Plain torch operations: the usual training stack ("standard") and the textbook ("reference").

Both are differentiable by autograd alone. "standard" is the baseline that alignment is compared with: the
same model as most trainers run it, close to the engine and never equal. "reference" takes any dtype
including float64 and judges forwards and gradients. Nothing waits.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from . import formulas
from .contract import contract_hash
from .operations import OperationsName, Packed


@dataclass(frozen=True, slots=True)
class PlainWeight:
    """Nothing is packed: plain torch multiplies the weight itself."""

    weight: Tensor

    @property
    def shape(self) -> tuple[int, int]:
        return self.weight.shape[0], self.weight.shape[1]

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype))


class Reference:
    """`Operations` "reference": every formula written out, in the dtype of its inputs."""

    name: OperationsName = "reference"

    def contract(self) -> str:
        return contract_hash(self.name, {"torch": torch.__version__})

    def pack(self, weight: Tensor) -> PlainWeight:
        return PlainWeight(weight)

    def linear(self, x: Tensor, weight: Tensor, packed: Packed) -> Tensor:
        return F.linear(x, weight.to(x.dtype))

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return formulas.rms_norm(x, weight, eps)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        return formulas.add_rms_norm(x, residual, weight, eps)

    def rotary_table(self, head_dim: int, base: float, max_positions: int, dtype: torch.dtype) -> Tensor:
        return formulas.rotary_table(head_dim, base, max_positions, dtype)

    def rotary(self, q: Tensor, k: Tensor, positions: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
        return formulas.rotate(q, positions, table), formulas.rotate(k, positions, table)

    def attention(self, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: tuple[int, ...], scale: float) -> Tensor:
        per_key = q.shape[1] // k.shape[1]
        pieces = []
        for start, end in itertools.pairwise(cu_seqlens):
            queries = q[start:end].transpose(0, 1)
            keys, values = (x[start:end].transpose(0, 1).repeat_interleave(per_key, 0) for x in (k, v))
            pieces.append(self._sequence(queries, keys, values, scale).transpose(0, 1))
        return torch.cat(pieces)

    def _sequence(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """Causal softmax(q k' scale) v of one sequence, [H, n, D] each."""
        length = q.shape[1]
        future = torch.ones(length, length, dtype=torch.bool, device=q.device).triu(1)
        scores = (q @ k.transpose(-1, -2) * scale).masked_fill(future, float("-inf"))
        return scores.softmax(-1) @ v

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        return formulas.silu_and_mul(gate_up)

    def token_logprobs(self, logits: Tensor, ids: Tensor, temperature: float) -> Tensor:
        return formulas.token_logprobs(logits, ids, temperature)


class Standard(Reference):
    """`Operations` "standard": what a trainer that is not aligned runs."""

    name: OperationsName = "standard"

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """The sum is rounded first, as a residual stream kept in the dtype rounds it."""
        total = x + residual
        return formulas.rms_norm(total, weight, eps), total

    def _sequence(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        # With a batch axis, because without one torch falls back to the formula instead of its flash kernel.
        return F.scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True, scale=scale)[0]
