"""Row operations on CUDA, as Triton kernels that engine and learner both call: one text, the same bits.

    rms_norm, add_rms_norm     a row of the hidden state, or of a head
    rotate, silu_and_mul       element by element
    tempered                   logits / temperature, rounded to their dtype
    token_logprobs             log-softmax at given ids; its gradient is `logit_gradients`

Invariant: a row's bits depend on that row alone. Every sum runs over one row in one program, the widths are
compile-time constants, tensors are contiguous and 16-byte aligned, and no number of rows reaches a kernel,
so each width has exactly one compiled form. Fusing of multiply and add is off, so that element-wise
results are those of the formulas. Nothing waits.
"""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from .triton_kernel import kernel, next_power_of_2

_ALIGNMENT = 16
_COLUMNS = 1024
TILE = 2048  # elements of a program that takes several rows
_VOCABULARY = 4096
_NO_FUSION = {"enable_fp_fusion": False}


def ready(x: Tensor) -> Tensor:
    """x itself where it is contiguous and aligned, else a copy that is."""
    x = x.contiguous()
    return x if x.data_ptr() % _ALIGNMENT == 0 else x.clone()


def vectors_of(x: Tensor) -> tuple[Tensor, int, int]:
    """(x, n, stride): vector r of x [T, n, D], or [T, D], begins at r // n * stride + r % n * D.

    Some columns of a product are read where they lie; what lies otherwise is copied.
    """
    width, count = x.shape[-1], x.shape[1] if x.dim() == 3 else 1
    beside = x.stride(-1) == 1 and (count == 1 or x.stride(1) == width)
    if x.dim() in (2, 3) and beside and x.stride(0) % _ALIGNMENT == 0 and x.data_ptr() % _ALIGNMENT == 0:
        return x, count, x.stride(0)
    return ready(x), count, count * width


@kernel
def _norm_kernel(  # type: ignore[no-untyped-def]
    x, residual, weight, out, total, rows, eps,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, COUNT: tl.constexpr, STRIDE: tl.constexpr,
    ADDED: tl.constexpr,
) -> None:  # fmt: skip
    columns = tl.arange(0, BLOCK)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    kept = (row < rows)[:, None] & (columns < WIDTH)[None, :]
    place = row[:, None] * WIDTH + columns[None, :]
    inside = (row % COUNT * WIDTH)[:, None] + columns[None, :]
    read = (row // COUNT * STRIDE)[:, None] + inside
    wide = tl.load(x + read, mask=kept, other=0.0).to(tl.float32)
    if ADDED is not None:
        read = (row // COUNT * ADDED)[:, None] + inside
        wide += tl.load(residual + read, mask=kept, other=0.0).to(tl.float32)
        tl.store(total + place, wide.to(total.dtype.element_ty), mask=kept)
    mean = tl.sum(wide * wide, axis=1) / WIDTH
    normed = (wide * tl.rsqrt(mean + eps)[:, None]).to(out.dtype.element_ty).to(tl.float32)
    scales = tl.load(weight + columns, mask=columns < WIDTH, other=0.0).to(tl.float32)
    tl.store(out + place, (normed * scales[None, :]).to(out.dtype.element_ty), mask=kept)


def _norm(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    x, count, stride = vectors_of(x)
    held, _, added = (x, count, None) if residual is None else vectors_of(residual)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    total = out if residual is None else torch.empty_like(out)
    width = x.shape[-1]
    if rows := x.numel() // width:
        block = next_power_of_2(width)
        tall = max(TILE // block, 1)
        _norm_kernel[(-(-rows // tall),)](
            x, held, ready(weight.to(x.dtype)), out, total, rows, eps, WIDTH=width, BLOCK=block, ROWS=tall,
            COUNT=count, STRIDE=stride, ADDED=added, num_warps=_warps(tall * block), **_NO_FUSION,
        )  # fmt: skip
    return out, total


def _warps(elements: int) -> int:
    return min(max(elements // 256, 1), 16)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [..., H] -> [..., H]; mean of squares in float32, weight last."""
    return _norm(x, None, weight, eps)[0]


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(norm of the unrounded sum, the sum rounded), both [..., H]."""
    return _norm(x, residual, weight, eps)


@kernel
def _rotate_kernel(  # type: ignore[no-untyped-def]
    x, positions, table, out, rows,
    COUNT: tl.constexpr, STRIDE: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
) -> None:  # fmt: skip
    columns = tl.arange(0, BLOCK)[None, :]
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    token = row // COUNT
    kept = (row < rows)[:, None] & (columns < HALF)
    angles = tl.load(positions + token, mask=row < rows, other=0)[:, None] * 2 * HALF + columns
    cos = tl.load(table + angles, mask=kept, other=0.0).to(tl.float32)
    sin = tl.load(table + angles + HALF, mask=kept, other=0.0).to(tl.float32)
    read = (token * STRIDE + row % COUNT * 2 * HALF)[:, None] + columns
    first = tl.load(x + read, mask=kept, other=0.0).to(tl.float32)
    second = tl.load(x + read + HALF, mask=kept, other=0.0).to(tl.float32)
    place = row[:, None] * 2 * HALF + columns
    kind = out.dtype.element_ty
    tl.store(out + place, (first * cos - second * sin).to(kind), mask=kept)
    tl.store(out + place + HALF, (second * cos + first * sin).to(kind), mask=kept)


def rotate(x: Tensor, positions: Tensor, table: Tensor) -> Tensor:
    """x [T, H, D] rotated by the angles of int64 positions [T] in table [P, D]."""
    x, count, stride = vectors_of(x)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    width = x.shape[-1]
    if rows := x.numel() // width:
        block = next_power_of_2(width // 2)
        tall = max(TILE // 2 // block, 1)
        _rotate_kernel[(-(-rows // tall),)](
            x, positions, table, out, rows, COUNT=count, STRIDE=stride, HALF=width // 2,
            BLOCK=block, ROWS=tall, num_warps=4, **_NO_FUSION,
        )  # fmt: skip
    return out


@kernel
def _silu_kernel(gate_up, out, WIDTH: tl.constexpr, BLOCK: tl.constexpr) -> None:  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < WIDTH
    kind = out.dtype.element_ty
    gate = tl.load(gate_up + row * 2 * WIDTH + columns, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * WIDTH + WIDTH + columns, mask=inside, other=0.0).to(tl.float32)
    activated = (gate / (1.0 + tl.exp(-gate))).to(kind).to(tl.float32)
    tl.store(out + row * WIDTH + columns, (activated * up).to(kind), mask=inside)


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """[..., 2F] -> [..., F]: silu of the first half, rounded, times the second."""
    gate_up = ready(gate_up)
    width = gate_up.shape[-1] // 2
    out = gate_up.new_empty(*gate_up.shape[:-1], width)
    if rows := out.numel() // width:
        grid = rows, -(-width // _COLUMNS)
        _silu_kernel[grid](gate_up, out, WIDTH=width, BLOCK=_COLUMNS, num_warps=4, **_NO_FUSION)
    return out


@kernel
def _temper_kernel(  # type: ignore[no-untyped-def]
    logits, temperatures, out, WIDTH: tl.constexpr, BLOCK: tl.constexpr
) -> None:
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < WIDTH
    wide = tl.load(logits + row * WIDTH + columns, mask=inside, other=0.0).to(tl.float32)
    # The division that vLLM's sampler compiles, which is not the correctly rounded one.
    scaled = wide / tl.load(temperatures + row)
    tl.store(out + row * WIDTH + columns, scaled.to(out.dtype.element_ty), mask=inside)


def tempered(logits: Tensor, temperatures: Tensor) -> Tensor:
    """logits [R, V] / float32 temperatures [R], rounded to the dtype of the logits as the sampler does."""
    logits = ready(logits)
    out = torch.empty_like(logits)
    rows, width = logits.shape
    if rows:
        grid = rows, -(-width // _COLUMNS)
        _temper_kernel[grid](logits, temperatures, out, WIDTH=width, BLOCK=_COLUMNS, num_warps=4)
    return out


@kernel
def _logprob_kernel(  # type: ignore[no-untyped-def]
    logits, ids, out, log_sums, WIDTH: tl.constexpr, BLOCK: tl.constexpr
) -> None:
    row = tl.program_id(0).to(tl.int64)
    start = logits + row * WIDTH
    columns = tl.arange(0, BLOCK)
    largest = tl.full((BLOCK,), float("-inf"), tl.float32)
    for first in range(0, WIDTH, BLOCK):
        found = tl.load(start + first + columns, mask=first + columns < WIDTH, other=float("-inf"))
        largest = tl.maximum(largest, found.to(tl.float32))
    peak = tl.max(largest, axis=0)
    total = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, WIDTH, BLOCK):
        found = tl.load(start + first + columns, mask=first + columns < WIDTH, other=float("-inf"))
        total += tl.exp(found.to(tl.float32) - peak)
    log_sum = tl.log(tl.sum(total, axis=0))
    chosen = tl.load(start + tl.load(ids + row)).to(tl.float32)
    tl.store(out + row, chosen - peak - log_sum)
    tl.store(log_sums + row, peak + log_sum)


def token_logprobs(logits: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    """(log-softmax of logits [R, V] at int64 ids [R], log of the sum of exponentials), float32 [R] each.

    The vocabulary is read in chunks, so no row of float32 logits is ever stored.
    """
    logits = ready(logits)
    rows, width = logits.shape
    out = torch.empty(rows, dtype=torch.float32, device=logits.device)
    log_sums = torch.empty_like(out)
    if rows:
        block = min(next_power_of_2(width), _VOCABULARY)
        _logprob_kernel[(rows,)](
            logits, ids, out, log_sums, WIDTH=width, BLOCK=block, num_warps=_warps(block), **_NO_FUSION
        )
    return out, log_sums


@kernel
def _logit_gradient_kernel(  # type: ignore[no-untyped-def]
    logits, ids, log_sums, grads, out, WIDTH: tl.constexpr, BLOCK: tl.constexpr
) -> None:
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < WIDTH
    wide = tl.load(logits + row * WIDTH + columns, mask=inside, other=0.0).to(tl.float32)
    probs = tl.exp(wide - tl.load(log_sums + row))
    chosen = (columns == tl.load(ids + row)).to(tl.float32)
    grad = (chosen - probs) * tl.load(grads + row)
    tl.store(out + row * WIDTH + columns, grad.to(out.dtype.element_ty), mask=inside)


def logit_gradients(logits: Tensor, ids: Tensor, log_sums: Tensor, grads: Tensor) -> Tensor:
    """Gradient [R, V] of `token_logprobs` in its logits, for float32 grads [R] of its values."""
    out = torch.empty_like(logits)
    rows, width = logits.shape
    if rows:
        grid = rows, -(-width // _COLUMNS)
        _logit_gradient_kernel[grid](
            logits, ids, log_sums, grads.contiguous(), out, WIDTH=width, BLOCK=_COLUMNS, num_warps=4
        )
    return out
