"""The arithmetic that rollout and learner share: one forward for both sides, one backward for the learner.

    Operations      what a packed Qwen-style decoder needs, from linear to token log-probability
    Packed          a weight in the layout its device's matrix product wants; opaque to callers

Three implementations exist, and the learner never asks which one it holds:

    "aligned"    the operations the engine runs, so a token's log-probability has the same bits on both sides
    "standard"   what a usual training stack runs (F.linear, scaled_dot_product_attention); close, never equal
    "reference"  the textbook formula in plain torch, any dtype including float64; the judge of the gradients

Shapes: T tokens of all packed sequences, H query heads, KV key-value heads (H a multiple of KV), D head
size, F feed-forward width, V vocabulary, K and N the in- and output width of a linear map. Packed sequences
are told apart by `cu_seqlens` alone: (0, n1, n1+n2, ..., T).

Invariant of "aligned": the result for a token does not depend on the tokens packed beside it. Every operation
is differentiable in its tensors unless it says otherwise. Nothing here waits for anything.
"""

from __future__ import annotations

from typing import Literal, Protocol

from torch import Tensor, dtype

OperationsName = Literal["aligned", "standard", "reference"]


class Packed(Protocol):
    """A weight [N, K] prepared for `Operations.linear`; stale as soon as the weight changes."""

    @property
    def shape(self) -> tuple[int, int]: ...

    def __call__(self, x: Tensor) -> Tensor:
        """The forward of `linear` alone: x [..., K] -> [..., N], no gradient."""
        ...


class Operations(Protocol):
    """One forward and one backward for each operation of the model."""

    @property
    def name(self) -> OperationsName: ...

    def contract(self) -> str:
        """Name and hash of every choice that can change a bit: operations, processor, versions, dtype rules.

        Processes whose "aligned" contracts are equal compute equal bits for equal inputs of one dtype.
        """
        ...

    def pack(self, weight: Tensor) -> Packed:
        """Prepare weight [N, K], already in the dtype it is multiplied in. Pack again after each change."""
        ...

    def linear(self, x: Tensor, weight: Tensor, packed: Packed) -> Tensor:
        """x [T, K] times weight [N, K] transposed: [T, N] in the dtype of x.

        The forward reads `packed`, the backward `weight` (which may be a float32 master: it is rounded to the
        dtype of x and receives its gradient straight through, in its own dtype). Merged weights (q, k and v;
        gate and up) are multiplied merged, as the engine does. A bias is added by the caller, after.
        """
        ...

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x / sqrt(mean(x^2) + eps) * weight over the last axis, mean in float32; any leading shape."""
        ...

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """(rms_norm(x + residual), x + residual); the norm reads the sum before it is rounded."""
        ...

    def rotary_table(self, head_dim: int, base: float, max_positions: int, dtype: dtype) -> Tensor:
        """[max_positions, head_dim]: cosines in the first half of a row, sines in the second. No gradient."""
        ...

    def rotary(self, q: Tensor, k: Tensor, positions: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
        """Rotate q [T, H, D] and k [T, KV, D] (halves, not pairs) by int64 positions [T]."""
        ...

    def attention(self, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: tuple[int, ...], scale: float) -> Tensor:
        """Causal grouped-query attention of q [T, H, D] over k, v [T, KV, D] in each sequence: [T, H, D]."""
        ...

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        """[T, 2F] -> [T, F]: silu of the first half times the second half."""
        ...

    def token_logprobs(self, logits: Tensor, ids: Tensor, temperature: float) -> Tensor:
        """float32 [T]: log-softmax(logits [T, V] / temperature) at int64 ids [T].

        Raises ValueError unless temperature > 0. With "aligned", the exact arithmetic of the engine's
        `processed_logprobs` without filters.
        """
        ...
