"""What a weight update costs an engine that generates: by transport, against the bandwidth of a plain copy.

    python benchmarks/gpu_weight_update.py                    # Qwen3-0.6B's shape on GPUs, smaller on a CPU
    python benchmarks/gpu_weight_update.py --shape 4b --passes 5
    python benchmarks/gpu_weight_update.py --learner-gpu 0    # on the engine's, where there are several

One engine in a process of its own serves requests without a pause; this process plays the learner: it has the
tensors of the next version on its device, and sends them as a run does (`Publisher`). "file, not fetched" is
an update without preparation: what an engine does that was restarted. On the engine's GPU the learner shares
its memory, from another one it broadcasts by NCCL; files are measured too, and on a CPU all three.

put       seconds until the version is on disk, checksums included; the engine may be fetching meanwhile
prepare   seconds of fetching and hashing in the engine, beside its steps
all       seconds from the learner's tensors to an engine that serves them
pause     seconds without a step; bytes / pause stands beside a copy of as many bytes on the engine's device
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from random_qwen3 import SHAPES, random_weights, shape, write_model
from rz_agent.kernels.cpu_library import vllm_version
from rz_agent.kernels.transfer.broadcast import Broadcasting
from rz_agent.kernels.transfer.senders import FilesOnly, Sender, Shared
from rz_agent.learner.megatron.architecture import Architecture
from rz_agent.recipes.publisher import Publisher
from rz_agent.rollout.engine import Engine, make_engine
from rz_agent.rollout.engine_config import EngineConfig
from rz_agent.trajectory import Sampling
from rz_agent.weight_store import WeightStore
from torch import Tensor

CONTEXT, PROMPT, NEW = 512, 32, 64
TRANSPORTS = ("file, not fetched", "files", "shared", "broadcast")
GPU, GPUS = torch.cuda.is_available(), torch.cuda.device_count()


@dataclass
class Load:
    """Requests that never cease; when each ran and how many tokens it gave."""

    engine: Engine
    vocabulary: int
    done: list[tuple[float, float, int]] = field(default_factory=list)

    @contextlib.asynccontextmanager
    async def of(self, at_once: int) -> AsyncIterator[None]:
        askers = [asyncio.create_task(self._ask(seed)) for seed in range(at_once)]
        try:
            yield
        finally:
            await asyncio.sleep(0)
            for asker in askers:
                asker.cancel()
            await asyncio.gather(*askers, return_exceptions=True)

    async def _ask(self, seed: int) -> None:
        rng = np.random.default_rng(seed)
        while True:
            prompt = rng.integers(0, self.vocabulary, PROMPT).tolist()
            began = time.monotonic()
            made = await self.engine.generate(
                prompt, Sampling(), max_tokens=NEW, stop_token_ids=(), seed=seed
            )
            self.done.append((began, time.monotonic(), len(made.token_ids)))

    def rate(self, windows: list[tuple[float, float]]) -> float:
        """Tokens a second in these windows, each request's tokens spread evenly over its time."""
        tokens = sum(
            count * max(0.0, min(end, upto) - max(began, since)) / (end - began)
            for since, upto in windows
            for began, end, count in self.done
        )
        return tokens / sum(upto - since for since, upto in windows)


@dataclass
class Costs:
    """Of the updates of one transport."""

    put: list[float] = field(default_factory=list)
    prepare: list[float] = field(default_factory=list)
    pause: list[float] = field(default_factory=list)
    windows: list[tuple[float, float]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


class Bench:
    """The learner's part: versions, the store, and one update after the other."""

    def __init__(self, arguments: argparse.Namespace, folder: Path) -> None:
        self.arguments = arguments
        config = shape(arguments.shape, CONTEXT + 1)
        self.model = write_model(folder / "model", config)
        self.vocabulary = SHAPES[arguments.shape][-1]
        self.store = WeightStore(folder / "weights")
        self.place = torch.device(f"cuda:{arguments.learner_gpu}" if GPU else "cpu")
        first = random_weights(Architecture.read(self.model), seed=0)
        self.base = {name: tensor.to(self.place) for name, tensor in first.items()}
        self.size = sum(tensor.nbytes for tensor in self.base.values())
        self.version = 0

    def ways(self) -> Mapping[str, Sender | None]:
        """None: the engine is not told before the update."""
        found: dict[str, Sender | None] = {"file, not fetched": None, "files": FilesOnly()}
        if not GPU or self.arguments.learner_gpu == 0:
            found["shared"] = Shared()
        if not GPU or self.arguments.learner_gpu > 0:
            found["broadcast"] = Broadcasting("127.0.0.1", receivers=1)
        return {name: way for name, way in found.items() if name in (self.arguments.transport or found)}

    def next_version(self) -> tuple[int, dict[str, Tensor]]:
        self.version += 1
        tensors = {name: tensor.roll(self.version, 0) for name, tensor in self.base.items()}
        if GPU:
            torch.cuda.synchronize(self.place)
        return self.version, tensors

    async def update(self, engine: Engine, sender: Sender | None, costs: Costs) -> None:
        version, tensors = self.next_version()
        began = time.monotonic()
        if sender is None:
            manifest = await asyncio.to_thread(self.store.put, version, tensors)
            costs.put.append(time.monotonic() - began)
            costs.pause.append((await engine.update(manifest)).paused_s)
        else:
            publisher = Publisher(engine, self.store, sender, costs.notes.append)
            manifest = await publisher.put(version, tensors)
            costs.put.append(time.monotonic() - began)
            figures = await publisher.publish(manifest)
            costs.prepare.append(figures["time/prepare_s"])
            costs.pause.append(figures["time/engine_paused_s"])
        costs.windows.append((began, time.monotonic()))
        self.store.retain([version])

    async def check(self, engine: Engine) -> None:
        """The engine holds what it was sent last."""
        if await engine.checksums() != dict(self.store.manifest(self.version).checksums):
            raise RuntimeError("the engine holds other weights than it was sent")

    def copy_rate(self) -> float:
        """Bytes a second of copying the model on the engine's device, once in place."""
        place = torch.device("cuda:0" if GPU else "cpu")
        source = torch.zeros(self.size, dtype=torch.uint8, device=place)
        target = torch.ones_like(source)
        seconds: list[float] = []
        for _ in range(5):
            with timed(place, seconds):
                target.copy_(source)
        del source, target
        if GPU:
            torch.cuda.empty_cache()
        return self.size / min(seconds)


@contextlib.contextmanager
def timed(place: torch.device, seconds: list[float]) -> Iterator[None]:
    if place.type == "cuda":
        torch.cuda.synchronize(place)
    began = time.perf_counter()
    yield
    if place.type == "cuda":
        torch.cuda.synchronize(place)
    seconds.append(time.perf_counter() - began)


@contextlib.asynccontextmanager
async def started(bench: Bench) -> AsyncIterator[Engine]:
    arguments = bench.arguments
    engine = make_engine(
        EngineConfig(
            model=bench.model,
            dtype="bfloat16",
            max_model_len=CONTEXT,
            max_num_seqs=max(arguments.at_once, 16),
            max_num_batched_tokens=max(arguments.at_once, 2048),
            kv_cache_gb=arguments.kv_cache_gb,
            initial_version=bench.version,
        )
    )
    began = time.monotonic()
    try:
        await engine.start()
        print(f"engine started in {time.monotonic() - began:.0f} s", flush=True)
        yield engine
    finally:
        await engine.close()


async def measure(bench: Bench, name: str, sender: Sender | None, engine: Engine, bandwidth: float) -> str:
    """One row of the table."""
    arguments, costs = bench.arguments, Costs()
    load = Load(engine, bench.vocabulary)
    await bench.update(engine, sender, Costs())  # a first one opens what is opened once
    async with load.of(arguments.at_once):
        await asyncio.sleep(arguments.seconds)
        since = time.monotonic()
        await asyncio.sleep(arguments.seconds)
        undisturbed = [(since, time.monotonic())]
        for _ in range(arguments.passes):
            await bench.update(engine, sender, costs)
            await asyncio.sleep(1.0)
        await asyncio.sleep(arguments.seconds / 2)  # for the requests of the last window to end
    await bench.check(engine)
    quiet, busy = load.rate(undisturbed), load.rate(costs.windows)
    for note in costs.notes:
        print(f"  {name}: {note}", flush=True)
    if costs.notes:
        name += " (NOT FETCHED)"
    pause = statistics.median(costs.pause)
    prepare = f"{statistics.median(costs.prepare):.2f}" if costs.prepare else "-"
    return (
        f"| {name} | {bench.size / 1e9:.2f} | {statistics.median(costs.put):.2f} | {prepare} | "
        f"{statistics.median(upto - since for since, upto in costs.windows):.2f} | {pause:.3f} | "
        f"{bench.size / pause / 1e9:.1f} | {bandwidth / 1e9:.0f} | {quiet:,.0f} | {busy:,.0f} | "
        f"{busy / quiet:.2f} |"
    )


async def run(bench: Bench) -> None:
    where = f"{torch.cuda.get_device_name()} x {GPUS}, learner on {bench.place}" if GPU else "CPU"
    print(f"{where}; torch {torch.__version__}, vLLM {vllm_version()}")
    print(f"{len(bench.base)} tensors, {bench.size / 1e9:.2f} GB", flush=True)
    bandwidth = bench.copy_rate()
    waiting, rows = list(bench.ways().items()), []
    while waiting:
        async with started(bench) as engine:
            while waiting:
                name, sender = waiting.pop(0)
                try:
                    rows.append(await measure(bench, name, sender, engine, bandwidth))
                    print(rows[-1], flush=True)
                except Exception as error:  # the other ways are still worth their figures
                    rows.append(f"| {name} | {type(error).__name__}: {error} |".splitlines()[0])
                    print(rows[-1], flush=True)
                    break  # the engine may be dead
                finally:
                    if sender is not None:
                        sender.release()
    print(
        "\n| transport | GB | put, s | prepare, s | all, s | pause, s | GB/s of the pause | GB/s of a copy "
        "| tokens/s undisturbed | tokens/s updating | share |"
    )
    print("| --- " * 11 + "|")
    print("\n".join(rows))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=sorted(SHAPES), default="0.6b" if GPU else "small")
    parser.add_argument(
        "--transport", nargs="+", choices=TRANSPORTS, help="these alone (default: all there are)"
    )
    parser.add_argument("--passes", type=int, default=3, help="updates by each transport, after a first one")
    parser.add_argument("--at-once", type=int, default=64 if GPU else 4, help="requests")
    parser.add_argument("--seconds", type=float, default=5.0, help="of undisturbed generation")
    parser.add_argument("--learner-gpu", type=int, default=max(GPUS - 1, 0), help="the engine's is 0")
    parser.add_argument("--kv-cache-gb", type=float, default=8.0 if GPU else 0.5)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        asyncio.run(run(Bench(arguments, Path(scratch))))


if __name__ == "__main__":
    main()
