"""The matrix product of engine and learner on CUDA: a Triton kernel whose rows do not see each other.

Each element is summed over the inputs in one order, by one program, in float32, and rounded once. The tile
is chosen by the number of rows; a tile's height changes which rows a program computes, not how
(`benchmarks/gpu_alignment.py` compares the two bit for bit). Nothing waits.
"""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from .cuda_rows import ready
from .triton_kernel import kernel

# rows, outputs and inputs of one step of a program, warps, steps in flight
Tile = tuple[int, int, int, int, int]

# At least 64 rows: below, Triton would take another tensor core instruction, which sums otherwise.
FEW_ROWS: Tile = (64, 64, 64, 4, 4)
MANY_ROWS: Tile = (128, 128, 64, 8, 4)
_FEW = 64
_GROUP = 8


@kernel
def _product_kernel(  # type: ignore[no-untyped-def]
    x, weight, out, rows,
    OUTPUTS: tl.constexpr, INPUTS: tl.constexpr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
    GROUP: tl.constexpr,
) -> None:  # fmt: skip
    program = tl.program_id(0)
    down, across = tl.cdiv(rows, M), tl.cdiv(OUTPUTS, N)
    # Programs that run together share rows and outputs, so both stay in the cache.
    first_row = program // (GROUP * across) * GROUP
    height = tl.minimum(down - first_row, GROUP)
    row_tile = first_row + program % (GROUP * across) % height
    column_tile = program % (GROUP * across) // height
    row = row_tile * M + tl.arange(0, M)
    column = column_tile * N + tl.arange(0, N)
    inner = tl.arange(0, K)
    x_tile = x + row.to(tl.int64)[:, None] * INPUTS + inner[None, :]
    weight_tile = weight + (column % OUTPUTS).to(tl.int64)[None, :] * INPUTS + inner[:, None]
    total = tl.zeros((M, N), tl.float32)
    for first in range(0, INPUTS, K):
        inside = first + inner < INPUTS
        a = tl.load(x_tile, mask=(row < rows)[:, None] & inside[None, :], other=0.0)
        b = tl.load(weight_tile, mask=inside[:, None], other=0.0)
        total = tl.dot(a, b, total, input_precision="ieee")
        x_tile += K
        weight_tile += K
    place = row.to(tl.int64)[:, None] * OUTPUTS + column[None, :]
    kept = (row < rows)[:, None] & (column < OUTPUTS)[None, :]
    tl.store(out + place, total.to(out.dtype.element_ty), mask=kept)


def product(x: Tensor, weight: Tensor, tile: Tile | None = None) -> Tensor:
    """x [..., K] times weight [N, K] transposed: [..., N] in the dtype of x.

    tile  None: chosen by the number of rows
    """
    outputs, inputs = weight.shape
    flat = ready(x.reshape(-1, inputs))
    rows = flat.shape[0]
    out = torch.empty(rows, outputs, dtype=x.dtype, device=x.device)
    if rows:
        m, n, k, warps, stages = tile or (FEW_ROWS if rows <= _FEW else MANY_ROWS)
        grid = (-(-rows // m) * -(-outputs // n),)
        _product_kernel[grid](
            flat, ready(weight), out, rows, OUTPUTS=outputs, INPUTS=inputs, M=m, N=n, K=k, GROUP=_GROUP,
            num_warps=warps, num_stages=stages,
        )  # fmt: skip
    return out.view(*x.shape[:-1], outputs)
