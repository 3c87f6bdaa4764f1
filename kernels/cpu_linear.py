"""A weight packed for vLLM's CPU matrix products, multiplied so that no row depends on its neighbours.

Stock dispatch picks a kernel by the number of rows, so a token decoded alone gets other bits than the same
token in a prefill. Each kind below keeps one kernel for every number of rows:

    "tiles"     bfloat16 on AMX: the sgl kernel, at least 5 rows (up to 4 it would leave the tile unit)
    "rows16"    bfloat16 on AVX512: oneDNN in slices of exactly 16 rows, so its blocking has one shape
    "widened"   bfloat16 without AVX512: oneDNN has no such product there; multiply exactly widened operands
                in float32 and round once
    "float32"   oneDNN, at least 2 rows (one row would be a matrix-vector product, summed in another order)

Engine (through the plugin) and learner call this one function; see `cpu_library.SCRATCH` for who waits.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from . import cpu_library

Kind = Literal["tiles", "rows16", "widened", "float32"]

# One primitive for each number of rows seen; vLLM keeps as many.
_PRIMITIVES = 32


def kind_of(dtype: torch.dtype, outputs: int, inputs: int) -> Kind:
    """Which product a weight [outputs, inputs] of a dtype gets on this processor."""
    if dtype == torch.float32:
        return "float32"
    if dtype != torch.bfloat16:
        raise ValueError(f"dtype {dtype} has no aligned matrix product on a CPU; use float32 or bfloat16")
    if cpu_library.has_amx() and inputs % 32 == 0 and outputs % 16 == 0:
        return "tiles"
    return "rows16" if cpu_library.multiplies_bfloat16() else "widened"


class PackedWeight:
    """A copy of weight [N, K] ready to be multiplied; later changes of the weight do not reach it."""

    def __init__(self, weight: Tensor) -> None:
        cpu_library.load()
        outputs, inputs = weight.shape
        self.shape = (outputs, inputs)
        self.dtype = weight.dtype
        self.kind = kind_of(weight.dtype, outputs, inputs)
        self._release: Any = None
        weight = weight.detach().contiguous()
        if self.kind == "tiles":
            self._tiles = torch.ops._C.convert_weight_packed(weight)
            return
        if self.kind == "widened":
            weight = weight.to(torch.float32)
        # Bound here because module globals are gone when the interpreter collects the last weights.
        self._release = torch.ops._C.release_dnnl_matmul_handler
        self._handle: int = torch.ops._C.create_onednn_mm_handler(weight.t(), _PRIMITIVES)
        self._handler = torch.tensor(self._handle, dtype=torch.int64)

    def __del__(self) -> None:
        if self.__dict__.get("_release") is not None and "_handle" in self.__dict__:
            self._release(self._handle)

    def __call__(self, x: Tensor) -> Tensor:
        """x [..., K] in the weight's dtype -> [..., N]; a row's bits depend on that row alone."""
        if x.dtype != self.dtype:
            raise ValueError(f"x is {x.dtype} but the weight was packed in {self.dtype}")
        rows = x.reshape(-1, self.shape[1]).contiguous()
        with cpu_library.SCRATCH:
            product = self._rows(rows)
        return product.reshape(*x.shape[:-1], self.shape[0])

    def _rows(self, x: Tensor) -> Tensor:
        count = x.shape[0]
        if count == 0:
            return x.new_empty(0, self.shape[0])
        if self.kind == "tiles":
            x = _at_least(x, 5)
            y = x.new_empty(x.shape[0], self.shape[0])
            torch.ops._C.weight_packed_linear(y, x, self._tiles, None, True)
            return y[:count]
        if self.kind == "rows16":
            x = F.pad(x, (0, 0, 0, -count % 16))
            y = x.new_empty(x.shape[0], self.shape[0])
            for start in range(0, x.shape[0], 16):
                torch.ops._C.onednn_mm(y[start : start + 16], x[start : start + 16], None, self._handler)
            return y[:count]
        wide = _at_least(x.to(torch.float32), 2)
        y = wide.new_empty(wide.shape[0], self.shape[0])
        torch.ops._C.onednn_mm(y, wide, None, self._handler)
        return y[:count].to(self.dtype)


def _at_least(x: Tensor, rows: int) -> Tensor:
    return F.pad(x, (0, 0, 0, rows - x.shape[0])) if x.shape[0] < rows else x
