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

_BLOCK = 64


@functools.lru_cache(maxsize=8)
def _boundaries(cu_seqlens: tuple[int, ...], device: torch.device) -> Tensor:
    """int32[S + 1]; kept, because every layer of a forward asks for the same ones."""
    return torch.tensor(cu_seqlens, dtype=torch.int32, device=device)


@functools.lru_cache(maxsize=8)
def _blocks(cu_seqlens: tuple[int, ...], device: torch.device) -> Tensor:
    """int32[B, 3]: first row of each block of a sequence, and its sequence's first and last row + 1."""
    found = [
        (row, start, end)
        for start, end in itertools.pairwise(cu_seqlens)
        for row in range(start, end, _BLOCK)
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
def _query_gradient_kernel(  # type: ignore[no-untyped-def]
    q, k, v, grad, log_sums, inner, blocks, dq, tokens, scale,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, WIDTH: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    block, head = tl.program_id(0), tl.program_id(1)
    first = tl.load(blocks + block * 3)
    start, end = tl.load(blocks + block * 3 + 1), tl.load(blocks + block * 3 + 2)
    row, width = first + tl.arange(0, BLOCK), tl.arange(0, D)
    kept = (row < end)[:, None] & (width < WIDTH)[None, :]
    place = (row.to(tl.int64)[:, None] * HEADS + head) * WIDTH + width[None, :]
    queries = tl.load(q + place, mask=kept, other=0.0)
    grads = tl.load(grad + place, mask=kept, other=0.0)
    side = head.to(tl.int64) * tokens + row
    log_sum = tl.load(log_sums + side, mask=row < end, other=0.0)
    sums = tl.load(inner + side, mask=row < end, other=0.0)
    total = tl.zeros((BLOCK, D), tl.float32)
    kv_head = head // (HEADS // KV_HEADS)
    for key_first in range(start, first + 1, BLOCK):
        key = key_first + tl.arange(0, BLOCK)
        key_place = (key.to(tl.int64)[:, None] * KV_HEADS + kv_head) * WIDTH + width[None, :]
        key_kept = (key < end)[:, None] & (width < WIDTH)[None, :]
        keys = tl.load(k + key_place, mask=key_kept, other=0.0)
        values = tl.load(v + key_place, mask=key_kept, other=0.0)
        scores = tl.dot(queries, tl.trans(keys), input_precision="ieee") * scale
        seen = (key[None, :] <= row[:, None]) & (row < end)[:, None]
        probs = tl.where(seen, tl.exp(scores - log_sum[:, None]), 0.0)
        change = tl.dot(grads, tl.trans(values), input_precision="ieee") - sums[:, None]
        total = tl.dot((probs * change * scale).to(keys.dtype), keys, total, input_precision="ieee")
    tl.store(dq + place, total.to(dq.dtype.element_ty), mask=kept)


@kernel
def _key_gradient_kernel(  # type: ignore[no-untyped-def]
    q, k, v, grad, log_sums, inner, blocks, dk, dv, tokens,
    scale, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, WIDTH: tl.constexpr, D: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    block, kv_head = tl.program_id(0), tl.program_id(1)
    first, end = tl.load(blocks + block * 3), tl.load(blocks + block * 3 + 2)
    key, width = first + tl.arange(0, BLOCK), tl.arange(0, D)
    kept = (key < end)[:, None] & (width < WIDTH)[None, :]
    place = (key.to(tl.int64)[:, None] * KV_HEADS + kv_head) * WIDTH + width[None, :]
    keys = tl.load(k + place, mask=kept, other=0.0)
    values = tl.load(v + place, mask=kept, other=0.0)
    key_total = tl.zeros((BLOCK, D), tl.float32)
    value_total = tl.zeros((BLOCK, D), tl.float32)
    for number in range(0, HEADS // KV_HEADS):
        head = kv_head * (HEADS // KV_HEADS) + number
        for query_first in range(first, end, BLOCK):
            row = query_first + tl.arange(0, BLOCK)
            row_place = (row.to(tl.int64)[:, None] * HEADS + head) * WIDTH + width[None, :]
            row_kept = (row < end)[:, None] & (width < WIDTH)[None, :]
            queries = tl.load(q + row_place, mask=row_kept, other=0.0)
            grads = tl.load(grad + row_place, mask=row_kept, other=0.0)
            side = head.to(tl.int64) * tokens + row
            log_sum = tl.load(log_sums + side, mask=row < end, other=0.0)
            sums = tl.load(inner + side, mask=row < end, other=0.0)
            scores = tl.dot(keys, tl.trans(queries), input_precision="ieee") * scale
            seen = (key[:, None] <= row[None, :]) & (row < end)[None, :]
            probs = tl.where(seen, tl.exp(scores - log_sum[None, :]), 0.0)
            value_total = tl.dot(probs.to(grads.dtype), grads, value_total, input_precision="ieee")
            change = tl.dot(values, tl.trans(grads), input_precision="ieee") - sums[None, :]
            slope = (probs * change * scale).to(queries.dtype)
            key_total = tl.dot(slope, queries, key_total, input_precision="ieee")
    tl.store(dk + place, key_total.to(dk.dtype.element_ty), mask=kept)
    tl.store(dv + place, value_total.to(dv.dtype.element_ty), mask=kept)


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
    inner = (grad.to(torch.float32) * out.to(torch.float32)).sum(-1).t().contiguous()
    blocks = _blocks(cu_seqlens, q.device)
    shapes = {
        "HEADS": heads,
        "KV_HEADS": k.shape[1],
        "WIDTH": width,
        "D": max(next_power_of_2(width), 16),
        "BLOCK": _BLOCK,
    }
    given = q, k, v, grad, log_sums, inner, blocks
    _query_gradient_kernel[(len(blocks), heads)](*given, dq, tokens, scale, **shapes)
    _key_gradient_kernel[(len(blocks), k.shape[1])](*given, dk, dv, tokens, scale, **shapes)
    return dq, dk, dv
