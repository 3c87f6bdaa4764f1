"""Lets Megatron-core run where there is no CUDA: a redirect of devices and streams, no arithmetic.

    with megatron_device():   every call into Megatron-core is made inside one

Megatron-core names the device "cuda" and asks torch.cuda for streams in a few dozen places. Inside the
context those names mean the CPU: torch.cuda's device and stream functions are replaced (and put back on
leaving), and a TorchFunctionMode turns `device="cuda"` into "cpu", `Tensor.cuda()` into identity and lets
`Tensor.type()` answer with the "torch.cuda." prefix that the optimizers compare strings with. With CUDA the
context does nothing. Contexts nest.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from megatron.core.tensor_parallel import random as megatron_random
from torch.overrides import TorchFunctionMode


def device() -> torch.device:
    """Where parameters and activations live."""
    return (
        torch.device("cuda", torch.cuda.current_device())
        if torch.cuda.is_available()
        else torch.device("cpu")
    )


@contextlib.contextmanager
def megatron_device() -> Iterator[None]:
    """Run Megatron-core on this machine's device, without its advice to use newer interfaces."""
    logger = logging.getLogger("megatron.core")
    before = logger.level
    logger.setLevel(max(before, logging.ERROR))
    try:
        with _device():
            yield
    finally:
        logger.setLevel(before)


@contextlib.contextmanager
def _device() -> Iterator[None]:
    if torch.cuda.is_available():
        yield
        return
    with contextlib.ExitStack() as stack:
        for name, stand_in in _CUDA_STAND_INS.items():
            stack.enter_context(_replaced(torch.cuda, name, stand_in))
        stack.enter_context(_replaced(megatron_random, "_get_cuda_rng_state", _rng_state))
        stack.enter_context(_replaced(megatron_random, "_set_cuda_rng_state", _set_rng_state))
        stack.enter_context(_CpuForCuda())
        yield


@contextlib.contextmanager
def _replaced(owner: Any, name: str, stand_in: object) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, stand_in)
    try:
        yield
    finally:
        setattr(owner, name, before)


class _NullStream:
    """A CPU has one order of execution, so there is nothing to wait for."""

    def __init__(self, *args: object, **kwargs: object) -> None: ...

    def wait_stream(self, stream: object) -> None: ...

    def wait_event(self, event: object) -> None: ...

    def synchronize(self) -> None: ...

    def record_event(self, event: object = None) -> object:
        return self

    def wait(self, stream: object = None) -> None: ...


def _nothing(*args: object, **kwargs: object) -> None: ...


_CUDA_STAND_INS: Mapping[str, object] = {
    "current_device": lambda: torch.device("cpu"),
    "current_stream": _NullStream,
    "Stream": _NullStream,
    "stream": lambda stream: contextlib.nullcontext(),
    "synchronize": _nothing,
    "empty_cache": _nothing,
}


def _rng_state(device: object = "cuda", clone: bool = False, graph_safe: bool = False) -> torch.Tensor:
    return torch.get_rng_state()


def _set_rng_state(state: torch.Tensor, device: object = -1, graph_safe: bool = False) -> None:
    torch.set_rng_state(state)


def _is_cuda(named: object) -> bool:
    return str(named).startswith("cuda")


class _CpuForCuda(TorchFunctionMode):
    """What "cuda" means on a machine without it."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        if _is_cuda(kwargs.get("device")):
            kwargs["device"] = "cpu"
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            return func(*args).replace("torch.", "torch.cuda.", 1)
        if func is torch.Tensor.to and len(args) > 1 and _is_cuda(args[1]):
            args = (args[0], "cpu", *args[2:])
        return func(*args, **kwargs)
