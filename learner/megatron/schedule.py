"""Runs micro-batches through Megatron's forward-backward schedule: one stage, or a pipeline of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from ..packing import MicroBatch
from .device import megatron_device
from .model import PolicyModel
from .optimizer import PolicyOptimizer

LossOf = Callable[[Tensor, MicroBatch], Tensor]


def forward_backward(
    model: PolicyModel, optimizer: PolicyOptimizer, work: Sequence[MicroBatch], loss_of: LossOf
) -> list[Tensor]:
    """Add the gradients of the summed losses to the buffers, reduced over replicas once all are through.

    loss_of  float32[] of a micro-batch from its log-probabilities float32[R]
    returns  each micro-batch's log-probabilities, detached; empty on all but the last stage
    """
    return _run(model, optimizer.replica, work, loss_of, training=True)


def forward(model: PolicyModel, work: Sequence[MicroBatch]) -> list[Tensor]:
    """Each micro-batch's log-probabilities float32[R]; empty on all but the last stage."""
    return _run(model, model.module, work, lambda logprobs, batch: logprobs.sum(), training=False)


def _run(
    model: PolicyModel, module: object, work: Sequence[MicroBatch], loss_of: LossOf, *, training: bool
) -> list[Tensor]:
    def step(batches: object, run: object) -> tuple[Tensor, object]:
        batch: MicroBatch = next(batches)  # type: ignore[call-overload]

        def loss_and_logprobs(logprobs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            # The middle value is a number of tokens to divide by, which the optimizer ignores.
            return loss_of(logprobs, batch), torch.zeros((), dtype=torch.int), logprobs.detach()

        return model.log_probabilities(batch, run), loss_and_logprobs

    with megatron_device(), torch.set_grad_enabled(training):
        found: list[Tensor] = get_forward_backward_func()(
            forward_step_func=step,
            data_iterator=iter(work),
            model=[module],
            num_microbatches=len(work),
            seq_length=max(map(len, work)),
            micro_batch_size=1,
            forward_only=not training,
        )
    return found if model.parallel.last_stage else []
