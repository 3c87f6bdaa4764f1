"""Which engine's cache holds the beginning of a prompt.

Invariant: only whole blocks count, because the engines cache whole blocks; a block's key covers all blocks
before it, so that a match of block n is a match of the whole prefix. A wrong answer costs time, never a bit.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

CAPACITY = 1 << 16  # blocks remembered: a few megabytes


class PrefixAffinity:
    """Remembers the last engine that computed each block of tokens."""

    def __init__(self, block_size: int, capacity: int = CAPACITY) -> None:
        self._block_size, self._capacity = block_size, capacity
        self._engine_of: OrderedDict[int, int] = OrderedDict()

    def learn(self, ids: Sequence[int], engine: int) -> None:
        """`engine` has computed these tokens."""
        for key in self._keys(ids):
            self._engine_of[key] = engine
            self._engine_of.move_to_end(key)
        while len(self._engine_of) > self._capacity:
            self._engine_of.popitem(last=False)

    def find(self, ids: Sequence[int]) -> int | None:
        """The engine with the longest known beginning of these tokens; None where no block is known."""
        for key in reversed(self._keys(ids)):
            if (engine := self._engine_of.get(key)) is not None:
                return engine
        return None

    def clear(self) -> None:
        """Every cache was emptied."""
        self._engine_of.clear()

    def _keys(self, ids: Sequence[int]) -> list[int]:
        keys, before, size = list[int](), 0, self._block_size
        for start in range(0, len(ids) - size + 1, size):
            before = hash((before, *ids[start : start + size]))
            keys.append(before)
        return keys
