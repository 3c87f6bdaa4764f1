"""A linear map split by input features over tensor parallel ranks, with the bits of one that is not split.

Adding up the ranks' partial sums rounds where an engine on one device does not. So in the forward pass each
rank gathers the inputs and computes whole sums for its share of the output features; weights are held, and
gradients computed, by input features, as Megatron expects them:

    forward   x [T, K/R] --gather--> [T, K] -> rows r of W [N/R, K] -> [T, N/R] --gather--> [T, N]
    backward  dx = dy W[:, part r], dw = dy^T x[:, part r]; every rank has all of dy, nothing is sent

What it costs over summing: K/N times the bytes sent in the forward pass, and one gathered copy of the weight
each time that it is packed. Waits: every rank of the group for the others, in both gathers.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from megatron.core.tensor_parallel.mappings import gather_from_tensor_model_parallel_region as gather
from torch import Tensor

from ...kernels.formulas import linear_gradients
from ...kernels.operations import Packed


def output_share(weight: Tensor, group: Any) -> Tensor:
    """This rank's rows [N/R, K] of the whole weight, from its columns [N, K/R]."""
    whole = cast(Tensor, gather(weight.detach(), group=group))
    return whole.chunk(int(group.size()), 0)[int(group.rank())]


def linear(x: Tensor, weight: Tensor, share: Packed, group: Any) -> Tensor:
    """x [..., K/R], weight [N, K/R] of this rank -> [..., N] on every rank; share: packed `output_share`."""
    return cast(Tensor, _Linear.apply(x, weight, share, group))  # type: ignore[no-untyped-call]


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, share: Packed, group: Any) -> Tensor:
        ctx.save_for_backward(x, weight)
        whole = gather(x.detach(), group=group)
        return cast(Tensor, gather(share(whole.contiguous()), group=group))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        x, weight = ctx.saved_tensors
        needs_dx, needs_dw, *_ = ctx.needs_input_grad
        return *linear_gradients(grads[0], x, weight, needs_dx, needs_dw), None, None
