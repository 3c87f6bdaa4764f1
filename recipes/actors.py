"""What runs on the nodes of a cluster: plain objects around the engine and around one rank of the learner.

`cluster.py` makes actors of them. An engine actor is asynchronous: many calls are in progress at once, each
waiting for the engine. A rank does one call at a time, in one thread.
Both are told where the model is: a folder of this node, or the digest of one that was sent here.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from ..kernels.transfer.broadcast import Broadcasting
from ..kernels.transfer.senders import FilesOnly, Sender, Shared
from ..kernels.transfer.sources import InFile, Offer, Source, device_id
from ..learner.learner_config import LearnerConfig
from ..learner.ranks import AnyLearner, Call
from ..rollout.engine import Completion, Engine, EngineDead, Prepared, Takeover, make_engine
from ..rollout.engine_config import EngineConfig
from ..trajectory import Float32
from ..weight_store import WeightManifest
from .node_files import Content, NodeFiles, default_cache


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendezvous:
    """Where the ranks of a learner meet: a port on rank 0's node, unused with one rank."""

    address: str
    port: int
    rank: int
    ranks: int


class NodeActor:
    """What every actor can do: hold files, and say what it sees of its node."""

    def __init__(self) -> None:
        self._files = NodeFiles(default_cache())

    def has_folder(self, digest: str) -> bool:
        return self._files.find(digest) is not None

    def receive_file(self, name: str, content: Content) -> None:
        self._files.receive(name, content)

    def complete_folder(self, digest: str) -> None:
        self._files.complete(digest)

    def process_id(self) -> int:
        return os.getpid()

    def _folder(self, model: Path | str) -> Path:
        """A folder of this node, or the one that was sent under this digest."""
        if isinstance(model, Path):
            return model
        folder = self._files.find(model)
        assert folder is not None, f"the model {model} was not sent to this node"
        return folder


class EngineActor(NodeActor):
    """An engine in a process of its own.

    The engine's own "async" mode would put it into a child of this process, which outlives a killed actor
    and keeps its memory; the actor is the process that was asked for, so the engine is a thread of it.
    """

    def __init__(self) -> None:
        super().__init__()
        self._weights = Path(tempfile.mkdtemp(prefix="rz-weights-"))
        self._engine: Engine | None = None

    async def start(self, config: EngineConfig, model: Path | str) -> str:
        """Load the model; returns the engine's contract."""
        here = config.model_copy(update={"mode": "inprocess", "model": self._folder(model)})
        self._engine = make_engine(here)
        await self._engine.start()
        return self._engine.contract

    async def generate(self, *arguments: Any, **options: Any) -> Completion:
        return await self._started.generate(*arguments, **options)

    async def score(self, *arguments: Any, **options: Any) -> Float32:
        return await self._started.score(*arguments, **options)

    async def checksums(self) -> dict[str, str]:
        return await self._started.checksums()

    def place(self) -> str:
        """The device that it computes on, see `device_id`."""
        return device_id(_device())

    async def prepare(self, offer: Offer, content: Content | None) -> Prepared:
        """Fetch a version; `content` as in `update`."""
        if content is None:
            return await self._started.prepare(offer)
        path = self._weights / f"staged-{offer.version}"
        await asyncio.to_thread(content.tofile, path)
        try:
            return await self._started.prepare(replace(offer, source=InFile(path)))
        finally:
            path.unlink()

    async def update(self, manifest: WeightManifest, content: Content | None) -> Takeover:
        """Serve a version.

        content  bytes of the manifest's file, where this node does not see the file; the engine checks every
                 tensor by the manifest's checksum as ever
        """
        if content is not None:
            path = self._weights / manifest.path.name
            await asyncio.to_thread(content.tofile, path)
            manifest = replace(manifest, path=path)
        try:
            return await self._started.update(manifest)
        finally:
            if content is not None:
                manifest.path.unlink()

    async def close(self) -> None:
        shutil.rmtree(self._weights, ignore_errors=True)
        if self._engine is not None:
            await self._engine.close()

    @property
    def _started(self) -> Engine:
        if self._engine is None:
            raise EngineDead("the engine was never started")
        return self._engine


class LearnerActor(NodeActor):
    """One rank of the learner."""

    def __init__(self) -> None:
        super().__init__()
        self._learner: AnyLearner | None = None
        self._rank = 0
        self._sender: Sender = FilesOnly()
        self._weights: dict[str, Tensor] = {}

    def meeting_port(self) -> int:
        """A port of this node that was free a moment ago."""
        with socket.socket() as probe:
            probe.bind(("", 0))
            return int(probe.getsockname()[1])

    def sees(self, path: Path, content: str) -> bool:
        """Whether a file of the driver is there for this node too."""
        return path.is_file() and path.read_text() == content

    def build(self, model: Path | str, config: LearnerConfig, meet: Rendezvous) -> tuple[str, int]:
        """Load the model and join the other ranks; returns the learner's contract and version."""
        from ..learner.learner import Learner  # here, because engines need no Megatron

        if meet.ranks > 1:
            # What torchrun would say; this process belongs to the rank alone. Of the node's devices, the
            # actor sees its own only.
            os.environ |= {
                "RANK": str(meet.rank),
                "WORLD_SIZE": str(meet.ranks),
                "LOCAL_RANK": "0",
                "MASTER_ADDR": meet.address,
                "MASTER_PORT": str(meet.port),
            }
        self._rank = meet.rank
        self._learner = Learner(self._folder(model), config)
        return self._learner.contract, self._learner.version

    def make(self, call: Call) -> tuple[Any, int]:
        """Rank 0's answer, None of the others; and the version after the call."""
        assert self._learner is not None, "build comes first"
        answer = call.make(self._learner)
        if self._rank > 0:
            return None, self._learner.version
        if call.method == "weights":
            self._weights = {} if isinstance(self._sender, FilesOnly) else answer
            answer = {name: tensor.to("cpu") for name, tensor in answer.items()}  # the driver may have no GPU
        return answer, self._learner.version

    def place(self) -> str:
        """The device that it computes on, see `device_id`."""
        return device_id(_device())

    def send_by(self, transport: Literal["shared", "broadcast"], address: str, receivers: int) -> None:
        """How `share` is to hand out weights, and to how many engines; `address` is this node's."""
        self._sender = Shared() if transport == "shared" else Broadcasting(address, receivers)

    def share(self) -> Source:
        """The weights that `make` gave last, to the engines; they are kept here until `release`."""
        source = self._sender.share(self._weights)
        assert source is not None, "send_by comes first"
        return source

    def release(self) -> None:
        self._sender.release()
        self._weights = {}


def _device() -> torch.device:
    return (
        torch.device("cuda", torch.cuda.current_device())
        if torch.cuda.is_available()
        else torch.device("cpu")
    )
