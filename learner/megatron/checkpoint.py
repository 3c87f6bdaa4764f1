"""Saves and loads model and optimizer, so that a resumed learner continues bit for bit, on any split.

    save(dir)    written beside `dir` and renamed when complete: a kill at any moment leaves the old or the
    new one
    load(dir)    into a learner of any tensor, pipeline or data parallel size ("fully_reshardable")

Four repairs of Megatron-core 0.19.2 without TransformerEngine and Apex, on CUDA as on CPU:
1. loading into an optimizer that never stepped fails (it demands one common step): its state is made first;
2. loading fully reshardable state raises KeyError 'step': the missing key is filled in;
3. after loading, all parameters share one step tensor, so each parameter's update counts once more for the
   next and the bias corrections of AdamW differ: every parameter gets its own, on its device;
4. a synchronous save starts a manager process only to hand its own result to itself: a plain queue does.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.optimizer.distrib_optimizer import HAVE_APEX_OR_TE, DistributedOptimizer

from ...errors import ConfigError
from .device import megatron_device
from .model import PolicyModel
from .optimizer import PolicyOptimizer

_FACTS = "learner.json"


def save(directory: Path, model: PolicyModel, optimizer: PolicyOptimizer, facts: dict[str, Any]) -> None:
    """Write a complete checkpoint at `directory`, replacing one that is there. Every rank must call it.

    facts  small JSON values kept beside the tensors
    """
    unfinished, replaced = _beside(directory)
    if _first_rank():
        _restore_interrupted(directory)
        for stale in (unfinished, replaced):
            shutil.rmtree(stale, ignore_errors=True)
        unfinished.mkdir(parents=True)
    dist.barrier()
    # The plain queue is repair 4.
    with _megatron(), mock.patch.object(filesystem_async, "_results_queue", queue.Queue()):
        state = _sharded_state(model, optimizer, loading=False)
        dist_checkpointing.save(
            state, str(unfinished), content_metadata=_kept_metadata(), async_strategy="mcore"
        )
    if _first_rank():
        (unfinished / _FACTS).write_text(json.dumps(facts, indent=1), encoding="utf-8")
        _sync(unfinished / _FACTS)
        _sync(unfinished)
        if directory.exists():
            directory.rename(replaced)
        unfinished.rename(directory)
        _sync(directory.parent)
        shutil.rmtree(replaced, ignore_errors=True)
    dist.barrier()


def load(directory: Path, model: PolicyModel, optimizer: PolicyOptimizer) -> None:
    """Take over weights and optimizer state of `directory`. Every rank must call it."""
    with _megatron(), _loadable_optimizer(optimizer.optimizer):
        state = dist_checkpointing.load(_sharded_state(model, optimizer, loading=True), str(directory))
        model.module.load_state_dict(state["model"])
        optimizer.optimizer.load_state_dict(state["optimizer"])
    optimizer.fuse()
    _own_steps(optimizer.optimizer)
    model.weights.advance()


def facts(directory: Path) -> dict[str, Any]:
    """What `save` was told to keep. Raises ConfigError where `directory` holds no complete checkpoint."""
    _restore_interrupted(directory)
    path = directory / _FACTS
    if not path.exists():
        raise ConfigError(
            source=str(directory),
            key="checkpoint",
            value=directory.name,
            why="is not a complete checkpoint",
            remedy="Name a directory that Learner.save wrote.",
        )
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def _beside(directory: Path) -> tuple[Path, Path]:
    """Where a checkpoint is while it is written, and where the one that it replaces waits for its end."""
    return directory.with_name(f".{directory.name}.unfinished"), directory.with_name(
        f".{directory.name}.replaced"
    )


def _restore_interrupted(directory: Path) -> None:
    """A save that was killed between its two renames left the old checkpoint aside; put it back."""
    _, replaced = _beside(directory)
    if not directory.exists() and replaced.exists():
        replaced.rename(directory)


@contextlib.contextmanager
def _megatron() -> Iterator[None]:
    """Megatron's device, without torch's remarks about interfaces that Megatron uses."""
    with megatron_device(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _first_rank() -> bool:
    return bool(dist.get_rank() == 0)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _kept_metadata() -> dict[str, Any]:
    return {
        "distrib_optim_sharding_type": "fully_reshardable",
        "singleton_local_shards": False,
        "chained_optim_avoid_prefix": True,
    }


def _sharded_state(model: PolicyModel, optimizer: PolicyOptimizer, *, loading: bool) -> dict[str, Any]:
    metadata = _kept_metadata() | {
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)
    }
    weights = model.module.sharded_state_dict(metadata=metadata)
    if not loading:
        _make_state(optimizer.optimizer)
    return {
        "model": weights,
        "optimizer": optimizer.optimizer.sharded_state_dict(weights, is_loading=loading, metadata=metadata),
    }


@contextlib.contextmanager
def _loadable_optimizer(optimizer: Any) -> Iterator[None]:
    """Repairs 1 and 2, for the duration of a load."""
    _make_state(optimizer)
    if HAVE_APEX_OR_TE:
        yield
        return
    set_states = DistributedOptimizer._set_main_param_and_optimizer_states

    def with_step(self: Any, parameter: Any, tensors: dict[str, Any]) -> Any:
        return set_states(self, parameter, {"step": None, **tensors})

    with mock.patch.object(DistributedOptimizer, "_set_main_param_and_optimizer_states", with_step):
        yield


def _states(optimizer: Any) -> Iterator[tuple[torch.Tensor, dict[str, torch.Tensor]]]:
    """Every parameter shard of this rank with its AdamW state."""
    for held in optimizer.chained_optimizers:
        for group in held.optimizer.param_groups:
            for parameter in group["params"]:
                yield parameter, held.optimizer.state[parameter]


def _make_state(optimizer: Any) -> None:
    """AdamW's state as it is before the first step, where it does not exist yet."""
    for parameter, state in _states(optimizer):
        if not state:
            state["step"] = torch.zeros((), device=parameter.device)
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(parameter), torch.zeros_like(parameter)


def _own_steps(optimizer: Any) -> None:
    for parameter, state in _states(optimizer):
        state["step"] = state["step"].to(parameter.device, copy=True)
