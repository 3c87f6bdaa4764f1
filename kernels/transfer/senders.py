"""The learner's side: what becomes of a version's tensors until every engine has them.

    share(tensors) -> Source    before anyone may see the version; the tensors are kept as they are
    release()                   every engine has taken them over, or will not

One version at a time: sharing the next one releases the one before.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.multiprocessing.reductions import reduce_tensor

from .layout import Layout
from .sources import Held, InMemory, OnDevice, Source, device_id, host_id


class Sender(Protocol):
    """One way to hand out a version."""

    def share(self, tensors: Mapping[str, Tensor]) -> Source | None:
        """None: there is nothing to fetch before the weight store has the version."""
        ...

    def release(self) -> None:
        """Idempotent."""
        ...


class FilesOnly:
    """Engines wait for the weight store."""

    def share(self, tensors: Mapping[str, Tensor]) -> Source | None:
        return None

    def release(self) -> None:
        pass


class InProcess:
    """The engine is a thread of the learner's process."""

    def share(self, tensors: Mapping[str, Tensor]) -> Source:
        synchronize(tensors)
        return Held(dict(tensors))

    def release(self) -> None:
        pass


class Shared:
    """One host; on GPUs, one GPU. The tensors' own memory there, a copy that processes share on a CPU."""

    def __init__(self) -> None:
        self._kept: list[Tensor] = []
        self._memory = contextlib.ExitStack()

    def share(self, tensors: Mapping[str, Tensor]) -> Source:
        self.release()
        first = next(iter(tensors.values()))
        if first.device.type != "cuda":
            return self._in_memory(tensors)
        synchronize(tensors)
        self._kept = list(tensors.values())
        reduce: Any = reduce_tensor
        handles = {name: reduce(tensor)[1] for name, tensor in tensors.items()}
        return OnDevice(uuid=device_id(first.device), handles=handles)

    def _in_memory(self, tensors: Mapping[str, Tensor]) -> Source:
        layout = Layout.of(tensors)
        descriptor = os.memfd_create("rz-weights")
        self._memory.callback(os.close, descriptor)
        os.ftruncate(descriptor, layout.size)
        path = f"/proc/self/fd/{descriptor}"
        buffer = torch.from_file(path, shared=True, size=layout.size, dtype=torch.uint8)
        for name, view in layout.views(buffer).items():
            view.copy_(tensors[name])
        return InMemory(host=host_id(), process=os.getpid(), descriptor=descriptor, layout=layout)

    def release(self) -> None:
        self._memory.close()
        if self._kept:
            self._kept = []
            # Else the memory that an engine has let go stays taken.
            torch.cuda.ipc_collect()  # type: ignore[no-untyped-call]


def synchronize(tensors: Mapping[str, Tensor]) -> None:
    """Return when the tensors are computed: other threads and processes do not wait for this stream."""
    for device in {tensor.device for tensor in tensors.values() if tensor.device.type == "cuda"}:
        torch.cuda.synchronize(device)
