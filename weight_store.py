"""Weights by policy version, as the engines serve them: the way from the learner to every engine.

    put(version, tensors) -> WeightManifest    learner: durable and complete when it returns
    load(version) -> tensors                   engine, audit: verified tensor by tensor
    retain(keep)                               learner: forget the other versions

A version is two files: v00000012.safetensors and, written last, v00000012.json with a checksum for each
tensor. Invariants: a version with its manifest is whole (each file is written aside, synced and renamed);
a version never changes, so a replay that makes it again must make it bit for bit; what is loaded
has the checksums of what was put. One process puts and retains; any number load, also from other hosts.
Waits: `put` for the disk. Nobody waits for a reader: a file that is deleted while it is read stays readable.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from .errors import RzError

CHECKSUM_THREADS = 8  # hashing releases the interpreter lock; one core hashes about 1 GB/s


class CorruptWeights(RzError):
    """A weight file does not read as it was written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightManifest:
    """One version's file and what must be in it.

    checksums  `tensor_checksum` by tensor name
    digest     one checksum over all names and checksums: equal digests, equal weights
    """

    version: int
    path: Path
    checksums: Mapping[str, str]
    digest: str


def tensor_checksum(tensor: Tensor) -> str:
    """blake2b of dtype, shape and elements in row-major order: 32 hex digits.

    The same on every device and for every stride; NaN bits and the sign of zero count.
    """
    digest = hashlib.blake2b(f"{tensor.dtype} {tuple(tensor.shape)} ".encode(), digest_size=16)
    elements = tensor.detach().to("cpu").contiguous().reshape(-1)
    digest.update(elements.view(torch.uint8).numpy().data)
    return digest.hexdigest()


def tensor_checksums(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """`tensor_checksum` of each tensor, by name in sorted order."""
    names = sorted(tensors)
    with ThreadPoolExecutor(CHECKSUM_THREADS) as pool:
        return dict(zip(names, pool.map(lambda name: tensor_checksum(tensors[name]), names), strict=True))


def weights_digest(checksums: Mapping[str, str]) -> str:
    """Checksum over the sorted names and their tensors' checksums: 32 hex digits."""
    lines = "".join(f"{name} {checksums[name]}\n" for name in sorted(checksums))
    return hashlib.blake2b(lines.encode(), digest_size=16).hexdigest()


def load_weights(manifest: WeightManifest) -> dict[str, Tensor]:
    """The tensors of a version on the CPU. Raises CorruptWeights naming the file and the tensor."""
    try:
        tensors = load_file(manifest.path)
    except (SafetensorError, FileNotFoundError) as error:
        raise CorruptWeights(f"{manifest.path}: cannot be read: {error}") from error
    found = tensor_checksums(tensors)
    for name in sorted({*found, *manifest.checksums}):
        if found.get(name) != manifest.checksums.get(name):
            raise CorruptWeights(
                f"{manifest.path}: tensor {name} has checksum {found.get(name, 'none: it is missing')}, "
                f"put with {manifest.checksums.get(name, 'none: it was never put')}. The file was damaged "
                "after it was written; rebuild this version by replay or from its checkpoint."
            )
    return tensors


class WeightStore:
    """The versions in one directory."""

    def __init__(self, directory: str | Path) -> None:
        self.directory = Path(directory).absolute()
        self.directory.mkdir(parents=True, exist_ok=True)
        self._swept = False

    def put(self, version: int, tensors: Mapping[str, Tensor]) -> WeightManifest:
        """Store a version under HF names in the dtype as served. Durable on return.

        Putting a version again is a replay: it must hold the same bits, else ValueError names the first
        tensor that differs. The first put of a process removes what a crash left half written.
        """
        self._sweep()
        tensors = {name: tensor.detach().to("cpu") for name, tensor in tensors.items()}
        checksums = tensor_checksums(tensors)
        if version in self.versions():
            return self._confirm(version, checksums)
        manifest = WeightManifest(
            version=version,
            path=self._weights_path(version),
            checksums=checksums,
            digest=weights_digest(checksums),
        )
        plain = _unshared(tensors)
        _write_atomically(manifest.path, lambda aside: save_file(plain, aside))
        record = {"version": version, "digest": manifest.digest, "checksums": checksums}
        text = json.dumps(record, indent=1)
        _write_atomically(self._manifest_path(version), lambda aside: Path(aside).write_text(text))
        return manifest

    def manifest(self, version: int) -> WeightManifest:
        """Raises KeyError for a version that is not kept, CorruptWeights for a damaged manifest."""
        path = self._manifest_path(version)
        if not path.exists():
            raise KeyError(f"{self.directory}: version {version} is not kept, only {self.versions()}")
        try:
            record = json.loads(path.read_text())
            checksums, digest = dict(record["checksums"]), str(record["digest"])
        except (ValueError, KeyError, TypeError) as error:
            raise CorruptWeights(f"{path}: cannot be read: {error!r}") from error
        if weights_digest(checksums) != digest or record["version"] != version:
            raise CorruptWeights(f"{path}: its digest {digest} is not that of its checksums")
        return WeightManifest(
            version=version, path=self._weights_path(version), checksums=checksums, digest=digest
        )

    def load(self, version: int) -> dict[str, Tensor]:
        """`load_weights` of a version that is kept."""
        return load_weights(self.manifest(version))

    def versions(self) -> list[int]:
        """Versions that are whole, ascending."""
        return sorted(int(path.stem[1:]) for path in self.directory.glob("v*.json"))

    def retain(self, keep: Iterable[int]) -> None:
        """Delete every version not in `keep`."""
        for version in set(self.versions()) - set(keep):
            # The manifest goes first: a crash in between leaves a leftover, not a version without weights.
            self._manifest_path(version).unlink(missing_ok=True)
            self._weights_path(version).unlink(missing_ok=True)

    def _confirm(self, version: int, checksums: Mapping[str, str]) -> WeightManifest:
        kept = self.manifest(version)
        for name in sorted({*checksums, *kept.checksums}):
            if checksums.get(name) != kept.checksums.get(name):
                raise ValueError(
                    f"version {version} is kept already with another tensor {name}: checksum "
                    f"{kept.checksums.get(name)}, now {checksums.get(name)}. A version never changes: "
                    "the replay differs from the run, or two runs share this directory."
                )
        return kept

    def _sweep(self) -> None:
        """Only the process that puts may do this: a reader would delete what the learner is writing."""
        if self._swept:
            return
        whole = {self._weights_path(version) for version in self.versions()}
        for path in [*self.directory.glob("v*.safetensors"), *self.directory.glob("*.tmp")]:
            if path not in whole:
                path.unlink(missing_ok=True)
        self._swept = True

    def _weights_path(self, version: int) -> Path:
        return self.directory / f"v{version:08d}.safetensors"

    def _manifest_path(self, version: int) -> Path:
        return self.directory / f"v{version:08d}.json"


def _unshared(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """CPU copies where a file needs them: contiguous, and no two names on one memory (tied embeddings)."""
    seen: set[int] = set()
    plain: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        data = tensor.detach().to("cpu").contiguous()
        storage = data.untyped_storage()
        if storage.data_ptr() in seen or storage.nbytes() != data.nbytes:
            data = data.clone()
        seen.add(data.untyped_storage().data_ptr())
        plain[name] = data
    return plain


def _write_atomically(path: Path, write: Callable[[str], object]) -> None:
    """The file appears under its name only when all of it is on disk."""
    aside = path.with_name(path.name + ".tmp")
    write(str(aside))
    _sync(aside)
    aside.rename(path)
    _sync(path.parent)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
