"""With Ray, weights leave from the actor of the learner's rank 0, straight to the engines' actors.

    ray_sender(transport, engines, learner)   places asked for, the way chosen, the actor told
    RaySender                                 `Sender` of the driver: what it shares is what the actor holds

The driver has a copy of each version too, for the weight store.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from torch import Tensor

from ..kernels.transfer.senders import FilesOnly, Sender
from ..kernels.transfer.sources import Source
from ..learner.ranks import AnyLearner
from ..rollout.engine import Engine
from ..rollout.engine_pool import EnginePool
from .cluster import RayEngine
from .cluster_learner import RayLearner
from .sections import Transport
from .weight_sender import choose


class RaySender:
    """Speaks for the sender of rank 0's actor, which keeps what `weights` last gave."""

    def __init__(self, learner: RayLearner) -> None:
        self._learner = learner

    def share(self, tensors: Mapping[str, Tensor]) -> Source:
        source: Source = self._learner.on_rank_0("share")
        return source

    def release(self) -> None:
        self._learner.on_rank_0("release")


async def ray_sender(transport: Transport, engine: Engine, learner: AnyLearner) -> Sender:
    """The sender between actors that are started. Raises ConfigError for a way that is not there."""
    assert isinstance(engine, EnginePool), "an engine of a cluster is a pool"
    assert isinstance(learner, RayLearner), "a learner of a cluster is one of its actors"
    engines = [each for each in engine.engines if isinstance(each, RayEngine)]
    places = await asyncio.gather(*(each.place() for each in engines))
    here = await asyncio.to_thread(learner.on_rank_0, "place")
    chosen = choose(transport, here, places)
    if chosen == "files":
        return FilesOnly()
    await asyncio.to_thread(learner.on_rank_0, "send_by", chosen, learner.address, len(engines))
    return RaySender(learner)
