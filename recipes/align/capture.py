"""What one side computed: the output of every operation, row by row, each row known by what led to it.

    Capture.add(operation, keys, output)     one call: rows of `output` [R, ...] belong to `keys`
    compare(reference, other, operations)    -> one Result for each operation, in the order they run

Invariant: a row's key is the digest of its token and all before it, so rows of two captures meet exactly
where the policy had seen the same, whatever else was in the batch, and where two samplings part nothing is
compared. The first row with a key stays.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

Key = bytes


class Operation(NamedTuple):
    """A step of the forward pass; `layer` is None outside of the layers."""

    layer: int | None
    name: str

    def __str__(self) -> str:
        return self.name if self.layer is None else f"layer {self.layer} {self.name}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One operation on both sides.

    rows         rows that both have
    differing    of these, rows with a bit that differs
    first        key of the first of them, in the reference's order; None without one
    largest      largest absolute difference of an element; NaN where one side alone has a NaN
    """

    operation: Operation
    rows: int
    differing: int
    first: Key | None
    largest: float


class Prefix:
    """The keys of a sequence that grows.

    >>> whole, begun = Prefix(), Prefix()
    >>> keys = whole.extend([5, 6, 7])
    >>> begun.extend([5, 6]) + begun.extend([7]) == keys
    True
    """

    def __init__(self) -> None:
        self._digest = hashlib.blake2b(digest_size=16)
        self.length = 0

    def extend(self, ids: Iterable[int]) -> list[Key]:
        """The key of each further token."""
        keys = []
        for token in ids:
            self._digest.update(int(token).to_bytes(8, "little", signed=True))
            keys.append(self._digest.digest())
            self.length += 1
        return keys


class Capture:
    """The outputs of one side under one condition, on the CPU."""

    def __init__(self) -> None:
        self._rows: dict[Operation, dict[Key, Tensor]] = {}
        self.largest_step = 0  # tokens in one forward pass

    def add(self, operation: Operation, keys: Sequence[Key], output: Tensor) -> None:
        """Keep a copy of the first len(keys) rows of `output` [R, ...]; what follows is padding."""
        kept = output.detach()[: len(keys)].flatten(1).to("cpu", copy=True)
        if len(kept) != len(keys):
            raise ValueError(f"{operation} has {len(kept)} rows for {len(keys)} tokens")
        held = self._rows.setdefault(operation, {})
        for key, row in zip(keys, kept, strict=True):
            held.setdefault(key, row)

    def rows(self, operation: Operation) -> dict[Key, Tensor]:
        """Rows by key; empty where the operation was never seen."""
        return self._rows.get(operation, {})


def compare(reference: Capture, other: Capture, operations: Sequence[Operation]) -> Iterator[Result]:
    """Every operation on the rows that both captures have."""
    for operation in operations:
        mine, theirs = reference.rows(operation), other.rows(operation)
        keys = [key for key in mine if key in theirs]
        if not keys:
            yield Result(operation=operation, rows=0, differing=0, first=None, largest=0.0)
            continue
        left, right = torch.stack([mine[k] for k in keys]), torch.stack([theirs[k] for k in keys])
        unequal = _bits_differ(left, right)
        first = int(unequal.nonzero()[0]) if unequal.any() else None
        yield Result(
            operation=operation,
            rows=len(keys),
            differing=int(unequal.sum()),
            first=None if first is None else keys[first],
            largest=0.0 if first is None else float((left.double() - right.double()).abs().max()),
        )


def _bits_differ(left: Tensor, right: Tensor) -> Tensor:
    """bool[R]: rows with any bit that differs, so that 0.0 and -0.0 do, and equal NaNs do not."""
    if left.shape != right.shape or left.dtype != right.dtype:
        raise ValueError(
            f"one side has {left.dtype} {tuple(left.shape)}, the other {right.dtype} {tuple(right.shape)}"
        )
    return (left.contiguous().view(torch.uint8) != right.contiguous().view(torch.uint8)).any(1)
