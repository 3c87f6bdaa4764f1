"""Causal attention on CUDA: vLLM's FlashAttention-3 forward, and a Triton backward from what it saves.

The forward is the engine's compiled kernel with one split over the keys, whose bits do not depend on the
batch. For the head sizes that `supports` allows, packed sequences and the engine's pages are summed in the
same tiles of keys, hence give the same bits. It returns the log of each query's sum of exponentials, from
which the backward computes probabilities again tile by tile (FlashAttention-2, Dao 2023,
algorithm 2). Each gradient is summed by one program in one order: the backward is deterministic, and no
matrix of a whole sequence exists. Nothing waits.
"""

from __future__ import annotations

import functools
import itertools

import torch
import triton.language as tl
from torch import Tensor

from . import cuda_library
from .cuda_rows import ready
from .triton_kernel import kernel, next_power_of_2

# FlashAttention-3 is always told of at least so many queries a sequence. With fewer (64 divided by the
# queries of a key head, or one) it takes other tiles of keys, or a kernel that is not causal.
LEAST_QUERIES = 128

# rows of a program, rows of one of its steps, warps, steps in flight
Tile = tuple[int, int, int, int]

QUERY_TILE: Tile = (64, 64, 4, 2)
KEY_TILE: Tile = (64, 64, 4, 2)
_ROWS = 16
_LOG2_E = tl.constexpr(1.4426950408889634)


@functools.lru_cache(maxsize=8)
def _boundaries(cu_seqlens: tuple[int, ...], device: torch.device) -> Tensor:
    """int32[S + 1]; kept, because every layer of a forward asks for the same ones."""
    return torch.tensor(cu_seqlens, dtype=torch.int32, device=device)


@functools.lru_cache(maxsize=16)
def _blocks(cu_seqlens: tuple[int, ...], size: int, device: torch.device) -> Tensor:
    """int32[B, 3]: first row of each block of a sequence, and its sequence's first and last row + 1."""
    found = [
        (row, start, end) for start, end in itertools.pairwise(cu_seqlens) for row in range(start, end, size)
    ]
    return torch.tensor(found, dtype=torch.int32, device=device)


def supports(width: int) -> bool:
    """Whether pages and packed sequences of heads of this size are summed in the same tiles of keys.

    >>> [width for width in (32, 64, 96, 128, 192, 256) if supports(width)]
    [32, 64, 128]
    """
    return width <= 64 or 96 < width <= 128


def forward(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: tuple[int, ...], scale: float
) -> tuple[Tensor, Tensor]:
    """Causal attention of q [T, H, D] over k and v [T, KV, D] in each sequence.

    Returns its output [T, H, D] and the log of each query's sum of exponentials, float32 [H, T].
    """
    if not supports(q.shape[-1]):
        raise ValueError(
            f"heads of {q.shape[-1]} have no aligned attention on CUDA: pages are summed in other tiles than "
            'packed sequences; use kernels = "standard"'
        )
    boundaries = _boundaries(cu_seqlens, q.device)
    longest = max(LEAST_QUERIES, *(b - a for a, b in itertools.pairwise(cu_seqlens)))
    return cuda_library.flash_attention(ready(q), ready(k), ready(v), boundaries, longest, scale)


@kernel
def _rows(x, row, head, end, HEADS: tl.constexpr, WIDTH: tl.constexpr, D: tl.constexpr):  # type: ignore[no-untyped-def]
    """One head's vectors [rows, D] of those rows that come before `end`, the others 0."""
    width = tl.arange(0, D)
    place = (row.to(tl.int64)[:, None] * HEADS + head) * WIDTH + width[None, :]
    return tl.load(x + place, mask=(row < end)[:, None] & (width < WIDTH)[None, :], other=0.0)


@kernel
def _query_step(  # type: ignore[no-untyped-def]
    total, queries, grads, log_sum, sums, row, k, v, key, kv_head, end, factor,
    KV_HEADS: tl.constexpr, WIDTH: tl.constexpr, D: tl.constexpr, DIAGONAL: tl.constexpr,
):  # fmt: skip
    keys = _rows(k, key, kv_head, end, KV_HEADS, WIDTH, D)
    values = _rows(v, key, kv_head, end, KV_HEADS, WIDTH, D)
    scores = tl.dot(queries, tl.trans(keys), input_precision="ieee")
    probs = tl.exp2(scores * factor - log_sum[:, None])
    if DIAGONAL:
        probs = tl.where(key[None, :] <= row[:, None], probs, 0.0)
    change = tl.dot(grads, tl.trans(values), input_precision="ieee") - sums[:, None]
    return tl.dot((probs * change).to(keys.dtype), keys, total, input_precision="ieee")


@kernel
def _query_gradient_kernel(  # type: ignore[no-untyped-def]
    q, k, v, grad, log_sums, inner, blocks, dq, tokens, scale,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, WIDTH: tl.constexpr, D: tl.constexpr, OWN: tl.constexpr,
    STEP: tl.constexpr,
) -> None:  # fmt: skip
    # The last rows of a sequence see the most keys: they go first.
    block, head = tl.num_programs(0) - 1 - tl.program_id(0), tl.program_id(1)
    first = tl.load(blocks + block * 3)
    start, end = tl.load(blocks + block * 3 + 1), tl.load(blocks + block * 3 + 2)
    row, kv_head = first + tl.arange(0, OWN), head // (HEADS // KV_HEADS)
    queries = _rows(q, row, head, end, HEADS, WIDTH, D)
    grads = _rows(grad, row, head, end, HEADS, WIDTH, D)
    side = head.to(tl.int64) * tokens + row
    log_sum = tl.load(log_sums + side, mask=row < end, other=0.0) * _LOG2_E
    sums = tl.load(inner + side, mask=row < end, other=0.0)
    total = tl.zeros((OWN, D), tl.float32)
    for key_first in range(start, first, STEP):
        key = key_first + tl.arange(0, STEP)
        total = _query_step(
            total, queries, grads, log_sum, sums, row, k, v, key, kv_head, end, scale * _LOG2_E,
            KV_HEADS, WIDTH, D, False,
        )  # fmt: skip
    for key_first in range(first, tl.minimum(first + OWN, end), STEP):
        key = key_first + tl.arange(0, STEP)
        total = _query_step(
            total, queries, grads, log_sum, sums, row, k, v, key, kv_head, end, scale * _LOG2_E,
            KV_HEADS, WIDTH, D, True,
        )  # fmt: skip
    width = tl.arange(0, D)
    place = (row.to(tl.int64)[:, None] * HEADS + head) * WIDTH + width[None, :]
    kept = (row < end)[:, None] & (width < WIDTH)[None, :]
    tl.store(dq + place, (total * scale).to(dq.dtype.element_ty), mask=kept)


@kernel
def _key_step(  # type: ignore[no-untyped-def]
    key_total, value_total, keys, values, key, q, grad, log_sums, inner, row, head, tokens, end, factor,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, D: tl.constexpr, DIAGONAL: tl.constexpr,
):  # fmt: skip
    queries = _rows(q, row, head, end, HEADS, WIDTH, D)
    grads = _rows(grad, row, head, end, HEADS, WIDTH, D)
    side = head.to(tl.int64) * tokens + row
    log_sum = tl.load(log_sums + side, mask=row < end, other=0.0) * _LOG2_E
    sums = tl.load(inner + side, mask=row < end, other=0.0)
    scores = tl.dot(keys, tl.trans(queries), input_precision="ieee")
    probs = tl.exp2(scores * factor - log_sum[None, :])
    if DIAGONAL:
        probs = tl.where(key[:, None] <= row[None, :], probs, 0.0)
    # Rows past the end have gradients of 0, so that what their probabilities are is nothing to either sum.
    value_total = tl.dot(probs.to(grads.dtype), grads, value_total, input_precision="ieee")
    change = tl.dot(values, tl.trans(grads), input_precision="ieee") - sums[None, :]
    key_total = tl.dot((probs * change).to(queries.dtype), queries, key_total, input_precision="ieee")
    return key_total, value_total


@kernel
def _key_gradient_kernel(  # type: ignore[no-untyped-def]
    q, k, v, grad, log_sums, inner, blocks, dk, dv, tokens, scale,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, WIDTH: tl.constexpr, D: tl.constexpr, OWN: tl.constexpr,
    STEP: tl.constexpr,
) -> None:  # fmt: skip
    block, kv_head = tl.program_id(0), tl.program_id(1)
    first, end = tl.load(blocks + block * 3), tl.load(blocks + block * 3 + 2)
    key = first + tl.arange(0, OWN)
    keys = _rows(k, key, kv_head, end, KV_HEADS, WIDTH, D)
    values = _rows(v, key, kv_head, end, KV_HEADS, WIDTH, D)
    key_total = tl.zeros((OWN, D), tl.float32)
    value_total = tl.zeros((OWN, D), tl.float32)
    for number in range(0, HEADS // KV_HEADS):
        head = kv_head * (HEADS // KV_HEADS) + number
        for query_first in range(first, tl.minimum(first + OWN, end), STEP):
            row = query_first + tl.arange(0, STEP)
            key_total, value_total = _key_step(
                key_total, value_total, keys, values, key, q, grad, log_sums, inner, row, head, tokens, end,
                scale * _LOG2_E, HEADS, WIDTH, D, True,
            )  # fmt: skip
        for query_first in range(first + OWN, end, STEP):
            row = query_first + tl.arange(0, STEP)
            key_total, value_total = _key_step(
                key_total, value_total, keys, values, key, q, grad, log_sums, inner, row, head, tokens, end,
                scale * _LOG2_E, HEADS, WIDTH, D, False,
            )  # fmt: skip
    width = tl.arange(0, D)
    place = (key.to(tl.int64)[:, None] * KV_HEADS + kv_head) * WIDTH + width[None, :]
    kept = (key < end)[:, None] & (width < WIDTH)[None, :]
    tl.store(dk + place, (key_total * scale).to(dk.dtype.element_ty), mask=kept)
    tl.store(dv + place, value_total.to(dv.dtype.element_ty), mask=kept)


@kernel
def _inner_kernel(  # type: ignore[no-untyped-def]
    out, grad, inner, tokens,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr,
) -> None:  # fmt: skip
    row, head = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.program_id(1)
    outs = _rows(out, row, head, tokens, HEADS, WIDTH, D).to(tl.float32)
    grads = _rows(grad, row, head, tokens, HEADS, WIDTH, D).to(tl.float32)
    tl.store(inner + head.to(tl.int64) * tokens + row, tl.sum(outs * grads, axis=1), mask=row < tokens)


def gradients(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, log_sums: Tensor, grad: Tensor, cu_seqlens: tuple[int, ...],
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of q [T, H, D], k and v [T, KV, D] from that of out [T, H, D], in their own dtypes.

    log_sums  float32 [H, T], as the forward returned it
    """
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    tokens, heads, width = q.shape
    grad, log_sums = ready(grad), log_sums.contiguous()
    shape = {"HEADS": heads, "WIDTH": width, "D": max(next_power_of_2(width), 16)}
    inner = torch.empty(heads, tokens, dtype=torch.float32, device=q.device)
    _inner_kernel[(-(-tokens // _ROWS), heads)](ready(out), grad, inner, tokens, **shape, ROWS=_ROWS)
    given = q, k, v, grad, log_sums, inner
    for kernel_, tile, many, outs in (
        (_query_gradient_kernel, QUERY_TILE, heads, (dq,)),
        (_key_gradient_kernel, KEY_TILE, k.shape[1], (dk, dv)),
    ):
        own, step, warps, stages = tile
        blocks = _blocks(cu_seqlens, own, q.device)
        kernel_[(len(blocks), many)](
            *given, blocks, *outs, tokens, scale, **shape, KV_HEADS=k.shape[1], OWN=own, STEP=step,
            num_warps=warps, num_stages=stages,
        )  # fmt: skip
    return dq, dk, dv
