"""The learner's side: `Operations` that keep what they return, told by the model which tokens they compute.

    Learner --calls--> Watched --calls--> the operations it is to be judged by
    GPTModel --before each forward--> Watched.begin(micro batch)

Invariant: the operations are called in the order of `forward_pass`; a call out of that order is an error, so
an output is never filed under the wrong name. Of a split learner each rank files what it has: its part, or
the whole sum over ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ...errors import RzError
from ...kernels.operations import Operations, OperationsName, Packed
from ...learner.learner import Learner
from ...learner.megatron.layers import Row
from ...learner.packing import MicroBatch
from .capture import Capture, Key, Operation, Prefix
from .forward_pass import EMBEDDING, FINAL_NORM, LAYER, LOGITS, LOGPROB, in_layer

_FIRST = Operation(0, LAYER[0].name)  # whose input is the embedding


class OutOfOrder(RzError):
    """The learner ran another operation than the forward pass has there."""


class Watched:
    """`Operations` of `inner` that file their outputs in `capture`."""

    def __init__(self, inner: Operations) -> None:
        self.inner = inner
        self.capture: Capture | None = None
        self._layers, self._qk_norm = 0, True
        self._expected: Iterator[tuple[Operation, str]] = iter(())
        self._keys: list[Key] = []
        self._predicting: list[Key] = []
        self._targets: list[Key] = []

    def watch(self, learner: Learner) -> None:
        """Be told of each forward pass of this learner, which must have been given this object."""
        architecture = learner.model.architecture
        self._layers, self._qk_norm = architecture.layers, architecture.qk_norm
        learner.model.module.register_forward_pre_hook(self._before, with_kwargs=True)
        if learner.parallel.tensor > 1:  # then a row is no call of `linear`: its sum is over ranks
            for module in learner.model.module.modules():
                if isinstance(module, Row):
                    module.register_forward_hook(lambda row, x, output: self._row(output[0]))

    def fresh(self) -> Capture:
        """A new capture, which what follows is filed in."""
        self.capture = Capture()
        return self.capture

    def rest(self) -> None:
        """File nothing from now on: training runs operations again and backwards."""
        self.capture = None

    def _before(self, module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        self.begin(kwargs["output_processor_context"])

    def begin(self, batch: MicroBatch) -> None:
        """The next calls compute this micro-batch."""
        parts = in_layer(self._qk_norm)
        body = [(Operation(layer, part.name), part.kind) for layer in range(self._layers) for part in parts]
        self._expected = iter([*body, (Operation(None, FINAL_NORM.name), FINAL_NORM.kind)])
        ends = zip(batch.cu_seqlens, batch.cu_seqlens[1:], strict=False)
        self._keys = [key for a, b in ends for key in Prefix().extend(batch.token_ids[a:b].tolist())]
        self._predicting = [self._keys[row] for row in batch.rows.tolist()]
        self._targets = [self._keys[row + 1] for row in batch.rows.tolist()]
        if self.capture is not None:
            self.capture.largest_step = max(self.capture.largest_step, len(batch))

    def _row(self, output: Tensor) -> None:
        self._file("linear", output)

    def _file(self, kind: str, *outputs: Tensor) -> Operation | None:
        """File the outputs of the next operation; returns it."""
        if self.capture is None:
            return None
        operation, expected = next(self._expected, (LOGITS, "linear"))
        if kind != expected:
            raise OutOfOrder(f"the learner ran {kind} where {operation} is {expected}")
        keys = self._keys
        if operation is LOGITS:
            keys = self._predicting[: len(outputs[0])]
            self._predicting = self._predicting[len(outputs[0]) :]
        self.capture.add(operation, keys, torch.cat([output.flatten(1) for output in outputs], 1))
        return operation

    # `Operations`, in its order ------------------------------------------------------------------------

    @property
    def name(self) -> OperationsName:
        return self.inner.name

    def contract(self) -> str:
        return self.inner.contract()

    def pack(self, weight: Tensor) -> Packed:
        return self.inner.pack(weight)

    def linear(self, x: Tensor, weight: Tensor, packed: Packed) -> Tensor:
        output = self.inner.linear(x, weight, packed)
        self._file("linear", output)
        return output

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        output = self.inner.rms_norm(x, weight, eps)
        if self._file("norm", output) == _FIRST and self.capture is not None:
            self.capture.add(Operation(None, EMBEDDING.name), self._keys, x)
        return output

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        normed, total = self.inner.add_rms_norm(x, residual, weight, eps)
        self._file("norm", normed, total)
        return normed, total

    def rotary_table(self, head_dim: int, base: float, max_positions: int, dtype: torch.dtype) -> Tensor:
        return self.inner.rotary_table(head_dim, base, max_positions, dtype)

    def rotary(self, q: Tensor, k: Tensor, positions: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
        q, k = self.inner.rotary(q, k, positions, table)
        self._file("rotary", q, k)
        return q, k

    def attention(self, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: tuple[int, ...], scale: float) -> Tensor:
        output = self.inner.attention(q, k, v, cu_seqlens, scale)
        self._file("attention", output)
        return output

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        output = self.inner.silu_and_mul(gate_up)
        self._file("silu_and_mul", output)
        return output

    def token_logprobs(self, logits: Tensor, ids: Tensor, temperature: float) -> Tensor:
        output = self.inner.token_logprobs(logits, ids, temperature)
        if self.capture is not None:
            keys, self._targets = self._targets[: len(ids)], self._targets[len(ids) :]
            self.capture.add(LOGPROB, keys, output[:, None])
        return output
