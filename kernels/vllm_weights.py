"""Weights by version into a running engine, and the proof of what it then holds.

    RzWeightTransferEngine   backend "rz" of vLLM's weight transfer: applies one manifest of the weight store
    RzWorker                 methods that our engines add to vLLM's worker: checksums()

An update is one call between two engine steps: load the file into the parameters, split vLLM's merged
parameters back into the names of the checkpoint, compare each with the manifest's checksum, then rebuild
every packed copy from the parameters just checked. A difference raises `WeightMismatch`; the engine is then
unusable and its owner must say so. Stock reloading is not used: with tied embeddings it leaves the output
head's packed copy at the old version.
"""

from __future__ import annotations

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
from .vllm_linear import engine_linears


class WeightMismatch(RunStopped):
    """The engine does not hold the weights that it was told to hold; the message names the first tensor."""


@dataclass
class RzInit(WeightTransferInitInfo):  # type: ignore[misc]
    """Nothing to agree on beforehand: weights travel as files of the weight store."""


@dataclass
class RzUpdate(WeightTransferUpdateInfo):  # type: ignore[misc]
    """One manifest: where the tensors are, in the names of the checkpoint, and what each must hash to."""

    version: int = -1
    path: str = ""
    checksums: dict[str, str] = field(default_factory=dict)


class RzWeightTransferEngine(WeightTransferEngine):  # type: ignore[misc]
    """Applies manifests. `update_weights` is atomic: vLLM takes no step while it runs."""

    init_info_cls = RzInit
    update_info_cls = RzUpdate

    def init_transfer_engine(self, init_info: RzInit) -> None:
        if self.parallel_config.world_size != 1:
            raise NotImplementedError(
                f"world_size = {self.parallel_config.world_size}: the checksums of sharded weights are not "
                "implemented; use one worker for each engine"
            )

    def start_weight_update(self) -> None:
        if self.device.type == "cuda":
            # A step may still be reading the weights that are about to be written.
            torch.cuda.synchronize()

    def receive_weights(self, update_info: RzUpdate) -> None:
        tensors = load_file(update_info.path)
        if absent := sorted(update_info.checksums.keys() - tensors.keys()):
            raise WeightMismatch(f"{update_info.path} lacks {absent[0]}, which its manifest names")
        with torch.no_grad():
            self.model.load_weights(iter(tensors.items()))
        check_weights(self.model, update_info.checksums, update_info.version)
        for _, linear in engine_linears(self.model):
            linear.refresh(update_info.version)
        vllm_settings.set_version(self.vllm_config, update_info.version)

    def finish_weight_update(self) -> None:
        pass

    def shutdown(self) -> None:
        pass

    @staticmethod
    def trainer_send_weights(*args: Any, **kwargs: Any) -> None:
        """Abstract in vLLM 0.26; the learner writes files instead of sending."""
        raise NotImplementedError("weights of backend rz are published through the weight store")


class RzWorker:
    """Mixed into vLLM's worker by `worker_extension_cls`; called by name through `collective_rpc`."""

    def rz_checksums(self, names: list[str]) -> dict[str, str]:
        """Checksum of each named tensor of the checkpoint, computed from what the engine holds now."""
        model: torch.nn.Module = self.model_runner.model  # type: ignore[attr-defined]
        versions = {linear.version for _, linear in engine_linears(model)}
        if len(versions) > 1:
            raise WeightMismatch(f"packed copies of several versions in one engine: {sorted(versions)}")
        return {name: tensor_checksum(held_tensor(model, name)) for name in names}


def check_weights(model: torch.nn.Module, checksums: dict[str, str], version: int) -> None:
    """Compare every tensor of a manifest with the model, and every parameter with the manifest.

    Raises WeightMismatch at the first tensor that differs, and for a parameter of which the manifest leaves
    anything out: it would silently keep an older version.
    """
    covered: dict[int, dict[int, int]] = {}
    for name, expected in checksums.items():
        tensor = held_tensor(model, name)
        pieces = covered.setdefault(tensor.untyped_storage().data_ptr(), {})
        pieces[int(tensor.storage_offset())] = tensor.numel()
        if (found := tensor_checksum(tensor)) != expected:
            raise WeightMismatch(
                f"version {version}: the engine holds {name} with checksum {found}, not {expected} as in the "
                "manifest"
            )
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
