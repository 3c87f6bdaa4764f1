"""A version on an engine's device that nobody sees yet.

    Staging(offer, device)    a thread brings the tensors and computes their checksums
    done, fault               it has ended; why there is nothing to take over

Invariants: the engine's steps wait for nothing here: on a GPU the thread has a stream of its own, and what it
hashes is copied to the host there; it runs at a lower priority than the thread that steps. The checksums are
those of the tensors as they lie on the device. What was staged goes with this object.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from ...weight_store import tensor_checksum
from .sources import Offer

HASHERS = 4  # threads; one hashes about 1 GB/s
NICENESS = 10


class Staging:
    """What one offer came to."""

    def __init__(self, offer: Offer, device: torch.device) -> None:
        self.version, self.borrowed = offer.version, offer.source.borrowed
        self.tensors: Mapping[str, Tensor] = {}
        self.checksums: Mapping[str, str] = {}
        self.fault: str | None = None
        self.seconds = 0.0
        self._ended = threading.Event()
        work = threading.Thread(target=self._work, args=(offer, device), name="rz-staging", daemon=True)
        work.start()

    @property
    def done(self) -> bool:
        return self._ended.is_set()

    @property
    def whole(self) -> bool:
        return self.done and self.fault is None

    @property
    def size(self) -> int:
        """Bytes."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def join(self, seconds: float) -> None:
        """Wait for the thread's end."""
        self._ended.wait(seconds)

    def _work(self, offer: Offer, device: torch.device) -> None:
        began = time.monotonic()
        try:
            _step_aside()
            with device_of_its_own(device) as stream:
                tensors = offer.source.bring(device)
                self.checksums = _checksums(tensors, stream)
                self.tensors = tensors
        except BaseException as error:  # of a thread: nobody else would hear of it
            self.fault = f"{type(error).__name__}: {error}".splitlines()[0]
        finally:
            self.seconds = time.monotonic() - began
            self._ended.set()


def _checksums(tensors: Mapping[str, Tensor], stream: Any) -> dict[str, str]:
    """`tensor_checksum` by name."""

    def checksum(name: str) -> str:
        with _on(stream):
            return tensor_checksum(tensors[name])

    names = sorted(tensors, key=lambda name: -tensors[name].nbytes)  # the longest first: no straggler
    with ThreadPoolExecutor(HASHERS) as pool:
        return dict(zip(names, pool.map(checksum, names), strict=True))


@contextlib.contextmanager
def device_of_its_own(device: torch.device) -> Any:
    """This thread's work on a GPU goes to a new stream, and is done on leaving; None on a CPU."""
    if device.type != "cuda":
        yield None
        return
    with torch.cuda.device(device):
        stream: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        with torch.cuda.stream(stream):
            yield stream
        stream.synchronize()


def _on(stream: Any) -> Any:
    return contextlib.nullcontext() if stream is None else torch.cuda.stream(stream)


def _step_aside() -> None:
    """Threads started from here inherit it."""
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
