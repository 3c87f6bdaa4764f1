"""`runtime = "ray"`: the engines and the ranks of the learner as actors, on one host or many.

    driver: controller, scheduler, episodes, journal, weight store
      |-- EnginePool -- RayEngine --> EngineActor   x rollout.engine.replicas
      '-- RayLearner ---------------> LearnerActor  x tensor * pipeline * ray.learner_replicas

This file and `cluster_*.py` are the only ones that know Ray. Environments and sandboxes stay with the driver.
Hosts need to share nothing but the runs folder, and that only if a rank of the learner is on another one than
the driver, because all ranks write checkpoints (checked on starting). Models and weights go through Ray's
object store to each node that is not the driver's.
Invariants: what was connected here is disconnected here, and a cluster is stopped only if it was started
here; an actor that is gone is an `EngineDead` or a `RankFailed`, an error inside of one arrives as it was.
Waits: as for the local objects; a placement for free devices, `PLACEMENT_S` at most.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import ray
import ray.exceptions

from ..errors import ConfigError, RzError
from ..kernels.transfer.sources import InFile, Offer
from ..rollout.engine import Completion, EngineDead, Prepared, Takeover
from ..rollout.engine_config import EngineConfig
from ..rollout.engine_pool import EnginePool
from ..trajectory import Float32, Sampling
from ..weight_store import WeightManifest
from .actors import EngineActor
from .node_files import files_of, folder_digest
from .recipe import Recipe
from .sections import RaySection

PLACEMENT_S = 600.0
CLOSING_S = 30.0


class NotPlaced(RzError):
    """The cluster has no room for an actor."""


@dataclass(slots=True, kw_only=True)
class Cluster:
    """A connection to Ray and what was sent through it.

    here     the node whose files are the driver's; None where the driver is on no node
    share    of the devices, for each actor
    calls    that an engine may have in progress at once
    """

    here: str | None
    share: dict[str, float]
    calls: int
    _digests: dict[Path, str] = field(default_factory=dict)
    _sent: dict[Path, Any] = field(default_factory=dict)
    _newest: tuple[Path, Any] = (Path(), None)

    def actor(self, kind: type[Any], **options: Any) -> Any:
        """A new actor of this class; placed as soon as its share is free."""
        return ray.remote(kind).options(**self.share, **options).remote()

    def is_here(self, actor: Any) -> bool:
        """Whether the actor sees the driver's files. Waits until it is placed."""
        try:
            node = ray.get(actor.__ray_call__.remote(_node), timeout=PLACEMENT_S)
        except ray.exceptions.GetTimeoutError:
            have = ray.available_resources()
            raise NotPlaced(
                f"no node had {self.share} free within {PLACEMENT_S:.0f} s; free are {have}. End what "
                "else runs there, or use fewer replicas."
            ) from None
        return bool(node == self.here)

    def model_for(self, actor: Any, folder: Path) -> Path | str:
        """How to name the model to an actor: by its path here, else by its digest, once it is there."""
        if self.is_here(actor):
            return folder.absolute()
        digest = self._digests.setdefault(folder, "") or folder_digest(folder)
        self._digests[folder] = digest
        if not ray.get(actor.has_folder.remote(digest)):
            for name in files_of(folder):
                ray.get(actor.receive_file.remote(name, self._stored(folder / name)))
            ray.get(actor.complete_folder.remote(digest))
        return digest

    def weights_at(self, path: Path) -> Any:
        """A file of the weight store in the object store; all engines of a version read the same object."""
        known, content = self._newest
        if known != path:
            content = ray.put(np.fromfile(path, np.uint8))
            self._newest = (path, content)
        return content

    def _stored(self, path: Path) -> Any:
        if path not in self._sent:
            self._sent[path] = ray.put(np.fromfile(path, np.uint8))
        return self._sent[path]


@contextlib.contextmanager
def connected(recipe: Recipe) -> Iterator[Cluster]:
    """The recipe's cluster; one on this machine where it names none, stopped on leaving.

    Where this process is connected already, that connection is used and kept.
    """
    ours = not ray.is_initialized()
    if ours:
        _connect(recipe.ray)
    try:
        client = (recipe.ray.address or "").startswith("ray://")
        here = None if client else str(ray.get_runtime_context().get_node_id())
        actors = recipe.rollout.engine.replicas + learner_ranks(recipe)
        # Requests wait in the engine, not before it: an update must not queue behind them.
        calls = 2 * recipe.rollout.episodes_in_flight + 64
        yield Cluster(here=here, share=share(actors, ray.cluster_resources()), calls=calls)
    finally:
        if ours:
            ray.shutdown()


def _connect(section: RaySection) -> None:
    """Quietly; Ray takes over SIGTERM and reports usage over the network, and here it does neither."""
    usage = os.environ.get("RAY_USAGE_STATS_ENABLED")
    in_main = threading.current_thread() is threading.main_thread()
    handler = signal.getsignal(signal.SIGTERM)
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    quiet = {"log_to_driver": False, "configure_logging": False}
    try:
        if section.address is None:
            ray.init("local", include_dashboard=False, **quiet)
        else:
            ray.init(section.address, **quiet)
    except ConnectionError as error:
        raise ConfigError(
            source="recipe",
            key="ray.address",
            value=section.address,
            why=f"does not answer: {error}",
            remedy="Start it with `ray start --head`, or leave ray.address out.",
        ) from error
    finally:
        if in_main:
            signal.signal(signal.SIGTERM, handler)
        if usage is None:
            del os.environ["RAY_USAGE_STATS_ENABLED"]
        else:
            os.environ["RAY_USAGE_STATS_ENABLED"] = usage


def share(actors: int, resources: Mapping[str, float]) -> dict[str, float]:
    """A GPU for each actor, or a core where there are none; an equal part of one where there are fewer.

    resources  of the whole cluster, by Ray's names

    >>> share(3, {"CPU": 2.0})
    {'num_gpus': 0, 'num_cpus': 0.5}
    """
    gpus = int(resources.get("GPU", 0))
    devices = gpus or max(1, int(resources.get("CPU", 0)))
    part = 1 / -(-actors // devices)
    return {"num_gpus": part, "num_cpus": 0} if gpus else {"num_gpus": 0, "num_cpus": part}


def learner_ranks(recipe: Recipe) -> int:
    """Processes of the learner."""
    split = recipe.learner.tensor_parallel * recipe.learner.pipeline_parallel
    return split * recipe.ray.learner_replicas


def engine_pool(cluster: Cluster, config: EngineConfig, replicas: int) -> EnginePool:
    """Engines of one configuration, not yet started; one that dies is replaced."""

    def another() -> RayEngine:
        return RayEngine(cluster, config)

    return EnginePool([another() for _ in range(replicas)], block_size=config.block_size, another=another)


def _node(actor: object) -> str:
    return str(ray.get_runtime_context().get_node_id())


class RayEngine:
    """`Engine` in an actor."""

    def __init__(self, cluster: Cluster, config: EngineConfig) -> None:
        self._cluster, self._config = cluster, config
        self._version, self._contract = config.initial_version, ""
        self._actor: Any = None
        self._here = False
        self._staged = -1  # the version that an update finds fetched
        self._dead: EngineDead | None = None

    @property
    def version(self) -> int:
        return self._version

    @property
    def contract(self) -> str:
        """Of the machine that the actor is on; "" before `start`."""
        return self._contract

    async def start(self) -> None:
        self._actor = self._cluster.actor(EngineActor, max_concurrency=self._cluster.calls)
        try:
            model = await asyncio.to_thread(self._cluster.model_for, self._actor, self._config.model)
        except ray.exceptions.RayError as error:
            raise self._gone(error) from error
        self._here = isinstance(model, Path)
        self._contract = await self._call("start", self._config, model)

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling: Sampling,
        *,
        max_tokens: int,
        stop_token_ids: tuple[int, ...],
        seed: int | None,
        images: Sequence[bytes] = (),
    ) -> Completion:
        completion: Completion = await self._call(
            "generate",
            prompt_ids,
            sampling,
            max_tokens=max_tokens,
            stop_token_ids=stop_token_ids,
            seed=seed,
            images=images,
        )
        return completion

    async def score(self, ids: Sequence[int], *, temperature: float = 1.0, cold: bool = True) -> Float32:
        found: Float32 = await self._call("score", ids, temperature=temperature, cold=cold)
        return found

    async def prepare(self, offer: Offer) -> Prepared:
        content = None
        if isinstance(offer.source, InFile) and not self._here:
            content = await asyncio.to_thread(self._cluster.weights_at, offer.source.path)
        found: Prepared = await self._call("prepare", offer, content)
        self._staged = -1 if found.fault else offer.version
        return found

    async def update(self, manifest: WeightManifest) -> Takeover:
        content = None
        if not self._here and self._staged != manifest.version:
            content = await asyncio.to_thread(self._cluster.weights_at, manifest.path)
        taken: Takeover = await self._call("update", manifest, content)
        self._version = manifest.version
        return taken

    async def place(self) -> str:
        """The device that it computes on."""
        found: str = await self._call("place")
        return found

    async def checksums(self) -> dict[str, str]:
        held: dict[str, str] = await self._call("checksums")
        return held

    async def process_id(self) -> int:
        """Of the actor, on its node."""
        number: int = await self._call("process_id")
        return number

    async def close(self) -> None:
        """Stop the engine and its actor; idempotent."""
        actor, self._actor = self._actor, None
        if actor is None:
            return
        if self._dead is None:
            self._dead = EngineDead("the engine was closed")
            with contextlib.suppress(ray.exceptions.RayError, TimeoutError):
                async with asyncio.timeout(CLOSING_S):
                    await actor.close.remote()
        ray.kill(actor)

    async def _call(self, method: str, *arguments: Any, **options: Any) -> Any:
        if self._dead is not None:
            raise self._dead
        answer = getattr(self._actor, method).remote(*arguments, **options)
        try:
            return await answer
        except asyncio.CancelledError:
            ray.cancel(answer)  # the actor's coroutine is cancelled, which aborts the request
            raise
        except ray.exceptions.RayTaskError as error:
            raise error.cause from error
        except ray.exceptions.RayError as error:
            raise self._gone(error) from error

    def _gone(self, error: Exception) -> EngineDead:
        if self._dead is None:
            self._dead = EngineDead(f"the engine's actor is gone: {error}")
        return self._dead
