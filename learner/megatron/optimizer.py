"""AdamW on Megatron's distributed optimizer: one update of the weights from gradients that are already sums.

Gradients are summed, never averaged, over micro-batches and replicas (the loss's coefficients hold the
denominator). The rate is a function of the number of finished updates alone, so a resumed run continues it.
The norm is looked at before anything is written: a gradient that is not finite changes no weight. The weights
are looked at once they are written, before anyone else can see them.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from ...errors import NonFinite
from ..learner_config import LearnerConfig
from .device import megatron_device
from .model import PolicyModel


class PolicyOptimizer:
    """Owns the gradient buffers (`replica`, the module to run) and the optimizer state."""

    def __init__(self, model: PolicyModel, config: LearnerConfig) -> None:
        self.model = model
        with megatron_device(), torch.enable_grad():  # gradient hooks are set while building
            self.replica = DistributedDataParallel(
                model.config,
                DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=True),
                model.module,
            )
            self.optimizer = get_megatron_optimizer(_optimizer_config(config, model.dtype), [self.replica])
            model.config.finalize_model_grads_func = _finalize_sums
            self.fuse()
            self.scheduler = _scheduler(self.optimizer, config)

    def fuse(self) -> None:
        """On CUDA: AdamW as one kernel; otherwise a step holds copies of the moments beside them."""
        for group in self.optimizer.param_groups:
            on_cuda = any(parameter.is_cuda for parameter in group["params"])
            group["fused"], group["foreach"] = (True, False) if on_cuda else (None, None)

    def zero_gradients(self) -> None:
        self.replica.zero_grad_buffer()
        self.optimizer.zero_grad()

    def rate(self, update: int) -> float:
        """Set and return the learning rate of an update (the first is 0)."""
        self.scheduler.num_steps = update + 1
        self.scheduler.step(0)
        return float(self.optimizer.param_groups[0]["lr"])

    def gradient_norm(self) -> float:
        """Norm of the whole model's gradient before clipping; the same on every rank."""
        self.optimizer.prepare_grads()
        return float(self.optimizer.get_grad_norm())

    def step(self, cause_of_overflow: str) -> float:
        """Clip and update; returns the norm before clipping.

        cause_of_overflow  what to say where the norm is not finite, with the remedy
        Raises NonFinite, on every rank alike: for the norm, having changed nothing; for a weight, having
        written weights that nobody can go on with.
        """
        norm = self.gradient_norm()
        if not math.isfinite(norm):
            raise NonFinite(
                f"the gradient norm is {norm} although every ratio is finite; nothing was updated: "
                f"{cause_of_overflow}"
            )
        self.optimizer.step()
        self.model.weights.advance()
        if broken := self.model.first_not_finite():
            rate = self.optimizer.param_groups[0]["lr"]
            raise NonFinite(
                f"the update at learning rate {rate:g} (gradient norm {norm:g}) left {broken} not finite. "
                "Nobody was given it: the newest weights on disk are those of the version before. Lower "
                "learner.lr or learner.clip_grad in a new run that begins with them: rz-agent runs export, "
                "then train --set model.path=DIR."
            )
        return norm


def _finalize_sums(modules: list[Any], num_tokens: torch.Tensor | None = None, **kwargs: Any) -> None:
    """Reduce gradients without dividing by a number of tokens: the coefficients already did."""
    finalize_model_grads(modules, None, **kwargs)


def _optimizer_config(config: LearnerConfig, dtype: torch.dtype) -> Any:
    return OptimizerConfig(
        optimizer="adam",
        lr=config.lr,
        min_lr=config.min_lr,
        weight_decay=config.weight_decay,
        adam_beta1=config.betas[0],
        adam_beta2=config.betas[1],
        adam_eps=config.eps,
        clip_grad=config.clip_grad or 0.0,
        bf16=dtype == torch.bfloat16,
        params_dtype=dtype,
        use_distributed_optimizer=True,
    )


def _scheduler(optimizer: Any, config: LearnerConfig) -> Any:
    """Megatron applies `wd_mult` (no decay of norms) only through its scheduler, so there always is one."""
    last = config.decay_updates or config.warmup_updates + 1
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=config.lr,
        min_lr=config.min_lr,
        lr_warmup_steps=config.warmup_updates,
        lr_decay_steps=last,
        lr_decay_style=config.schedule,
        start_wd=config.weight_decay,
        end_wd=config.weight_decay,
        wd_incr_steps=last,
        wd_incr_style="constant",
    )
