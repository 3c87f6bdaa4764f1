"""A version on its way to a real engine, as the controller sends it."""

from __future__ import annotations

import asyncio

from rz_agent.kernels.transfer.broadcast import Broadcasting
from rz_agent.kernels.transfer.senders import FilesOnly, Sender, Shared
from rz_agent.recipes.publisher import Publisher
from tiny_engine import EngineHarness
from torch import Tensor


def publisher(harness: EngineHarness, sender: Sender, notes: list[str] | None = None) -> Publisher:
    said = list[str]() if notes is None else notes
    return Publisher(harness.engine, harness.store, sender, said.append)


def next_weights(harness: EngineHarness, seed: int) -> tuple[int, dict[str, Tensor]]:
    """As the learner gives them; not yet in the store."""
    manifest = harness.manifest(seed)
    tensors = dict(harness.weights[manifest.version])
    harness.store.retain([])
    return manifest.version, tensors


async def every_way_beside_requests(harness: EngineHarness) -> None:
    """Two processes share memory, form a process group, or meet at a file; the engine samples meanwhile."""
    prompts = harness.prompts(5, 60, 200, seed=18)
    ways: list[Sender] = [Shared(), Broadcasting("127.0.0.1", receivers=1), FilesOnly()]
    for seed, sender in enumerate(ways):
        running = asyncio.create_task(harness.sample(prompts, max_tokens=200))
        await asyncio.sleep(0.1)
        notes = list[str]()
        way = publisher(harness, sender, notes)
        version, tensors = next_weights(harness, seed=70 + seed)
        manifest = await way.put(version, tensors)
        figures = await way.publish(manifest)
        assert notes == []
        assert 0 < figures["time/engine_paused_s"] < 5
        assert await harness.engine.checksums() == dict(manifest.checksums)
        completions = await running
        assert {int(v) for c in completions for v in c.versions} == {version - 1, version}
        assert harness.differing(prompts, completions) == (0, 600)
        await way.close()
