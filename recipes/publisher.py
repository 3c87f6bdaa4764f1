"""The way of one version from the learner to the engine: on disk, fetched beside the steps, then taken over.

    put(version, tensors)   the weight store has it on return; the engine may be fetching it already
    publish(manifest)       the engine serves it, proved by checksum

Between the two the caller makes the update durable: what is fetched is nobody's to see before `publish`.
The store stays the truth: an engine that could not fetch a version reads its file, and the run says so.
After `MAX_FAULTS` such versions in a row the learner offers files only.
Waits: `put` for the disk; `publish` for the engine's fetching (bounded by the engine), then for the update.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping

from torch import Tensor

from ..errors import RzError
from ..kernels.transfer.senders import FilesOnly, Sender
from ..kernels.transfer.sources import InFile, Offer, Source
from ..rollout.engine import Engine, Prepared
from ..weight_store import WeightManifest, WeightStore

MAX_FAULTS = 3


class Publisher:
    """For one version after the other.

    note  tells a person why a version did not come the way it was meant to
    """

    def __init__(
        self, engine: Engine, store: WeightStore, sender: Sender, note: Callable[[str], None]
    ) -> None:
        self._engine, self._store, self._sender, self._note = engine, store, sender, note
        self._fetching: asyncio.Task[Prepared] | None = None
        self._fault: str | None = None  # of the learner's side, with the version on its way
        self._faults = 0

    async def put(self, version: int, tensors: Mapping[str, Tensor]) -> WeightManifest:
        """Durable on return. Nobody may change the tensors before the version is published."""
        source = await self._share(tensors)
        if source is not None:
            self._fetch(Offer(version=version, source=source))
        manifest = await asyncio.to_thread(self._store.put, version, tensors)
        if source is None:
            self._fetch(Offer(version=version, source=InFile(manifest.path)))
        return manifest

    async def publish(self, manifest: WeightManifest) -> dict[str, float]:
        """Load a version that is durable; the figures of how it went."""
        figures = {}
        if self._fetching is not None:
            prepared, self._fetching = await self._fetching, None
            figures["time/prepare_s"] = prepared.seconds
            self._judge(manifest.version, self._fault or prepared.fault)
        taken = await self._engine.update(manifest)
        await asyncio.to_thread(self._sender.release)
        return {**figures, "time/engine_paused_s": taken.paused_s}

    async def close(self) -> None:
        """Give up what is not published."""
        if self._fetching is not None:
            self._fetching.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await self._fetching
        with contextlib.suppress(RzError):  # of a learner that is gone, and its copies with it
            await asyncio.to_thread(self._sender.release)

    async def _share(self, tensors: Mapping[str, Tensor]) -> Source | None:
        self._fault = None
        try:
            return await asyncio.to_thread(self._sender.share, tensors)
        except RzError:
            raise
        except Exception as error:  # of torch, of the system: the file needs neither
            self._fault = f"{type(error).__name__}: {error}".splitlines()[0]
            return None

    def _fetch(self, offer: Offer) -> None:
        self._fetching = asyncio.create_task(self._engine.prepare(offer), name="fetch weights")

    def _judge(self, version: int, fault: str | None) -> None:
        self._faults = self._faults + 1 if fault else 0
        if fault is None:
            return
        self._note(f"version {version} comes from its file: {fault}")
        if self._faults == MAX_FAULTS and not isinstance(self._sender, FilesOnly):
            self._note(f"{MAX_FAULTS} versions in a row: from now on engines read files")
            self._sender.release()
            self._sender = FilesOnly()
