"""Weights by version into a running engine, and the proof of what it then holds.

    RzWeightTransferEngine   backend "rz" of vLLM's weight transfer: stages offers, applies manifests
    RzWorker                 methods that our engines add to vLLM's worker

    prepare(offer)      begins to fetch a version, beside the steps; nothing of it is visible
    update_weights      one call between two steps: takes over what was staged, or the manifest's file

An update of a staged version is a comparison of its checksums with the manifest's, a copy on the device into
the parameters, and a comparison there of every tensor held with the staged one, bit by bit. Without one (an
engine that was restarted, a source that failed) the file is loaded and every tensor held is hashed. Both ways
split vLLM's merged parameters back into the names of the checkpoint, and rebuild every packed copy from the
parameters just checked. A difference raises `WeightMismatch`; the engine is then unusable and its owner must
say so. Stock reloading is not used: with tied embeddings it leaves the output head's packed copy at the old
version.
Parameters are written in place: CUDA graphs keep their addresses.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from ..errors import RunStopped
from ..weight_store import tensor_checksum
from . import vllm_settings, vllm_versions
from .transfer.sources import Offer
from .transfer.staging import Staging
from .vllm_linear import engine_linears

CLOSE_S = 10.0  # for a staging thread to end with its engine
INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class WeightMismatch(RunStopped):
    """The engine does not hold the weights that it was told to hold; the message names the first tensor."""


@dataclass
class RzInit(WeightTransferInitInfo):  # type: ignore[misc]
    """Nothing to agree on beforehand: each offer says where its tensors are."""


@dataclass
class RzUpdate(WeightTransferUpdateInfo):  # type: ignore[misc]
    """One manifest: where the tensors are, in the names of the checkpoint, and what each must hash to."""

    version: int = -1
    path: str = ""
    checksums: dict[str, str] = field(default_factory=dict)


class RzWeightTransferEngine(WeightTransferEngine):  # type: ignore[misc]
    """Stages offers and applies manifests. `update_weights` is atomic: vLLM takes no step while it runs.

    taken     where the last update came from: "staged", "file", or "" before the first
    leftover  memory of the device was taken for it
    """

    init_info_cls = RzInit
    update_info_cls = RzUpdate
    staging: Staging | None = None
    taken = ""
    leftover = False

    def init_transfer_engine(self, init_info: RzInit) -> None:
        if self.parallel_config.world_size != 1:
            raise NotImplementedError(
                f"world_size = {self.parallel_config.world_size}: the checksums of sharded weights are not "
                "implemented; use one worker for each engine"
            )

    def prepare(self, offer: Offer) -> None:
        """Begin to fetch a version; what was staged before is dropped."""
        self.staging = None
        self.staging = Staging(offer, self.device)

    def start_weight_update(self) -> None:
        if self.device.type == "cuda":
            # A step may still be reading the weights that are about to be written.
            torch.cuda.synchronize()

    def receive_weights(self, update_info: RzUpdate) -> None:
        staged, self.staging = self.staging, None
        if staged is not None and staged.whole and staged.version == update_info.version:
            self._take_over(staged, update_info)
            self.taken = "staged"
            self.leftover = not staged.borrowed
        else:
            self._load(update_info)
            self.taken = "file"
        for _, linear in engine_linears(self.model):
            linear.refresh(update_info.version)
        vllm_settings.set_version(self.vllm_config, update_info.version)

    def _take_over(self, staged: Staging, wanted: RzUpdate) -> None:
        check_staged(staged.checksums, wanted.checksums, wanted.version)
        tensors = {name: staged.tensors[name] for name in wanted.checksums}
        with torch.no_grad():
            self.model.load_weights(iter(tensors.items()))
        check_equal(self.model, tensors, wanted.version)

    def _load(self, wanted: RzUpdate) -> None:
        tensors = load_file(wanted.path)
        if absent := sorted(wanted.checksums.keys() - tensors.keys()):
            raise WeightMismatch(f"{wanted.path} lacks {absent[0]}, which its manifest names")
        with torch.no_grad():
            self.model.load_weights(iter(tensors.items()))
        check_weights(self.model, wanted.checksums, wanted.version)

    def finish_weight_update(self) -> None:
        if self.leftover and self.device.type == "cuda":
            torch.cuda.empty_cache()  # else this process keeps it from the learner
        self.leftover = False

    def shutdown(self) -> None:
        staging, self.staging = self.staging, None
        if staging is not None:
            staging.join(CLOSE_S)

    @staticmethod
    def trainer_send_weights(*args: Any, **kwargs: Any) -> None:
        """Abstract in vLLM 0.26; our learner offers, see `transfer.senders`."""
        raise NotImplementedError("weights of backend rz are offered and fetched")


class RzWorker:
    """Mixed into vLLM's worker by `worker_extension_cls`; called by name through `collective_rpc`."""

    def rz_prepare(self, offer: Offer | bytes) -> None:
        """Begin to stage an offer; pickled where it comes from another process."""
        self._rz_transfer().prepare(pickle.loads(offer) if isinstance(offer, bytes) else offer)

    def rz_prepared(self, version: int) -> dict[str, Any]:
        """How far the staging of a version is: done, fault, seconds, size."""
        staging = self._rz_transfer().staging
        if staging is None or staging.version != version:
            return {"done": True, "fault": "nothing is staged", "seconds": 0.0, "size": 0}
        found = {"fault": staging.fault, "seconds": staging.seconds, "size": staging.size}
        return {"done": staging.done, **found}

    def rz_taken(self) -> str:
        """Where the last update came from: "staged" or "file"."""
        return self._rz_transfer().taken

    def rz_checksums(self, names: list[str]) -> dict[str, str]:
        """Checksum of each named tensor of the checkpoint, computed from what the engine holds now."""
        model: torch.nn.Module = self.model_runner.model  # type: ignore[attr-defined]
        versions = {linear.version for _, linear in engine_linears(model)}
        if len(versions) > 1:
            raise WeightMismatch(f"packed copies of several versions in one engine: {sorted(versions)}")
        return {name: tensor_checksum(held_tensor(model, name)) for name in names}

    def _rz_transfer(self) -> RzWeightTransferEngine:
        engine: RzWeightTransferEngine = self.weight_transfer_engine  # type: ignore[attr-defined]
        return engine


def check_staged(staged: Mapping[str, str], wanted: Mapping[str, str], version: int) -> None:
    """Raises WeightMismatch unless every tensor of a manifest was staged with its checksum."""
    for name, expected in wanted.items():
        if (found := staged.get(name)) != expected:
            raise WeightMismatch(
                f"version {version}: {name} arrived with checksum {found}, not {expected} as in the manifest"
            )


def check_equal(model: torch.nn.Module, staged: Mapping[str, Tensor], version: int) -> None:
    """Compare every tensor held with the staged one, bit by bit where both are; coverage as `check_weights`.

    Raises WeightMismatch at the first tensor that differs.
    """
    held = {name: held_tensor(model, name) for name in staged}
    for name, tensor in held.items():
        if (tensor.dtype, tensor.shape) != (staged[name].dtype, staged[name].shape):
            raise WeightMismatch(f"version {version}: the engine holds {name} as {tensor.dtype}")
    # One answer for all: a GPU would be waited for at each.
    differing = torch.stack([(_bits(held[name]) != _bits(staged[name])).any() for name in staged]).tolist()
    for name, differs in zip(staged, differing, strict=True):
        if differs:
            raise WeightMismatch(f"version {version}: the engine holds {name} with other bits than arrived")
    _check_covered(model, held.values(), version)


def _bits(tensor: Tensor) -> Tensor:
    return tensor.view(INTEGERS[tensor.dtype.itemsize])


def check_weights(model: torch.nn.Module, checksums: Mapping[str, str], version: int) -> None:
    """Compare every tensor of a manifest with the model, and every parameter with the manifest.

    Raises WeightMismatch at the first tensor that differs, and for a parameter of which the manifest leaves
    anything out: it would silently keep an older version.
    """
    held = {name: held_tensor(model, name) for name in checksums}
    for name, expected in checksums.items():
        if (found := tensor_checksum(held[name])) != expected:
            raise WeightMismatch(
                f"version {version}: the engine holds {name} with checksum {found}, not {expected} as in the "
                "manifest"
            )
    _check_covered(model, held.values(), version)


def _check_covered(model: torch.nn.Module, tensors: Iterable[Tensor], version: int) -> None:
    covered: dict[int, dict[int, int]] = {}
    for tensor in tensors:
        pieces = covered.setdefault(tensor.untyped_storage().data_ptr(), {})
        pieces[int(tensor.storage_offset())] = tensor.numel()
    for name, parameter in model.named_parameters():
        pieces = covered.get(parameter.untyped_storage().data_ptr(), {})
        if sum(pieces.values()) != _real(model.get_submodule(name.rpartition(".")[0]), parameter).numel():
            raise WeightMismatch(f"version {version}: the manifest does not cover all of parameter {name}")


def held_tensor(model: Any, name: str) -> Tensor:
    """The engine's own tensor for a name of the checkpoint: a slice of a merged parameter where vLLM merged.

    Raises WeightMismatch for a name that the model has no place for.
    """
    inner = _engine_name(model, name)
    prefix, _, kind = inner.rpartition(".")
    parent, _, leaf = prefix.rpartition(".")
    for merged, parts in model.packed_modules_mapping.items():
        if leaf in parts and len(parts) > 1:
            module = _module(model, f"{parent}.{merged}", name)
            sizes = list(module.output_sizes)
            start = sum(sizes[: parts.index(leaf)])
            whole: Tensor = getattr(module, kind).data
            return whole[start : start + sizes[parts.index(leaf)]]
    module = _module(model, prefix, name)
    return _real(module, getattr(module, kind).data)


def _real(module: Any, tensor: Tensor) -> Tensor:
    """The rows that the checkpoint has: vLLM pads a vocabulary."""
    rows = module.__dict__.get("org_vocab_size")
    return tensor if rows is None else tensor[:rows]


def _engine_name(model: Any, name: str) -> str:
    """vLLM's name for a tensor of the checkpoint, before merging; image models move their parts."""
    if not hasattr(model, "hf_to_vllm_mapper"):
        return name
    return str(vllm_versions.without_merging(model.hf_to_vllm_mapper).apply_list([name])[0])


def _module(model: torch.nn.Module, path: str, name: str) -> Any:
    try:
        return model.get_submodule(path)
    except AttributeError as error:
        raise WeightMismatch(f"{name} is in the manifest, but the engine's model has no {path}") from error
