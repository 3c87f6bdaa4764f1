"""A linear layer of the engine whose packed weight can be renewed after a weight update.

vLLM packs each weight once and, on a CPU, throws the original away; an update then has nothing to load
into, and a tied output head would keep its old packed copy. Here the parameter stays, and every packed copy
is rebuilt from it.

Invariant: `version` names the update whose parameter the packed copy was made from. The weight engine checks
the parameters, then refreshes every layer in the same call, and nothing else writes either.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from .cpu_linear import PackedWeight
from .vllm_settings import KernelsName

# vLLM's own dispatch: (layer, remove_weight) -> None; it sets layer.cpu_linear.
Dispatch = Callable[[torch.nn.Module, bool], None]

_ATTRIBUTE = "rz_linear"


class EngineLinear:
    """What `layer.cpu_linear(x, weight, bias)` calls in an engine of ours."""

    def __init__(self, layer: torch.nn.Module, kernels: KernelsName, stock: Dispatch) -> None:
        self.version = -1
        self._layer: Any = layer
        self._kernels = kernels
        self._stock = stock
        self._packed: PackedWeight | None = None
        self._stock_linear: Callable[..., Tensor] | None = None

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if self._kernels == "standard":
            if self._stock_linear is None:
                self._pack()
            assert self._stock_linear is not None
            return self._stock_linear(x, weight, bias)
        if self._packed is None:
            # At the first use and not before: an embedding that is no output head is never multiplied.
            self._pack()
        assert self._packed is not None
        y = self._packed(x)
        return y if bias is None else y + bias

    def refresh(self, version: int) -> None:
        """Rebuild the packed copy, if one exists, from the parameter as it is now."""
        self.version = version
        if self._packed is not None or self._stock_linear is not None:
            self._pack()

    def _pack(self) -> None:
        if self._kernels == "standard":
            self._stock(self._layer, False)
            self._stock_linear = self._layer.cpu_linear
            self._layer.cpu_linear = self
        else:
            self._packed = PackedWeight(self._layer.weight.data[: _real_rows(self._layer)])


def _real_rows(layer: Any) -> int:
    """Rows that the checkpoint has: vLLM pads a vocabulary to a multiple of 64, the learner does not."""
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

    return int(layer.org_vocab_size if isinstance(layer, VocabParallelEmbedding) else layer.weight.shape[0])


def attach(layer: Any, kernels: KernelsName, stock: Dispatch) -> None:
    """Make a layer multiply through an `EngineLinear`, keeping its parameter."""
    linear = EngineLinear(layer, kernels, stock)
    setattr(layer, _ATTRIBUTE, linear)
    layer.cpu_linear = linear


def engine_linears(model: torch.nn.Module) -> Iterator[tuple[str, EngineLinear]]:
    """Every layer of a model that `attach` was called on, with its name."""
    for name, module in model.named_modules(remove_duplicate=False):
        if _ATTRIBUTE in module.__dict__:
            yield name, module.__dict__[_ATTRIBUTE]
