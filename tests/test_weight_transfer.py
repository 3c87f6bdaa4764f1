"""Weights that an engine fetches beside its steps: nothing shows before the update, every bit after.

An engine in a process of its own does so in `test_engine.py`, which has one started.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rz_agent.errors import ConfigError
from rz_agent.kernels.transfer import broadcast
from rz_agent.kernels.transfer.broadcast import Broadcast, Broadcasting
from rz_agent.kernels.transfer.layout import ALIGNMENT, Layout
from rz_agent.kernels.transfer.senders import FilesOnly, InProcess, Sender, Shared
from rz_agent.kernels.transfer.sources import Held, InFile, InMemory, Offer, Source
from rz_agent.kernels.vllm_weights import WeightMismatch, check_equal
from rz_agent.recipes.publisher import MAX_FAULTS
from rz_agent.recipes.recipe import parse
from rz_agent.recipes.weight_sender import choose, local_sender
from rz_agent.rollout.engine import EngineDead
from rz_agent.weight_store import WeightManifest
from test_engine import own_engine, vllm_model
from test_weight_store import assert_same_bits, some_weights
from tiny_engine import EngineHarness, bits, engine_of
from torch import Tensor
from weight_ways import next_weights, publisher

SENDERS: Mapping[str, type[Sender]] = {"files": FilesOnly, "in process": InProcess, "shared": Shared}


# --- bytes ------------------------------------------------------------------------------------------------


@given(
    shapes=st.lists(st.lists(st.integers(0, 5), max_size=3), min_size=1, max_size=6),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.int8]),
    bucket=st.integers(1, 700),
)
def test_a_layout_holds_every_byte_of_every_tensor_once(
    shapes: list[list[int]], dtype: torch.dtype, bucket: int
) -> None:
    tensors = {str(i): torch.zeros(shape, dtype=dtype) for i, shape in enumerate(shapes)}
    layout = Layout.of(tensors)
    views = layout.views(torch.zeros(layout.size, dtype=torch.uint8))
    assert {n: (v.dtype, v.shape) for n, v in views.items()} == {
        n: (t.dtype, t.shape) for n, t in tensors.items()
    }
    assert all(entry.start % ALIGNMENT == 0 for entry in layout.entries)
    pieces: dict[str, list[tuple[int, int]]] = {name: [] for name in tensors}
    for start in range(0, layout.size, bucket):
        for entry, first, last in layout.within(start, min(start + bucket, layout.size)):
            pieces[entry.name].append((first, last))
    for name, found in pieces.items():
        ends = [0, *(last for _, last in found)]
        assert [first for first, _ in found] == ends[:-1]
        assert ends[-1] == tensors[name].nbytes


def test_memory_that_the_learner_shares_is_another_hosts_elsewhere() -> None:
    sender, device = Shared(), torch.device("cpu")
    source = sender.share(some_weights())
    assert isinstance(source, InMemory)
    assert_same_bits(source.bring(device), some_weights())
    with pytest.raises(Exception, match="another host's"):
        replace(source, host="elsewhere").bring(device)
    kept = source.bring(device)
    sender.release()
    assert_same_bits(kept, some_weights())
    with pytest.raises(RuntimeError):
        source.bring(device)


# --- an engine in this process ----------------------------------------------------------------------------


@pytest.mark.parametrize("way", SENDERS)
@pytest.mark.parametrize("model", ["tied", "untied", "bfloat16"])
def test_what_is_fetched_is_served_bit_for_bit(model: str, way: str) -> None:
    harness, notes = engine_of(model), list[str]()

    async def go() -> tuple[WeightManifest, dict[str, float]]:
        version, tensors = next_weights(harness, seed=31)
        way_out = publisher(harness, SENDERS[way](), notes)
        manifest = await way_out.put(version, tensors)
        return manifest, await way_out.publish(manifest)

    manifest, figures = asyncio.run(go())
    assert notes == []
    assert transfer(harness).taken == "staged"
    assert transfer(harness).staging is None
    assert figures.keys() == {"time/prepare_s", "time/engine_paused_s"}
    assert harness.engine.version == manifest.version
    assert asyncio.run(harness.engine.checksums()) == dict(manifest.checksums)
    prompts = harness.prompts(40, 7, seed=2)
    completions = asyncio.run(harness.sample(prompts))
    assert {int(v) for c in completions for v in c.versions} == {manifest.version}
    if model != "bfloat16":  # the packed forward of the tests is compared elsewhere
        assert harness.differing(prompts, completions) == (0, 32)


def test_nothing_of_a_version_shows_before_its_update() -> None:
    harness = engine_of("tied")
    prompts = harness.prompts(50, seed=4)

    async def go() -> None:
        await harness.publish(seed=40)
        held, served = await harness.engine.checksums(), harness.engine.version
        before = (await harness.sample(prompts))[0]
        manifest = harness.manifest(seed=41)
        prepared = await harness.engine.prepare(Offer(version=manifest.version, source=InFile(manifest.path)))
        assert prepared.fault is None
        assert prepared.size == sum(t.nbytes for t in harness.weights[manifest.version].values())
        after = (await harness.sample(prompts))[0]
        assert (bits(after.logprobs) == bits(before.logprobs)).all()
        assert set(after.versions.tolist()) == {served}
        assert await harness.engine.checksums() == held
        assert (await harness.engine.update(manifest)).source == "staged"
        assert await harness.engine.checksums() == dict(manifest.checksums)

    asyncio.run(go())


@dataclass(frozen=True)
class Slow:
    """A source that takes its time."""

    tensors: Mapping[str, Tensor]
    seconds: float
    borrowed: ClassVar[bool] = True

    def bring(self, device: torch.device) -> dict[str, Tensor]:
        time.sleep(self.seconds)
        return dict(self.tensors)


def test_requests_go_on_while_a_version_is_fetched() -> None:
    harness = engine_of("tied")

    async def go() -> None:
        manifest = harness.manifest(seed=42)
        slow = Slow(harness.weights[manifest.version], 1.0)
        fetching = asyncio.create_task(harness.engine.prepare(Offer(version=manifest.version, source=slow)))
        while not fetching.done():
            done = await harness.sample(harness.prompts(20, 30, seed=5), max_tokens=8)
            assert {int(v) for c in done for v in c.versions} == {harness.engine.version}
            finished = time.monotonic()
        assert (await fetching).seconds >= 1.0
        assert (
            time.monotonic() - finished < 0.5
        )  # the last requests ended just now: none waited for the fetching
        assert (await harness.engine.update(manifest)).source == "staged"

    asyncio.run(go())


def test_an_update_to_another_version_than_the_one_fetched_reads_its_file() -> None:
    harness = engine_of("tied")

    async def go() -> None:
        fetched = harness.manifest(seed=43)
        newer = harness.manifest(seed=44, version=fetched.version + 1)
        await harness.engine.prepare(Offer(version=fetched.version, source=InFile(fetched.path)))
        assert (await harness.engine.update(newer)).source == "file"
        assert await harness.engine.checksums() == dict(newer.checksums)

    asyncio.run(go())


def test_an_update_does_not_wait_for_a_version_that_is_still_on_its_way() -> None:
    harness = engine_of("tied")

    async def go() -> None:
        manifest = harness.manifest(seed=45)
        slow = Slow(harness.weights[manifest.version], 3.0)
        fetching = asyncio.create_task(harness.engine.prepare(Offer(version=manifest.version, source=slow)))
        await asyncio.sleep(0.1)
        began = time.monotonic()
        assert (await harness.engine.update(manifest)).source == "file"
        assert time.monotonic() - began < 2
        assert (await fetching).fault == "nothing is staged"
        assert await harness.engine.checksums() == dict(manifest.checksums)

    asyncio.run(go())


def test_a_flipped_bit_on_the_way_is_named_and_kills_the_engine_before_it_is_served() -> None:
    name = "model.layers.1.mlp.up_proj.weight"

    async def go() -> None:
        async with own_engine() as harness:
            manifest = harness.manifest(seed=46)
            tensors = {n: t.clone() for n, t in harness.weights[manifest.version].items()}
            tensors[name].view(torch.int32)[5, 5] ^= 1
            offer = Offer(version=manifest.version, source=Held(tensors))
            assert (await harness.engine.prepare(offer)).fault is None
            with pytest.raises(
                EngineDead, match=f"{name} arrived with checksum .*, not {manifest.checksums[name]}"
            ):
                await harness.engine.update(manifest)

    asyncio.run(go())


@pytest.mark.parametrize("model", ["tied", "untied"])
def test_what_is_held_is_compared_bit_by_bit_with_what_arrived(model: str) -> None:
    harness = engine_of(model)
    asyncio.run(harness.publish(seed=47))
    weights, held = harness.present, vllm_model(harness)
    check_equal(held, weights, version=1)
    for name in ("model.norm.weight", "model.layers.0.self_attn.v_proj.weight"):
        other = {**weights, name: weights[name].clone()}
        other[name].view(torch.int32).view(-1)[-1] ^= 1
        with pytest.raises(WeightMismatch, match=f"holds {name} with other bits"):
            check_equal(held, other, version=1)
        absent = {n: t for n, t in weights.items() if n != name}
        with pytest.raises(WeightMismatch, match="does not cover all of parameter"):
            check_equal(held, absent, version=1)


def transfer(harness: EngineHarness) -> Any:
    engine: Any = harness.engine
    return engine._engine.model_executor.driver_worker.weight_transfer_engine


def test_a_version_that_is_given_up_is_never_served() -> None:
    harness = engine_of("tied")

    async def go() -> None:
        version, tensors = next_weights(harness, seed=48)
        way = publisher(harness, InProcess())
        manifest = await way.put(version, tensors)
        held = await harness.engine.checksums()
        await way.close()
        assert await harness.engine.checksums() == held != dict(manifest.checksums)
        assert harness.engine.version < version
        harness.store.retain([])  # the next test puts the same version

    asyncio.run(go())


# --- sources that fail ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Broken:
    borrowed: ClassVar[bool] = False

    def bring(self, device: torch.device) -> dict[str, Tensor]:
        raise ConnectionError("the learner hung up\nwith details")


class BrokenSender:
    """Its first version cannot be offered, the others cannot be fetched."""

    def __init__(self) -> None:
        self._shared = 0

    def share(self, tensors: Mapping[str, Tensor]) -> Source:
        self._shared += 1
        if self._shared == 1:
            raise OSError("no memory to share")
        return Broken()

    def release(self) -> None:
        pass


def test_a_version_that_cannot_be_fetched_is_read_from_its_file_and_after_some_nobody_tries() -> None:
    harness, notes = engine_of("tied"), list[str]()

    async def go() -> None:
        way_out = publisher(harness, BrokenSender(), notes)
        taken = []
        for seed in range(MAX_FAULTS + 1):
            version, tensors = next_weights(harness, seed=50 + seed)
            manifest = await way_out.put(version, tensors)
            await way_out.publish(manifest)
            taken.append(transfer(harness).taken)
            assert await harness.engine.checksums() == dict(manifest.checksums)
        assert taken == ["staged", *["file"] * (MAX_FAULTS - 1), "staged"]  # the first one's file was fetched

    asyncio.run(go())
    assert len(notes) == MAX_FAULTS + 1
    assert notes[0].endswith("comes from its file: OSError: no memory to share")
    assert notes[1].endswith("comes from its file: ConnectionError: the learner hung up")
    assert "from now on engines read files" in notes[-1]


def test_a_sender_that_is_gone_costs_the_time_to_join_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(broadcast, "JOIN_S", timedelta(seconds=1))
    harness = engine_of("tied")
    gone = Broadcast(layout=Layout.of(some_weights()), address="127.0.0.1", port=1, receivers=1)

    async def go() -> None:
        began = time.monotonic()
        prepared = await harness.engine.prepare(Offer(version=harness.engine.version + 1, source=gone))
        assert time.monotonic() - began < 10
        assert prepared.fault is not None
        assert prepared.fault.startswith("DistNetworkError")
        await harness.publish(seed=60)

    asyncio.run(go())


def test_engines_that_do_not_come_cost_the_sender_the_time_to_join(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(broadcast, "JOIN_S", timedelta(seconds=1))
    sender = Broadcasting("127.0.0.1", receivers=2)
    source = sender.share(some_weights())
    with pytest.raises(RuntimeError):  # of torch: in time, or because the sender gave up a moment earlier
        source.bring(torch.device("cpu"))  # one of two
    began = time.monotonic()
    sender.release()
    assert time.monotonic() - began < 10


def test_nobody_leaves_the_group_before_everybody_has_the_version(monkeypatch: pytest.MonkeyPatch) -> None:
    form, left = broadcast._group, dict[int, bool]()

    @contextlib.contextmanager
    def watched(store: Any, rank: int, ranks: int, device: torch.device) -> Iterator[Any]:
        with form(store, rank, ranks, device) as group:
            yield group
            left[rank] = store.check(["has/1", "has/2", broadcast.EVERYBODY])

    monkeypatch.setattr(broadcast, "_group", watched)
    sender = Broadcasting("127.0.0.1", receivers=2)
    source, cpu = sender.share(some_weights()), torch.device("cpu")
    with ThreadPoolExecutor() as pool:
        for found in pool.map(source.bring, [cpu, cpu]):
            assert_same_bits(found, some_weights())
    sender.release()
    assert left[0]
    assert left.keys() == {0, 1, 2}


@pytest.mark.parametrize("bucket", [300, 64 << 20])
def test_a_broadcast_in_buckets_gives_every_bit(monkeypatch: pytest.MonkeyPatch, bucket: int) -> None:
    monkeypatch.setattr(broadcast, "BUCKET", bucket)
    weights = {"transposed": torch.randn(9, 30).t(), "empty": torch.zeros(0, 3), **some_weights()}
    sender = Broadcasting("127.0.0.1", receivers=1)
    assert_same_bits(sender.share(weights).bring(torch.device("cpu")), weights)
    sender.release()


def test_engines_take_the_learners_settings_of_nccl_while_they_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the pins of vLLM's batch invariance would hang NCCL: it does not reconcile them."""
    store, names = broadcast.dist.HashStore(), ("NCCL_PROTO", "NCCL_NVLS_ENABLE", "NCCL_ALGO")
    for name in names:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NCCL_NVLS_ENABLE", "0")
    broadcast.learners_settings(store, rank=0)
    engine = {"NCCL_PROTO": "Simple", "NCCL_NVLS_ENABLE": "1", "NCCL_ALGO": "allreduce:tree"}
    for name, value in engine.items():
        monkeypatch.setenv(name, value)
    with broadcast.environment(broadcast.learners_settings(store, rank=1)):
        assert {name: os.environ.get(name) for name in names} == {
            "NCCL_PROTO": None,
            "NCCL_NVLS_ENABLE": "0",
            "NCCL_ALGO": None,
        }
    assert {name: os.environ.get(name) for name in names} == engine


# --- which way --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("learner", "engines", "chosen"),
    [
        ("cpu of a", ["cpu of a"] * 3, "shared"),
        ("cpu of a", ["cpu of a", "cpu of b"], "files"),
        ("GPU a", ["GPU a"], "files"),
        ("GPU a", ["GPU b", "GPU c"], "files"),
    ],
)
def test_auto_takes_the_fastest_way_that_is_proven(learner: str, engines: list[str], chosen: str) -> None:
    assert choose("auto", learner, engines) == chosen


@pytest.mark.parametrize(
    ("transport", "mode", "sender"),
    [
        ("auto", "async", Shared),
        ("auto", "inprocess", InProcess),
        ("shared", "inprocess", InProcess),
        ("broadcast", "async", Broadcasting),
        ("files", "async", FilesOnly),
    ],
)
def test_a_local_run_takes_the_way_of_its_recipe(transport: str, mode: str, sender: type[Sender]) -> None:
    tables = {"weights": {"transport": transport}, "rollout": {"engine": {"mode": mode}}}
    assert isinstance(local_sender(parse(tables, "made")), sender)


@pytest.mark.parametrize(
    ("transport", "engines", "named"),
    [
        ("broadcast", ["GPU a"], "NCCL refuses two processes on one"),
        ("broadcast", ["GPU b", "GPU b"], "NCCL refuses two processes on one"),
        ("shared", ["GPU b"], "the learner is on GPU a and an engine elsewhere"),
        ("shared", ["GPU a", "GPU a"], "serves one engine on a GPU"),
    ],
)
def test_a_way_that_is_not_there_is_refused_with_the_reason(
    transport: Any, engines: list[str], named: str
) -> None:
    with pytest.raises(ConfigError, match=named):
        choose(transport, "GPU a", engines)
