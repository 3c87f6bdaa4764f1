"""The learner: takes whole groups, makes one update, gives out weights, and scores tokens at any version.

    train(groups)              one update: version k -> k + 1
    weights()                  the present weights in Hugging Face names, as the engine serves them
    score(segments, weights)   log-probabilities of recorded tokens, by the present or other weights
    save / load / export       checkpoint for an exact resume; model folder for everyone else

Invariants: `version` is the number of finished updates; a failed update (a ratio that is not finite, a token
from the future) changes neither weights nor optimizer state nor version. One failure is seen too late for
that: a step that gives weights which are not finite has written them; `version` stays, and nobody can go on
with such a learner. Scoring changes nothing; the same batch on the same state gives the same weights, bit for
bit. With several ranks every rank makes the same calls with the same arguments and gets the same results. One
thread at a time calls a learner; it waits for nobody.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ..errors import ConfigError, NonFinite
from ..kernels import operations as kernel_operations
from ..kernels.operations import Operations
from ..trajectory import Float32, Group, Segment
from . import loss
from .batch import Batch, Piece
from .diagnostics import Metrics, episode_figures, lag_figures, ratio_figures
from .learner_config import LearnerConfig
from .megatron import checkpoint, hugging_face, schedule
from .megatron.architecture import Architecture
from .megatron.device import device, megatron_device
from .megatron.model import PolicyModel
from .megatron.optimizer import PolicyOptimizer
from .megatron.parallel import initialize, sum_over_stages_and_replicas
from .packing import MicroBatch, pack


class Learner:
    """One rank of the learner; alone in its process without torchrun."""

    def __init__(
        self, model_dir: Path | str, config: LearnerConfig, operations: Operations | None = None
    ) -> None:
        """Load a Hugging Face folder. Raises ConfigError for models or splits that cannot be trained.

        operations  None: those that `config.kernels` names, on this machine's device
        """
        if config.threads is not None:
            torch.set_num_threads(config.threads)
        self.model_dir, self.config = Path(model_dir), config
        self.operations = operations or kernel_operations(config.kernels, device().type)
        if self.operations.name != config.kernels:
            raise ConfigError(
                source="recipe",
                key="learner.kernels",
                value=config.kernels,
                why=f"but the operations given are {self.operations.name!r}",
                remedy="Name the operations that are used.",
            )
        self.version = 0
        parallel = initialize(
            tensor=config.tensor_parallel, pipeline=config.pipeline_parallel, seed=config.seed
        )
        self.parallel = parallel
        dtype = getattr(torch, config.dtype)
        self.model = PolicyModel(
            Architecture.read(self.model_dir), self.operations, dtype, parallel, recompute=config.recompute
        )
        self.model.load(hugging_face.FolderTensors(self.model_dir))
        self.optimizer = PolicyOptimizer(self.model, config)

    @property
    def contract(self) -> str:
        """Hash of the kernels, as the engine's segments carry it."""
        return self.operations.contract()

    def train(self, groups: Sequence[Group]) -> Metrics:
        """One update on whole groups; returns the figures that the learner can know.

        A batch without any action token has no gradient: the weights stay, the version still advances.
        Raises NonFinite and FutureToken: nothing is a finished update then, see the invariants.
        """
        started = time.perf_counter()
        batch = Batch.of(groups)
        figures: Metrics = {**episode_figures(groups), **lag_figures(batch.policy_version, self.version)}
        figures["lr"] = self.optimizer.rate(self.version)
        if batch.responses:
            self.optimizer.zero_gradients()
            logprobs = self._forward_backward(batch)
            figures |= self._judge(batch, logprobs)
            with megatron_device():
                figures["grad_norm"] = self.optimizer.step(self._cause_of_overflow(batch, logprobs))
        self.version += 1
        figures["update"] = figures["policy_version"] = float(self.version)
        figures["time/train_s"] = time.perf_counter() - started
        return figures

    def _judge(self, batch: Batch, logprobs: Tensor) -> Metrics:
        """Loss and ratio figures of the batch; raises NonFinite before anything is updated."""
        behaviour, coefficients = torch.tensor(batch.behaviour_logprobs), torch.tensor(batch.coefficients)
        loss.require_finite(logprobs, behaviour, batch.locate)
        value = float(
            loss.policy_loss(
                logprobs, behaviour, coefficients, importance_sampling=self.config.importance_sampling
            )
        )
        if not math.isfinite(value):
            raise NonFinite(
                f"the loss is {value} although every ratio is finite; nothing was updated: "
                f"{self._cause_of_overflow(batch, logprobs)}"
            )
        return {"loss": value, **ratio_figures(logprobs - behaviour)}

    def _cause_of_overflow(self, batch: Batch, logprobs: Tensor) -> str:
        assert batch.extreme is not None, "a batch with responses has a largest advantage"
        behaviour = torch.tensor(batch.behaviour_logprobs) if self.config.importance_sampling else logprobs
        return loss.cause_of_overflow(logprobs - behaviour, batch.extreme)

    def gradients(self, groups: Sequence[Group]) -> dict[str, Tensor]:
        """The float32 gradients of one update on whole groups, before clipping, by Hugging Face name.

        Changes no weight and no version. Raises NotImplementedError with data parallelism, which shards them.
        """
        self.optimizer.zero_gradients()
        self._forward_backward(Batch.of(groups))
        return {name: gradient.clone() for name, gradient in self.model.gradients().items()}

    def score(
        self, segments: Sequence[Segment], weights: Mapping[str, Tensor] | None = None
    ) -> list[Float32]:
        """float32[T] for each segment: log-probability of action tokens at its temperature, NaN elsewhere.

        With aligned kernels and the weights of the version that sampled a token, the very bits that the
        engine recorded.

        weights  Hugging Face tensors of another version; None for the present ones
        """
        batch = Batch.of_segments(segments)
        if weights is None:
            logprobs = self._run(batch.pieces, len(batch), training=False)
        else:
            with self.model.holding(weights):
                logprobs = self._run(batch.pieces, len(batch), training=False)
        found = [np.full(len(segment), np.nan, dtype=np.float32) for segment in segments]
        parts = np.split(logprobs.numpy(), np.cumsum([segment.num_actions for segment in segments])[:-1])
        for column, segment, part in zip(found, segments, parts if segments else [], strict=True):
            column[segment.action_mask] = part
        return found

    def _forward_backward(self, batch: Batch) -> Tensor:
        """log pi of the N action tokens, float32[N]; leaves the gradients of the loss.

        Episodes with advantage 0 add exactly nothing to the gradient: for the figures they are run forward.
        """
        taught = [piece for piece in batch.pieces if piece.coefficient]
        untaught = [piece for piece in batch.pieces if not piece.coefficient]
        logprobs = self._run(taught, len(batch), training=True)
        return logprobs + self._run(untaught, len(batch), training=False) if untaught else logprobs

    def _run(self, pieces: Sequence[Piece], size: int, *, training: bool) -> Tensor:
        """log pi of the pieces' action tokens, each at its place in the flat order: float32[size], else 0."""
        shares = pack(pieces, self.config.micro_batch_tokens, self.parallel.data)
        work = shares[self.parallel.data_rank]
        if training:
            outputs = schedule.forward_backward(self.model, self.optimizer, work, self._loss_of)
        else:
            outputs = schedule.forward(self.model, work)
        flat = torch.zeros(size, dtype=torch.float32)
        for held, logprobs in zip(work, outputs, strict=bool(outputs)):
            real = held.flat >= 0
            flat[torch.from_numpy(held.flat[real])] = logprobs.cpu()[torch.from_numpy(real)]
        return sum_over_stages_and_replicas(flat.to(device())).cpu()

    def _loss_of(self, logprobs: Tensor, batch: MicroBatch) -> Tensor:
        return loss.policy_loss(
            logprobs,
            torch.from_numpy(batch.behaviour_logprobs).to(logprobs.device),
            torch.from_numpy(batch.coefficients).to(logprobs.device),
            importance_sampling=self.config.importance_sampling,
        )

    def weights(self) -> dict[str, Tensor]:
        """Copies of the present weights in Hugging Face names and the served dtype. Every rank calls it."""
        return self.model.tensors()

    def save(self, directory: Path | str) -> None:
        """Write a checkpoint from which `load` continues bit for bit; atomic. Every rank calls it."""
        kept = {
            "version": self.version,
            "contract": self.contract,
            "dtype": self.config.dtype,
            "architecture": dataclasses.asdict(self.model.architecture),
            "config": self.config.model_dump(mode="json"),
        }
        checkpoint.save(Path(directory), self.model, self.optimizer, kept)

    def load(self, directory: Path | str, *, exact: bool = True) -> None:
        """Continue from a checkpoint, written on this or another split. Every rank calls it.

        exact  refuse a checkpoint of other kernels, whose continuation could not be bit for bit
        Raises ConfigError for another model, other kernels, or an incomplete checkpoint.
        """
        facts = checkpoint.facts(Path(directory))
        for key, present in (
            ("architecture", dataclasses.asdict(self.model.architecture)),
            ("dtype", self.config.dtype),
            *((("contract", self.contract),) if exact else ()),
        ):
            if facts[key] != present:
                raise ConfigError(
                    source=str(directory),
                    key=key,
                    value=facts[key],
                    why=f"but the learner has {present!r}",
                    remedy="Use the model and kernels that wrote it, or exact=False for its weights.",
                )
        checkpoint.load(Path(directory), self.model, self.optimizer)
        self.version = facts["version"]

    def export(self, directory: Path | str) -> None:
        """Write a Hugging Face folder with the present weights. Every rank calls it; the first one writes."""
        tensors = self.weights()
        if torch.distributed.get_rank() == 0:
            hugging_face.export(self.model_dir, Path(directory), tensors)
        torch.distributed.barrier()
