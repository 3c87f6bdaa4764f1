"""Gradient of packed causal grouped-query attention; memory grows with the longest sequence, not its square.

The forward saves only its output: probabilities are computed again here, block by block, from q, k and v
(FlashAttention, Dao et al. 2022, section 3.1 and algorithm 4). With P the probabilities, O the output and
dO its gradient, row by row:

    dV = P' dO,   dP = dO V',   dS = P * (dP - rowsum(dO * O)) * scale,   dQ = dS K,   dK = dS' Q

Sums are in float32, or float64 where the inputs are. Nothing waits.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

# Queries whose probabilities exist at once: [KV, H/KV, _BLOCK, n] floats.
_BLOCK = 128


def attention_gradients(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, grad: Tensor, cu_seqlens: tuple[int, ...], scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q [T, H, D], k and v [T, KV, D] from that of out [T, H, D], in their own dtypes."""
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    for start, end in itertools.pairwise(cu_seqlens):
        rows = slice(start, end)
        one = _sequence_gradients(q[rows], k[rows], v[rows], out[rows], grad[rows], scale)
        dq[rows], dk[rows], dv[rows] = one
    return dq, dk, dv


def _sequence_gradients(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, grad: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    length, _, head_dim = q.shape
    kv_heads = k.shape[1]
    wide = torch.promote_types(q.dtype, torch.float32)

    def by_head(x: Tensor) -> Tensor:
        """[n, H, D] -> [KV, H/KV, n, D], or [n, KV, D] -> [KV, 1, n, D]."""
        return x.to(wide).permute(1, 0, 2).reshape(kv_heads, -1, length, head_dim)

    queries, keys, values, grads = by_head(q), by_head(k), by_head(v), by_head(grad)
    inner = (grads * by_head(out)).sum(-1, keepdim=True)
    dq = torch.empty_like(queries)
    dk, dv = torch.zeros_like(keys), torch.zeros_like(values)
    positions = torch.arange(length, device=q.device)
    for start in range(0, length, _BLOCK):
        end = min(start + _BLOCK, length)
        block, seen = slice(start, end), slice(0, end)
        scores = queries[:, :, block] @ keys[:, :, seen].transpose(-1, -2) * scale
        future = positions[block, None] < positions[None, seen]
        probs = scores.masked_fill_(future, float("-inf")).softmax(-1)
        grad_block = grads[:, :, block]
        dv[:, :, seen] += (probs.transpose(-1, -2) @ grad_block).sum(1, keepdim=True)
        ds = probs * (grad_block @ values[:, :, seen].transpose(-1, -2) - inner[:, :, block]) * scale
        dq[:, :, block] = ds @ keys[:, :, seen]
        dk[:, :, seen] += (ds.transpose(-1, -2) @ queries[:, :, block]).sum(1, keepdim=True)

    def by_token(x: Tensor, like: Tensor) -> Tensor:
        return x.reshape(-1, length, head_dim).permute(1, 0, 2).to(like.dtype)

    return by_token(dq, q), by_token(dk, k), by_token(dv, v)
