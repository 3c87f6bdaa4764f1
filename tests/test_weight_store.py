"""Weights by version: whole or absent, never changed, verified when loaded."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rz_agent.weight_store import CorruptWeights, WeightStore, load_weights, tensor_checksum, weights_digest
from torch import Tensor


def some_weights(seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "model.embed_tokens.weight": torch.randn(11, 4, generator=generator).bfloat16(),
        "model.norm.weight": torch.randn(4, generator=generator),
        "lm_head.bias": torch.randn(11, generator=generator, dtype=torch.float64),
    }


def assert_same_bits(left: dict[str, Tensor], right: dict[str, Tensor]) -> None:
    assert left.keys() == right.keys()
    assert all(tensor_checksum(left[name]) == tensor_checksum(right[name]) for name in left)


def test_what_is_loaded_is_what_was_put(tmp_path: Path) -> None:
    manifest = WeightStore(tmp_path).put(3, some_weights())
    reader = WeightStore(tmp_path)
    assert_same_bits(reader.load(3), some_weights())
    assert reader.manifest(3) == manifest
    assert_same_bits(load_weights(manifest), some_weights())
    assert reader.versions() == [3]


DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool]


@given(
    dtype=st.sampled_from(DTYPES), shape=st.lists(st.integers(0, 3), max_size=3), seed=st.integers(0, 2**32)
)
@settings(max_examples=25, deadline=None)
def test_every_dtype_and_shape_keeps_its_bits(
    tmp_path_factory: pytest.TempPathFactory, dtype: torch.dtype, shape: list[int], seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    raw = torch.randint(
        0, 2 if dtype is torch.bool else 256, [*shape, 8], dtype=torch.uint8, generator=generator
    )
    tensor = raw.bool() if dtype is torch.bool else raw.view(dtype)  # any bits: NaN payloads included
    store = WeightStore(tmp_path_factory.mktemp("weights"))
    store.put(0, {"t": tensor})
    loaded = store.load(0)["t"]
    assert (loaded.dtype, loaded.shape) == (tensor.dtype, tensor.shape)
    assert torch.equal(loaded.contiguous().view(torch.uint8), tensor.contiguous().view(torch.uint8))


def test_a_checksum_sees_bits_dtype_and_shape_but_not_strides() -> None:
    zero = torch.zeros(2, 3)
    assert tensor_checksum(zero) == tensor_checksum(torch.zeros(3, 2).t())
    assert tensor_checksum(zero) != tensor_checksum(-zero)
    assert tensor_checksum(zero) != tensor_checksum(zero.t())
    assert tensor_checksum(zero) != tensor_checksum(zero.to(torch.int32))
    assert tensor_checksum(torch.tensor(1.0)) != tensor_checksum(torch.tensor([1.0]))


def test_the_digest_depends_on_names_and_tensors_only() -> None:
    assert weights_digest({"a": "1", "b": "2"}) == weights_digest({"b": "2", "a": "1"})
    assert weights_digest({"a": "1", "b": "2"}) != weights_digest({"a": "2", "b": "1"})


def test_tied_and_strided_tensors_are_stored(tmp_path: Path) -> None:
    embedding = torch.randn(6, 4)
    tied = {"embed": embedding, "lm_head": embedding, "transposed": embedding.t(), "part": embedding[1:3]}
    store = WeightStore(tmp_path)
    store.put(0, tied)
    assert_same_bits(store.load(0), tied)


def test_putting_a_version_again_must_give_the_same_bits(tmp_path: Path) -> None:
    store = WeightStore(tmp_path)
    first = store.put(1, some_weights())
    assert store.put(1, some_weights()) == first
    with pytest.raises(ValueError, match=r"version 1 is kept already with another tensor lm_head\.bias"):
        store.put(1, some_weights(seed=1))
    assert_same_bits(store.load(1), some_weights())


def test_retain_deletes_the_other_versions(tmp_path: Path) -> None:
    store = WeightStore(tmp_path)
    for version in range(4):
        store.put(version, some_weights(version))
    store.retain([1, 3, 99])
    assert store.versions() == [1, 3]
    assert len(list(tmp_path.iterdir())) == 4
    with pytest.raises(KeyError, match=r"version 2 is not kept, only \[1, 3\]"):
        store.load(2)


@pytest.mark.parametrize("length", [0, 4, -5])
def test_a_file_that_was_cut_is_named(tmp_path: Path, length: int) -> None:
    store = WeightStore(tmp_path)
    path = store.put(7, some_weights()).path
    path.write_bytes(path.read_bytes()[:length])
    with pytest.raises(CorruptWeights, match=r"v00000007\.safetensors: cannot be read"):
        store.load(7)


def test_a_file_that_is_gone_is_named(tmp_path: Path) -> None:
    store = WeightStore(tmp_path)
    store.put(7, some_weights()).path.unlink()
    with pytest.raises(CorruptWeights, match=r"v00000007\.safetensors: cannot be read"):
        store.load(7)


def test_no_flipped_bit_is_ever_loaded(tmp_path: Path) -> None:
    store = WeightStore(tmp_path)
    path = store.put(0, some_weights()).path
    whole = path.read_bytes()

    @given(flip=st.integers(0, 8 * len(whole) - 1))
    @settings(max_examples=150, deadline=None)
    def check(flip: int) -> None:
        data = bytearray(whole)
        data[flip // 8] ^= 1 << flip % 8
        path.write_bytes(data)
        try:
            loaded = store.load(0)
        except CorruptWeights:
            return
        assert_same_bits(loaded, some_weights())  # the bit was one of the header's spaces

    check()


def test_a_damaged_tensor_is_named(tmp_path: Path) -> None:
    store = WeightStore(tmp_path)
    kept = store.put(0, some_weights())
    other = WeightStore(tmp_path / "other").put(0, some_weights() | {"model.norm.weight": torch.ones(4)})
    other.path.rename(kept.path)
    with pytest.raises(CorruptWeights, match=r"tensor model\.norm\.weight has checksum"):
        store.load(0)


def test_a_damaged_manifest_is_named(tmp_path: Path) -> None:
    store = WeightStore(tmp_path)
    store.put(0, some_weights())
    path = tmp_path / "v00000000.json"
    for text in ("{", "{}", path.read_text().replace('"digest": "', '"digest": "0')):
        path.write_text(text)
        with pytest.raises(CorruptWeights, match=r"v00000000\.json"):
            store.load(0)


def test_what_a_crash_left_is_swept_by_the_next_put_and_by_no_reader(tmp_path: Path) -> None:
    WeightStore(tmp_path).put(0, some_weights())
    leftovers = [tmp_path / "v00000001.safetensors", tmp_path / "v00000002.safetensors.tmp"]
    for path in leftovers:
        path.write_bytes(b"half")
    reader = WeightStore(tmp_path)
    assert reader.versions() == [0]
    reader.load(0)
    assert all(path.exists() for path in leftovers)
    WeightStore(tmp_path).put(1, some_weights(1))
    assert WeightStore(tmp_path).versions() == [0, 1]
    assert not leftovers[1].exists()


PUT_FOREVER = """
import sys, torch
from rz_agent.weight_store import WeightStore
store = WeightStore(sys.argv[1])
for version in range(100_000):
    store.put(version, {"w": torch.full((50_000,), float(version))})
    print(version, flush=True)
    store.retain([version, version - 1])
"""


def test_kill_9_while_putting_leaves_whole_versions_only(tmp_path: Path) -> None:
    command = [sys.executable, "-c", PUT_FOREVER, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdout is not None
        for _ in range(9):
            acknowledged = int(writer.stdout.readline())
        writer.kill()
        acknowledged = max([acknowledged, *map(int, writer.stdout.read().split())])
    store = WeightStore(tmp_path)
    assert max(store.versions()) >= acknowledged
    for version in store.versions():
        held = store.load(version)["w"].unique()  # type: ignore[no-untyped-call]
        assert held.tolist() == [float(version)]
