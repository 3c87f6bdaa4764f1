"""Which part of the work this process does: tensor, pipeline and data parallel ranks.

One process needs no launcher: without torchrun's environment the process group has one member and lives in
this process's memory (no port, no file). Under torchrun the launcher's variables are used. Megatron-core
keeps its groups per process, so all learners of a process must be split the same way.
"""

from __future__ import annotations

import atexit
import os
from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.tensor_parallel import random as tensor_parallel_random

from ...errors import ConfigError
from .device import device, megatron_device


@dataclass(frozen=True, slots=True, kw_only=True)
class Parallel:
    """Sizes and this process's ranks."""

    tensor: int
    pipeline: int
    data: int
    tensor_rank: int
    pipeline_rank: int
    data_rank: int

    @property
    def first_stage(self) -> bool:
        return self.pipeline_rank == 0

    @property
    def last_stage(self) -> bool:
        return self.pipeline_rank == self.pipeline - 1

    @property
    def world(self) -> int:
        return self.tensor * self.pipeline * self.data


def initialize(*, tensor: int, pipeline: int, seed: int) -> Parallel:
    """Join the process group, split it, and seed Megatron's generators.

    Raises ConfigError where the world size is not a multiple of tensor * pipeline, or where this process
    already holds a learner that is split differently.
    """
    _join()
    world = dist.get_world_size()
    if world % (tensor * pipeline):
        raise ConfigError(
            source="recipe",
            key="learner.tensor_parallel",
            value=tensor,
            why=f"times pipeline_parallel = {pipeline} does not divide the {world} ranks",
            remedy="Start a multiple of tensor_parallel * pipeline_parallel ranks with torchrun.",
        )
    with megatron_device():
        _split(tensor, pipeline)
        on_cpu = not torch.cuda.is_available()
        tensor_parallel_random.initialize_rng_tracker(inference_rng_tracker=on_cpu, force_reset=True)
        tensor_parallel.model_parallel_cuda_manual_seed(seed, inference_rng_tracker=on_cpu)
    return Parallel(
        tensor=tensor,
        pipeline=pipeline,
        data=parallel_state.get_data_parallel_world_size(),
        tensor_rank=parallel_state.get_tensor_model_parallel_rank(),
        pipeline_rank=parallel_state.get_pipeline_model_parallel_rank(),
        data_rank=parallel_state.get_data_parallel_rank(),
    )


def _join() -> None:
    if dist.is_initialized():
        return
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        dist.init_process_group(backend)
    else:
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group(backend, store=store, rank=0, world_size=1)
        if torch.cuda.is_available():
            atexit.register(leave)  # NCCL warns of a process that ends with its group
    if torch.cuda.is_available() and "LOCAL_RANK" in os.environ:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))


def leave() -> None:
    """End this process's part in every group, the opposite of `initialize`; idempotent.

    A group with work left waits for it.
    """
    if dist.is_initialized():
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def _split(tensor: int, pipeline: int) -> None:
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=tensor, pipeline_model_parallel_size=pipeline
        )
    held = (
        parallel_state.get_tensor_model_parallel_world_size(),
        parallel_state.get_pipeline_model_parallel_world_size(),
    )
    if held != (tensor, pipeline):
        raise ConfigError(
            source="recipe",
            key="learner.tensor_parallel, learner.pipeline_parallel",
            value=(tensor, pipeline),
            why=f"while this process already holds a learner split {held}",
            remedy="Use one split per process.",
        )


def first_found(mine: str | None) -> str | None:
    """The answer of the first rank that has one, the same on every rank. Every rank must call it.

    Ranks are counted stage by stage.
    """
    ranks = dist.get_world_size()
    if ranks == 1:
        return mine
    found = torch.tensor([mine is not None], dtype=torch.int32, device=device())
    dist.all_reduce(found)
    if not found.item():
        return None
    answers: list[str | None] = [None] * ranks
    dist.all_gather_object(answers, mine)
    return next(answer for answer in answers if answer is not None)


def sum_over_stages_and_replicas(values: torch.Tensor) -> torch.Tensor:
    """Sum over data and pipeline parallel ranks, in place, where each entry is set by exactly one of them."""
    for group in (
        parallel_state.get_data_parallel_group(),
        parallel_state.get_pipeline_model_parallel_group(),
    ):
        if group.size() > 1:
            dist.all_reduce(values, group=group)
    return values
