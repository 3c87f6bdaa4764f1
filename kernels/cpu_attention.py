"""Causal attention through vLLM's paged CPU kernel, cut so that decode, chunked prefill and packing agree.

The kernel sizes the tile of keys that it sums at once by the number of query tokens of a request, so one long
request and its pieces get different bits. A request is therefore presented as pseudo requests of at most
`QUERY_TOKENS` query tokens over the same pages. The engine's plugin and the learner share `cut`, and both
switch the kernel's own split over keys off, because that one depends on the batch and on the threads.
See `cpu_library.SCRATCH` for who waits.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from . import cpu_library

# Up to 8 every query block gets one tile of keys, for every head layout; 16 already differ on all vector
# paths.
QUERY_TOKENS = 8

# The bits do not depend on the page size; the learner's pages only have to be a multiple of 32.
_PAGE = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class PseudoRequests:
    """Requests cut into pieces: `owner[i]` is the request that piece i belongs to.

    query_start_loc  int32[P + 1]  first query token of each piece in the packed queries
    seq_lens         int32[P]      keys that the last query token of the piece attends to
    longest          query tokens of the longest piece
    """

    owner: Tensor
    query_start_loc: Tensor
    seq_lens: Tensor
    longest: int


def cut(query_lens: Sequence[int], seq_lens: Sequence[int]) -> PseudoRequests:
    """Cut requests with `query_lens` new tokens at the end of `seq_lens` tokens.

    >>> pieces = cut([10, 1], [12, 30])
    >>> pieces.owner.tolist(), pieces.query_start_loc.tolist(), pieces.seq_lens.tolist()
    ([0, 0, 1], [0, 8, 10, 11], [10, 12, 30])
    """
    owner: list[int] = []
    starts = [0]
    ends: list[int] = []
    for request, (queries, length) in enumerate(zip(query_lens, seq_lens, strict=True)):
        for done in range(0, queries, QUERY_TOKENS):
            piece = min(QUERY_TOKENS, queries - done)
            owner.append(request)
            starts.append(starts[-1] + piece)
            ends.append(length - queries + done + piece)
    return PseudoRequests(
        owner=torch.tensor(owner, dtype=torch.int64),
        query_start_loc=torch.tensor(starts, dtype=torch.int32),
        seq_lens=torch.tensor(ends, dtype=torch.int32),
        longest=max((b - a for a, b in itertools.pairwise(starts)), default=0),
    )


def packed_causal(q: Tensor, k: Tensor, v: Tensor, lengths: Sequence[int], scale: float) -> Tensor:
    """Attention of q [T, H, D] over k, v [T, KV, D] within sequences of the given lengths, no gradient."""
    cpu_library.load()
    _, heads, head_dim = q.shape
    kv_heads = k.shape[1]
    path = cpu_library.attention_path(q.dtype, head_dim, _PAGE)
    pages = [-(-length // _PAGE) for length in lengths]
    cache = q.new_zeros(sum(pages), kv_heads, 2 * _PAGE, head_dim)
    keys, values = cache.chunk(2, dim=2)
    table = torch.zeros(len(lengths), max(pages, default=0), dtype=torch.int32)
    slots: list[Tensor] = []
    first = 0
    for row, (length, count) in enumerate(zip(lengths, pages, strict=True)):
        table[row, :count] = torch.arange(first, first + count, dtype=torch.int32)
        slots.append(torch.arange(length) + first * _PAGE)
        first += count
    torch.ops._C.cpu_attn_reshape_and_cache(k, v, keys, values, torch.cat(slots), path, 1.0, 1.0, "auto")
    pieces = cut(lengths, lengths)
    out = torch.empty_like(q)
    with cpu_library.SCRATCH:
        plan = torch.ops._C.get_scheduler_metadata(
            len(pieces.owner), heads, kv_heads, head_dim, pieces.seq_lens, q.dtype, pieces.query_start_loc,
            True, -1, path, False, None, "auto",
        )  # fmt: skip
        torch.ops._C.cpu_attention_with_kv_cache(
            q, keys, values, out, pieces.query_start_loc, pieces.seq_lens, scale, True, None, -1,
            table[pieces.owner].contiguous(), 0.0, plan, None, None, 1.0, 1.0, "auto",
        )  # fmt: skip
    return out
