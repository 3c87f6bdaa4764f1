"""Where an engine gets the tensors of a version from, while it goes on generating.

    Offer(version, source)       what an engine is told; it travels pickled, but for `Held`
    source.bring(device)         the tensors on that device; in a thread of the engine's process

    InFile      a file of the weight store
    Held        the learner's own copies, in one process with it
    InMemory    the learner's own copies, in memory that processes of one host share
    OnDevice    the learner's own copies, on the GPU that both use (CUDA IPC)
    `broadcast.Broadcast` is the fifth.

Invariants: what is brought is not the version yet; whoever takes it over proves it by the checksums of the
manifest. The learner keeps its copies unchanged until every engine has taken them over or has said that it
will not. A source that cannot be used here raises, with the reason, within a bounded time.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.multiprocessing.reductions import rebuild_cuda_tensor

from ...errors import RzError
from .layout import Layout

DEVICE = 6  # place of the device's index among the arguments of rebuild_cuda_tensor


class NotHere(RzError):
    """The tensors cannot be had from this process; the weight store has them."""


class Source(Protocol):
    """One way to a version's tensors.

    borrowed  they stay in the learner's memory; else they take some of the engine's device
    """

    @property
    def borrowed(self) -> bool: ...

    def bring(self, device: torch.device) -> dict[str, Tensor]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """A version that an engine may fetch, before it is anyone's to see."""

    version: int
    source: Source


@dataclass(frozen=True, slots=True)
class InFile:
    """On a CPU the tensors are the file's pages."""

    path: Path
    borrowed: ClassVar[bool] = False

    def bring(self, device: torch.device) -> dict[str, Tensor]:
        tensors = load_file(self.path)
        if device.type == "cpu":
            return tensors
        layout = Layout.of(tensors)
        # One piece of memory, which the device gets back as fast as it gave it.
        views = layout.views(torch.empty(layout.size, dtype=torch.uint8, device=device))
        for name, view in views.items():
            view.copy_(tensors[name])
        return views


@dataclass(frozen=True, slots=True)
class Held:
    """Nothing is copied where learner and engine compute on one device."""

    tensors: Mapping[str, Tensor]
    borrowed: ClassVar[bool] = True

    def bring(self, device: torch.device) -> dict[str, Tensor]:
        return {name: tensor.to(device) for name, tensor in self.tensors.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class InMemory:
    """Memory without a name: it is gone with the last process that uses it, however that ended.

    host        `host_id` of the learner's process
    process, descriptor   where that process keeps it open
    """

    host: str
    process: int
    descriptor: int
    layout: Layout
    borrowed: ClassVar[bool] = True

    def bring(self, device: torch.device) -> dict[str, Tensor]:
        if self.host != host_id():
            raise NotHere("the learner's memory is another host's")
        path = f"/proc/{self.process}/fd/{self.descriptor}"
        buffer = torch.from_file(path, shared=True, size=self.layout.size, dtype=torch.uint8)
        return {name: tensor.to(device) for name, tensor in self.layout.views(buffer).items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class OnDevice:
    """Handles of tensors on one GPU.

    uuid     of the GPU: its index depends on what a process sees
    handles  arguments of torch's rebuild_cuda_tensor by name; each handle is good for one engine
    """

    uuid: str
    handles: Mapping[str, tuple[Any, ...]]
    borrowed: ClassVar[bool] = True

    def bring(self, device: torch.device) -> dict[str, Tensor]:
        mine = device_id(device)
        if mine != self.uuid:
            raise NotHere(f"the learner's tensors are on {self.uuid}, the engine computes on {mine}")
        index = torch.cuda.current_device() if device.index is None else device.index
        rebuild: Any = rebuild_cuda_tensor
        return {
            name: rebuild(*handle[:DEVICE], index, *handle[DEVICE + 1 :])
            for name, handle in self.handles.items()
        }


@functools.cache
def host_id() -> str:
    """Equal in two processes that can see each other below /proc."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {os.readlink('/proc/self/ns/pid')}"


def device_id(device: torch.device) -> str:
    """Equal in two processes that compute on one device: a GPU's UUID, or the host of a CPU."""
    if device.type == "cpu":
        return f"cpu of {host_id()}"
    return f"GPU {torch.cuda.get_device_properties(device).uuid}"
