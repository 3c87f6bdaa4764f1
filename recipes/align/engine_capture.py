"""The engine's side: hooks on the modules of vLLM's model, in an engine of this process and without graphs.

    VllmInProcess.on_worker(watch) --hooks--> model: tokens of the step, then each module's output
                                   --wrap---> compute_logits: the rows that are sampled from

Invariant: the engine computes what it would without hooks; they copy. A module that several layers share
(vLLM's rotary embedding) is filed under the layer that runs. Graphs replay kernels without modules: an engine
that is to be watched must run without them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from .capture import Capture, Key, Operation, Prefix
from .forward_pass import EMBEDDING, FINAL_NORM, LAYER, LOGITS

_INSIDE = {part.module: part.name for part in LAYER}
_OUTSIDE = {part.module: part.name for part in (EMBEDDING, FINAL_NORM)}


class EngineWatch:
    """Files the outputs of one engine's model in `capture`, which may be replaced between two steps."""

    def __init__(self) -> None:
        self.capture = Capture()
        self._layer = 0
        self._keys: list[Key] = []
        self._last: list[Key] | None = None  # of the rows that this step samples from; None: taken
        self._known: dict[str, Prefix] = {}  # request -> what is computed of it
        self._runner: Any = None

    def watch(self, worker: Any) -> None:
        """Hook the model of a worker; called between two steps."""
        self._runner = worker.model_runner
        model: nn.Module = self._runner.get_model()
        model.register_forward_pre_hook(self._begin, with_kwargs=True)
        for name, module in model.named_modules():
            layer, _, inside = name.removeprefix("model.layers.").partition(".")
            if name in _OUTSIDE:
                module.register_forward_hook(self._file(_OUTSIDE[name], outside=True))
            elif name == f"model.layers.{layer}":
                module.register_forward_pre_hook(self._enter(int(layer)))
            elif inside in _INSIDE and layer.isdigit():
                module.register_forward_hook(self._file(_INSIDE[inside], outside=False))
        _wrap_logits(model, self._logits)

    def _enter(self, layer: int) -> Callable[..., None]:
        def enter(module: nn.Module, args: Any) -> None:
            self._layer = layer

        return enter

    def _begin(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        """Before a step: which request and position each of its rows is."""
        batch, ids = self._runner.input_batch, kwargs["input_ids"].tolist()
        count = batch.num_reqs
        starts = self._runner.query_start_loc.np[: count + 1].tolist()
        self._keys, last = [], []
        for index, request in enumerate(batch.req_ids[:count]):
            computed = int(batch.num_computed_tokens_cpu[index])
            known = self._known.get(request)
            if known is None or known.length != computed:  # new, with a cached prefix, or preempted
                known = self._known[request] = Prefix()
                known.extend(batch.token_ids_cpu[index, :computed].tolist())
            self._keys += known.extend(ids[starts[index] : starts[index + 1]])
            last.append(self._keys[-1])
        self._last = last
        self.capture.largest_step = max(self.capture.largest_step, len(self._keys))

    def _file(self, name: str, *, outside: bool) -> Callable[..., None]:
        def file(module: nn.Module, args: Any, output: Any) -> None:
            parts = [
                part for part in (output if isinstance(output, tuple) else (output,)) if part is not None
            ]
            rows = torch.cat([part.flatten(1) for part in parts], 1)
            self.capture.add(Operation(None if outside else self._layer, name), self._keys, rows)

        return file

    def _logits(self, logits: Tensor) -> None:
        """Of a step's sampled rows; the prompt's scores come later, in calls of their own."""
        if self._last is not None and len(logits) >= len(self._last):
            self.capture.add(LOGITS, self._last, logits)
            self._last = None


def _wrap_logits(model: Any, seen: Callable[[Tensor], None]) -> None:
    original = model.compute_logits

    def compute_logits(*args: Any, **kwargs: Any) -> Any:
        logits = original(*args, **kwargs)
        if logits is not None:
            seen(logits)
        return logits

    model.compute_logits = compute_logits
