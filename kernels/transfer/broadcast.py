"""A version in buckets from the learner to every engine at once: NCCL between GPUs, gloo between CPUs.

    Broadcasting(address, receivers)   the learner's side: a thread sends while engines fetch
    Broadcast                          the source that an engine is told

    learner   bucket 0 --> bucket 1 --> bucket 0 ...     one is filled while the other travels
    engines   the same bytes, straight into place

Each version has a process group of its own, apart from the learner's and vLLM's, and a store at a port of the
learner's host where its members meet: an engine that was replaced needs no repair of a group, and one that is
gone costs `JOIN_S`. Everybody who waits for a member does so for a bounded time, and then raises. Nobody
leaves the group before everybody has the version: NCCL may read a member's memory, and its orderly end waits
for all. NCCL refuses two members on one GPU, so this says so before NCCL is asked. It hangs where members
differ in settings that choose a protocol, and vLLM's batch invariance changes those of its process: engines
take the learner's while the group is made.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, ClassVar

import torch
import torch.distributed
from torch import Tensor

from .layout import Layout
from .senders import synchronize
from .sources import NotHere, device_id
from .staging import device_of_its_own

dist: Any = torch.distributed  # exports these classes to no type checker

BUCKET = 64 << 20
EVERYBODY = "everybody has it"
JOIN_S = timedelta(seconds=30)
BUCKET_S = timedelta(seconds=60)
# torch's watchdog would end the process over a lost member; here its caller is told instead.
NO_WATCHDOG = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "TORCH_NCCL_ENABLE_MONITORING": "0"}
# What vLLM sets for VLLM_BATCH_INVARIANT.
NCCL_SETTINGS = (
    "NCCL_ALGO",
    "NCCL_COLLNET_ENABLE",
    "NCCL_LAUNCH_MODE",
    "NCCL_MAX_NCHANNELS",
    "NCCL_MIN_NCHANNELS",
    "NCCL_NTHREADS",
    "NCCL_NVLS_ENABLE",
    "NCCL_P2P_NET_DISABLE",
    "NCCL_PROTO",
    "NCCL_SOCKET_NTHREADS",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Broadcast:
    """Who sends, and what.

    address, port  of the store
    receivers      engines that fetch
    """

    layout: Layout
    address: str
    port: int
    receivers: int
    borrowed: ClassVar[bool] = False

    def bring(self, device: torch.device) -> dict[str, Tensor]:
        store = dist.TCPStore(
            self.address, self.port, is_master=False, wait_for_workers=False, timeout=JOIN_S
        )
        rank = int(store.add("members", 1))
        if rank > self.receivers:
            raise NotHere(f"{rank} engines fetch what is sent to {self.receivers}")
        buffer = torch.empty(self.layout.size, dtype=torch.uint8, device=device)
        with _group(store, rank, self.receivers + 1, device) as group:
            for start, end in _buckets(self.layout.size):
                _wait(_broadcast(group, buffer[start:end]))
            store.set(f"has/{rank}", "")
            # Every byte is here: what becomes of the others is their own affair.
            with contextlib.suppress(dist.DistError):
                store.wait([EVERYBODY], JOIN_S)
        return self.layout.views(buffer)


class Broadcasting:
    """`Sender` to engines on other devices than the learner's.

    address    of this host, as engines reach it
    receivers  engines; if another number of them fetches, all read files
    """

    def __init__(self, address: str, receivers: int) -> None:
        self._address, self._receivers = address, receivers
        self._thread: threading.Thread | None = None

    def share(self, tensors: Mapping[str, Tensor]) -> Broadcast:
        self.release()
        synchronize(tensors)
        store = dist.TCPStore(self._address, 0, is_master=True, wait_for_workers=False, timeout=JOIN_S)
        source = Broadcast(
            layout=Layout.of(tensors), address=self._address, port=store.port, receivers=self._receivers
        )
        self._thread = threading.Thread(
            target=_send, args=(source, store, dict(tensors)), name="rz-broadcast", daemon=True
        )
        self._thread.start()
        return source

    def release(self) -> None:
        """Wait for the thread, which gives up by itself: on an engine that is gone, after `JOIN_S`."""
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.join((JOIN_S + BUCKET_S).total_seconds())


def _send(source: Broadcast, store: Any, tensors: Mapping[str, Tensor]) -> None:
    # What fails here fails for the engines too: they say so, and read the file.
    with contextlib.suppress(Exception):
        device = next(iter(tensors.values())).device
        with (
            device_of_its_own(device),
            _group(store, 0, source.receivers + 1, device) as group,
        ):
            _send_buckets(source.layout, tensors, group, device)
            # The store is served from here.
            store.wait([f"has/{rank}" for rank in range(1, source.receivers + 1)], JOIN_S)
            store.set(EVERYBODY, "")


def _send_buckets(layout: Layout, tensors: Mapping[str, Tensor], group: Any, device: torch.device) -> None:
    flat = {name: tensor.contiguous().reshape(-1).view(torch.uint8) for name, tensor in tensors.items()}
    buckets = [torch.empty(min(BUCKET, layout.size), dtype=torch.uint8, device=device) for _ in range(2)]
    travelling: list[Any] = []
    for number, (start, end) in enumerate(_buckets(layout.size)):
        if len(travelling) == len(buckets):
            _wait(travelling.pop(0))
        bucket = buckets[number % 2][: end - start]
        for entry, first, last in layout.within(start, end):
            place = entry.start + first - start
            bucket[place : place + last - first].copy_(flat[entry.name][first:last])
        travelling.append(_broadcast(group, bucket))
    for work in travelling:
        _wait(work)


def _buckets(size: int) -> Iterator[tuple[int, int]]:
    for start in range(0, size, BUCKET):
        yield start, min(start + BUCKET, size)


@contextlib.contextmanager
def _group(store: Any, rank: int, ranks: int, device: torch.device) -> Iterator[Any]:
    """A process group of the members that met at the store. Raises where one does not come."""
    store.set(f"device/{rank}", device_id(device))
    names = [f"device/{member}" for member in range(ranks)]
    store.wait(names, JOIN_S)
    inside = dist.PrefixStore("group", store)
    if device.type != "cuda":
        yield dist.ProcessGroupGloo(inside, rank, ranks, BUCKET_S)
        return
    places = [store.get(name) for name in names]
    if len(set(places)) < ranks:
        raise NotHere(f"two of {ranks} members are on one GPU, which NCCL refuses: use transport 'shared'")
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = 2 * BUCKET_S
    with environment({**learners_settings(store, rank), **NO_WATCHDOG}):
        group = dist.ProcessGroupNCCL(inside, rank, ranks, options)
        try:
            # The first collective is what reads them.
            _wait(_broadcast(group, torch.zeros(1, dtype=torch.uint8, device=device)))
        except BaseException:
            group.abort()
            raise
    try:
        yield group
    finally:
        group.abort()  # which waits for nobody


def learners_settings(store: Any, rank: int) -> dict[str, str | None]:
    """Values of `NCCL_SETTINGS` in the learner's process; None where it has none."""
    if rank == 0:
        store.set("nccl", json.dumps({name: os.environ.get(name) for name in NCCL_SETTINGS}))
    found: dict[str, str | None] = json.loads(store.get("nccl"))
    return found


def _broadcast(group: Any, buffer: Tensor) -> Any:
    options = dist.BroadcastOptions()
    options.rootRank, options.rootTensor = 0, 0
    return group.broadcast([buffer], options)


def _wait(work: Any) -> None:
    """Blocks this thread, on a GPU too. Raises for a member that is lost, after `BUCKET_S` at the latest."""
    work.wait(BUCKET_S)


@contextlib.contextmanager
def environment(settings: Mapping[str, str | None]) -> Iterator[None]:
    """Settings that torch and NCCL take from the environment alone; None: not set."""
    before = {name: os.environ.get(name) for name in settings}
    _set(settings)
    try:
        yield
    finally:
        _set(before)


def _set(settings: Mapping[str, str | None]) -> None:
    for name, value in settings.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
