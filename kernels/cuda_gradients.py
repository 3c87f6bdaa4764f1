"""Gradients of the row operations on CUDA, as Triton kernels: each reads its rows once.

    rms_norm_gradients    of a norm, and of the sum that it leaves where it adds a residual
    silu_gradients        of silu(gate) * up

In float32 and rounded once. They need not have the bits of anything, but the same bits each time: a sum over
rows is cut at fixed places and added up in one order. Nothing waits.
"""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from .cuda_rows import ready, vectors_of
from .triton_kernel import kernel, next_power_of_2

_ELEMENTS = 2048  # of a tile of a norm
_TILES = 16  # that one program walks over
_COLUMNS = 1024


@kernel
def _norm_gradient_kernel(  # type: ignore[no-untyped-def]
    x, weight, grad, more, dx, parts, rows, eps,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, COUNT: tl.constexpr, STRIDE: tl.constexpr,
    TILES: tl.constexpr, MORE: tl.constexpr,
) -> None:  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    scales = tl.load(weight + columns, mask=columns < WIDTH, other=0.0).to(tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    for tile in range(0, TILES):
        row = (program * TILES + tile) * ROWS + tl.arange(0, ROWS)
        kept = (row < rows)[:, None] & (columns < WIDTH)[None, :]
        place = row[:, None] * WIDTH + columns[None, :]
        read = (row // COUNT * STRIDE + row % COUNT * WIDTH)[:, None] + columns[None, :]
        wide = tl.load(x + read, mask=kept, other=0.0).to(tl.float32)
        change = tl.load(grad + place, mask=kept, other=0.0).to(tl.float32)
        scale = tl.rsqrt(tl.sum(wide * wide, axis=1) / WIDTH + eps)
        unit = wide * scale[:, None]
        total += tl.sum(change * unit, axis=0)
        change = change * scales[None, :]
        mean = tl.sum(change * unit, axis=1) / WIDTH
        found = scale[:, None] * (change - unit * mean[:, None])
        if MORE:
            found += tl.load(more + place, mask=kept, other=0.0).to(tl.float32)
        tl.store(dx + place, found.to(dx.dtype.element_ty), mask=kept)
    tl.store(parts + program * WIDTH + columns, total, mask=columns < WIDTH)


def rms_norm_gradients(
    x: Tensor, weight: Tensor, grad: Tensor, eps: float, more: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """(gradient of x [..., H], that of weight [H]), each in its dtype, for grad [..., H] of the norm of x.

    more  [..., H]  added to the gradient of x: that of a residual sum
    """
    x, count, stride = vectors_of(x)
    grad, width = ready(grad), x.shape[-1]
    dx, rows = torch.empty_like(grad), x.numel() // width
    block = next_power_of_2(width)
    tall = max(_ELEMENTS // block, 1)
    programs = max(-(-rows // (tall * _TILES)), 1)
    parts = torch.empty(programs, width, dtype=torch.float32, device=x.device)
    _norm_gradient_kernel[(programs,)](
        x, ready(weight), grad, grad if more is None else ready(more), dx, parts, rows, eps,
        WIDTH=width, BLOCK=block, ROWS=tall, COUNT=count, STRIDE=stride, TILES=_TILES, MORE=more is not None,
        num_warps=min(max(block // 256, 4), 16),
    )  # fmt: skip
    return dx, parts.sum(0).to(weight.dtype)


@kernel
def _silu_gradient_kernel(  # type: ignore[no-untyped-def]
    gate_up, grad, out, WIDTH: tl.constexpr, BLOCK: tl.constexpr
) -> None:
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < WIDTH
    kind = out.dtype.element_ty
    gate = tl.load(gate_up + row * 2 * WIDTH + columns, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * WIDTH + WIDTH + columns, mask=inside, other=0.0).to(tl.float32)
    change = tl.load(grad + row * WIDTH + columns, mask=inside, other=0.0).to(tl.float32)
    gated = 1.0 / (1.0 + tl.exp(-gate))
    slope = gated * (1.0 + gate * (1.0 - gated))
    tl.store(out + row * 2 * WIDTH + columns, (change * up * slope).to(kind), mask=inside)
    tl.store(out + row * 2 * WIDTH + WIDTH + columns, (change * gate * gated).to(kind), mask=inside)


def silu_gradients(gate_up: Tensor, grad: Tensor) -> Tensor:
    """Gradient [..., 2F] of silu(gate) * up, for grad [..., F] of it."""
    gate_up, grad, width = ready(gate_up), ready(grad), grad.shape[-1]
    out = torch.empty_like(gate_up)
    if rows := grad.numel() // width:
        grid = rows, -(-width // _COLUMNS)
        _silu_gradient_kernel[grid](gate_up, grad, out, WIDTH=width, BLOCK=_COLUMNS, num_warps=4)
    return out
