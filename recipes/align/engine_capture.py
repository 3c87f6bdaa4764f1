"""The engine's side: hooks on the modules of vLLM's model, in an engine of this process and without graphs.

    VllmInProcess.on_worker(watch) --hooks--> model: tokens of the step, then each module's output
                                   --wrap---> compute_logits: the rows that are sampled from

Invariant: the engine computes what it would without hooks; they copy. A module that several layers share
(vLLM's rotary embedding) is filed under the layer that runs. Graphs replay kernels without modules: an engine
that is to be watched must run without them. What a module calls is noted the first time it runs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from .capture import Capture, Key, Operation, Prefix
from .engine_step import Step, step_of
from .forward_pass import EMBEDDING, FINAL_NORM, LAYER, LOGITS

_INSIDE = {part.module: part.name for part in LAYER}
_OUTSIDE = {part.module: part.name for part in (EMBEDDING, FINAL_NORM)}


class Called(TorchDispatchMode):
    """Notes the compiled operations that torch dispatches to while it is on, but for its own."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace not in ("aten", "prim"):
            self.names.append(str(func.name()).split("::")[-1])
        return func(*args, **(kwargs or {}))


class EngineWatch:
    """Files the outputs of one engine's model in `capture`, which may be replaced between two steps.

    calls  the compiled operations of vLLM that each operation ran, by its name inside a layer
    """

    def __init__(self) -> None:
        self.capture = Capture()
        self.calls: dict[str, tuple[str, ...]] = {}
        self._step: Step | None = None
        self._layer = 0
        self._keys: list[Key] = []
        self._last: list[Key] | None = None  # of the rows that this step samples from; None: taken
        self._known: dict[str, Prefix] = {}  # request -> what is computed of it

    def watch(self, worker: Any) -> None:
        """Hook the model of a worker; called between two steps."""
        runner = worker.model_runner
        self._step = step_of(runner)
        model: nn.Module = runner.get_model()
        model.register_forward_pre_hook(self._begin, with_kwargs=True)
        for name, module in model.named_modules():
            layer, _, inside = name.removeprefix("model.layers.").partition(".")
            if name in _OUTSIDE:
                self._hook(module, _OUTSIDE[name], outside=True)
            elif name == f"model.layers.{layer}":
                module.register_forward_pre_hook(self._enter(int(layer)))
            elif inside in _INSIDE and layer.isdigit():
                self._hook(module, _INSIDE[inside], outside=False)
        _wrap_logits(model, self._logits)

    def _enter(self, layer: int) -> Callable[..., None]:
        def enter(module: nn.Module, args: Any) -> None:
            self._layer = layer

        return enter

    def _begin(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        """Before a step: which request and position each of its rows is."""
        assert self._step is not None
        ids = kwargs["input_ids"].tolist()
        self._keys, last = [], []
        for index, part in enumerate(self._step.parts()):
            known = self._known.get(part.request)
            if known is None or known.length != part.computed:  # new, with a cached prefix, or preempted
                known = self._known[part.request] = Prefix()
                known.extend(self._step.computed_ids(index, part.computed))
            self._keys += known.extend(ids[part.first : part.end])
            last.append(self._keys[-1])
        self._last = last
        self.capture.largest_step = max(self.capture.largest_step, len(self._keys))

    def _hook(self, module: nn.Module, name: str, *, outside: bool) -> None:
        if name not in self.calls:
            self.calls[name] = ()
            note_calls(module, lambda names: self.calls.update({name: names}))
        module.register_forward_hook(self._file(name, outside=outside))

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


def note_calls(module: nn.Module, then: Callable[[tuple[str, ...]], None]) -> None:
    """Tell `then` what the next call of a module runs, once."""
    called = Called()

    def before(module: nn.Module, args: Any) -> None:
        first.remove()
        called.__enter__()  # type: ignore[no-untyped-call]

    def after(module: nn.Module, args: Any, output: Any) -> None:
        last.remove()
        called.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        then(tuple(dict.fromkeys(called.names)))

    first, last = module.register_forward_pre_hook(before), module.register_forward_hook(after)
