"""Tensors one after another in one run of bytes: how they travel through shared memory and a network."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

ALIGNMENT = 256  # every dtype can be read there, and vector instructions too


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One tensor and where its bytes begin."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int

    @property
    def end(self) -> int:
        return self.start + math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Where each tensor lies; the same for everyone who is told it."""

    entries: tuple[Entry, ...]
    size: int

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor]) -> Self:
        entries, end = [], 0
        for name, tensor in tensors.items():
            start = -(-end // ALIGNMENT) * ALIGNMENT
            entries.append(Entry(name=name, dtype=tensor.dtype, shape=tuple(tensor.shape), start=start))
            end = entries[-1].end
        return cls(entries=tuple(entries), size=end)

    def views(self, buffer: Tensor) -> dict[str, Tensor]:
        """The tensors that uint8[size] holds, in its memory."""
        return {
            entry.name: buffer[entry.start : entry.end].view(entry.dtype).view(entry.shape)
            for entry in self.entries
        }

    def within(self, start: int, end: int) -> Iterator[tuple[Entry, int, int]]:
        """(entry, first, last): which of its own bytes lie in start..end, for each entry with some."""
        for entry in self.entries:
            first, last = max(start, entry.start), min(end, entry.end)
            if first < last:
                yield entry, first - entry.start, last - entry.start
