"""Weights in the layout of their device's matrix product, packed once per state of the model.

The epoch is explicit: whoever writes weights says so with `advance()`. Tensor versions cannot be trusted
for this, because the distributed optimizer writes through `.data`, which leaves them unchanged.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from ...kernels.operations import Operations, Packed


class PackedWeights:
    """The cache of one model."""

    def __init__(self, operations: Operations) -> None:
        self.operations = operations
        self.epoch = 0
        self._packed: dict[int, Packed] = {}

    def get(self, owner: object, weight: Callable[[], Tensor]) -> Packed:
        """The packed weight of a module; `weight` is called only where it is not packed yet in this epoch."""
        if id(owner) not in self._packed:
            with torch.no_grad():
                self._packed[id(owner)] = self.operations.pack(weight().detach().contiguous())
        return self._packed[id(owner)]

    def advance(self) -> None:
        """The weights changed: forget what was packed."""
        self.epoch += 1
        self._packed = {}

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """Other weights are in the model for a while; on leaving, what was packed before is valid again."""
        kept, self._packed = self._packed, {}
        try:
            yield
        finally:
            self._packed = kept
