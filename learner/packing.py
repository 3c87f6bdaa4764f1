"""Which tokens run through the model together: micro-batches of whole segments, shared out to the replicas.

    pack(pieces, budget, shares) -> a list of micro-batches for each data-parallel replica, all of one length

Invariants: every piece is in exactly one micro-batch, whole; a micro-batch holds at most `budget` tokens
unless one segment alone is longer; the result depends on nothing but the arguments. Replicas that would
have less work are filled up with empty micro-batches, because a dropped segment would bias the batch and an
unequal count would hang the pipeline. Only positions that predict an action token get a row, so the output
layer computes nothing else.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..trajectory import Float32
from .batch import Piece

Int64 = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MicroBatch:
    """T tokens packed end to end, R of which predict an action token.

    token_ids           int64[T]
    positions           int64[T]    position of the token in its own segment
    cu_seqlens          (0, n1, n1 + n2, ..., T)
    rows                int64[R]    index of the token whose hidden state predicts the action
    targets             int64[R]    the action token
    flat                int64[R]    its index in the batch's flat order; -1 in an empty micro-batch
    behaviour_logprobs  float32[R]
    coefficients        float32[R]
    temperatures        float32[R]
    """

    token_ids: Int64
    positions: Int64
    cu_seqlens: tuple[int, ...]
    rows: Int64
    targets: Int64
    flat: Int64
    behaviour_logprobs: Float32
    coefficients: Float32
    temperatures: Float32

    @classmethod
    def of(cls, pieces: Sequence[Piece]) -> MicroBatch:
        lengths = [len(piece.segment) for piece in pieces]
        starts = np.concatenate([[0], np.cumsum(lengths)])
        actions = [piece.actions for piece in pieces]
        sampled = [(p.segment, a) for p, a in zip(pieces, actions, strict=True)]
        return cls(
            token_ids=np.concatenate([p.segment.token_ids for p in pieces]).astype(np.int64),
            positions=np.concatenate([np.arange(n) for n in lengths]),
            cu_seqlens=tuple(starts.tolist()),
            rows=np.concatenate([a - 1 + s for a, s in zip(actions, starts[:-1], strict=True)]),
            targets=np.concatenate([s.token_ids[a] for s, a in sampled]).astype(np.int64),
            flat=np.concatenate([p.first + np.arange(len(a)) for p, a in zip(pieces, actions, strict=True)]),
            behaviour_logprobs=np.concatenate([s.behaviour_logprobs[a] for s, a in sampled]),
            coefficients=np.concatenate(
                [np.full(len(a), p.coefficient, np.float32) for p, a in zip(pieces, actions, strict=True)]
            ),
            temperatures=np.concatenate(
                [np.full(len(a), s.sampling.temperature, np.float32) for s, a in sampled]
            ),
        )

    @classmethod
    def empty(cls) -> MicroBatch:
        """Work that adds exactly nothing: one prediction of a two-token sequence, with coefficient 0."""
        zero, row = np.zeros(1, np.int64), np.zeros(1, np.float32)
        return cls(
            token_ids=np.zeros(2, np.int64),
            positions=np.arange(2),
            cu_seqlens=(0, 2),
            rows=zero,
            targets=zero,
            flat=zero - 1,
            behaviour_logprobs=row,
            coefficients=row,
            temperatures=row + 1,
        )

    def __len__(self) -> int:
        return len(self.token_ids)


def pack(pieces: Sequence[Piece], budget: int, shares: int = 1) -> list[list[MicroBatch]]:
    """Split pieces into micro-batches of at most `budget` tokens and deal them to `shares` replicas.

    Longest segments are placed first into the emptiest micro-batch, and the fullest micro-batches are dealt
    first to the replica with least work. Without any piece each replica gets one empty micro-batch.
    """
    bins = _fill(pieces, budget, shares)
    bins.sort(key=lambda held: (-_tokens(held), held[0].first))
    each = -(-max(len(bins), 1) // shares)
    dealt: list[list[list[Piece]]] = [[] for _ in range(shares)]
    for held in bins:
        open_shares = [s for s in range(shares) if len(dealt[s]) < each]
        dealt[min(open_shares, key=lambda s: (sum(map(_tokens, dealt[s])), s))].append(held)
    return [
        [MicroBatch.of(held) for held in share] + [MicroBatch.empty()] * (each - len(share))
        for share in dealt
    ]


def _tokens(held: Sequence[Piece]) -> int:
    return sum(len(piece.segment) for piece in held)


def _fill(pieces: Sequence[Piece], budget: int, shares: int) -> list[list[Piece]]:
    """The smallest balanced split found, with at least one micro-batch per replica while pieces last."""
    longest_first = sorted(pieces, key=lambda piece: (-len(piece.segment), piece.first))
    count = min(max(-(-_tokens(pieces) // budget), shares), len(pieces))
    while (bins := _spread(longest_first, budget, count)) is None:
        count += 1
    return [sorted(held, key=lambda piece: piece.first) for held in bins]


def _spread(pieces: Sequence[Piece], budget: int, count: int) -> list[list[Piece]] | None:
    """Each piece into the emptiest of `count` micro-batches; None where one would pass the budget."""
    bins: list[list[Piece]] = [[] for _ in range(count)]
    emptiest_first = [(0, index) for index in range(count)]
    for piece in pieces:
        load, index = emptiest_first[0]
        if load and load + len(piece.segment) > budget:
            return None
        bins[index].append(piece)
        heapq.heapreplace(emptiest_first, (load + len(piece.segment), index))
    return bins
