"""The matrix product of engine and learner on CUDA, whose rows do not see each other.

    small products   a Triton kernel, which costs the CPU less to launch
    large products   cuBLASLt, which is faster on the GPU

Each element is summed over the inputs in one order, by one program, in float32, and rounded once. A tile's
height changes which rows a program computes, not how, and so it is with cuBLASLt as long as it has no
workspace to split a sum in: `require_whole_sums` takes it away and checks that it is gone.
`benchmarks/gpu_alignment.py` compares all of them bit for bit. Nothing waits.
"""

from __future__ import annotations

import functools
import os

import torch
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F

from ..errors import ConfigError
from .cuda_rows import ready
from .triton_kernel import kernel

# rows, outputs and inputs of one step of a program, warps, steps in flight
Tile = tuple[int, int, int, int, int]

# The first one whose programs fit on the GPU at once is taken; where none does, one of the last two. At least
# 64 rows: below, Triton would take another tensor core instruction, which sums otherwise. Chosen on an H200.
FITTING: tuple[Tile, ...] = ((64, 16, 128, 4, 6), (64, 32, 64, 4, 8), (64, 64, 64, 4, 6), (128, 64, 64, 8, 5))
FEW_ROWS: Tile = (64, 64, 64, 4, 4)
MANY_ROWS: Tile = (128, 128, 64, 8, 4)
TILES = *FITTING, FEW_ROWS, MANY_ROWS
_FEW = 64
_AT_ONCE = 132  # multiprocessors of a Hopper GPU
_LARGE = 40_000_000_000  # multiplications: from here on cuBLASLt wins over its launch (an H200)
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


def require_whole_sums() -> None:
    """Take cuBLASLt's workspace, before its first product in this process.

    Raises ConfigError where a product came first: torch sizes the workspace then, once.
    """
    os.environ["CUBLASLT_WORKSPACE_SIZE"] = "1"
    torch.backends.cuda.preferred_blas_library("cublaslt")
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = (False, False)
    generator = torch.Generator("cuda").manual_seed(0)
    x, weight = (
        torch.randn(rows, 16384, generator=generator, device="cuda").to(torch.bfloat16) for rows in (65, 64)
    )
    if not torch.equal(F.linear(x, weight), product(x, weight)):
        raise ConfigError(
            source="kernels",
            key="CUBLASLT_WORKSPACE_SIZE",
            value=None,
            why="was not set before this process multiplied matrices on the GPU, so cuBLASLt splits sums.",
            remedy="Set it to 1 in the environment, or make engine and learner first.",
        )


@functools.lru_cache(maxsize=4096)
def tile_for(rows: int, outputs: int) -> Tile:
    """The tile of a product of that shape: few outputs are shared among many programs.

    >>> tile_for(16, 1024)[:2], tile_for(16, 6144)[:2], tile_for(256, 4096)[:2], tile_for(8192, 4096)[:2]
    ((64, 16), (64, 64), (128, 64), (128, 128))
    """
    for tile in FITTING:
        m, n, *_ = tile
        if -(-rows // m) * -(-outputs // n) <= _AT_ONCE and (m == _FEW or rows > _FEW):
            return tile
    return FEW_ROWS if rows <= _FEW else MANY_ROWS


def product(x: Tensor, weight: Tensor, tile: Tile | None = None) -> Tensor:
    """x [..., K] times weight [N, K] transposed: [..., N] in the dtype of x.

    tile  of the Triton kernel; None: chosen by the shape, or cuBLASLt where the product is large
    """
    outputs, inputs = weight.shape
    flat = ready(x.reshape(-1, inputs))
    rows = flat.shape[0]
    if tile is None and rows * outputs * inputs >= _LARGE:
        return F.linear(flat, weight).view(*x.shape[:-1], outputs)
    out = torch.empty(rows, outputs, dtype=x.dtype, device=x.device)
    if rows:
        m, n, k, warps, stages = tile or tile_for(rows, outputs)
        grid = (-(-rows // m) * -(-outputs // n),)
        _product_kernel[grid](
            flat, ready(weight), out, rows, OUTPUTS=outputs, INPUTS=inputs, M=m, N=n, K=k, GROUP=_GROUP,
            num_warps=warps, num_stages=stages,
        )  # fmt: skip
    return out.view(*x.shape[:-1], outputs)
