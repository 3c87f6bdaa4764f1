"""The operations whose textbook formula, in plain torch, is already what the engine computes.

Shared by every implementation: on a CPU vLLM itself runs these formulas, so there is one text for both
sides and autograd supplies the backward. Every sum runs over a whole row in one order, hence a row's bits
depend on that row alone. Nothing waits.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root-mean-square norm (Zhang and Sennrich 2019): mean in float32 or wider, weight last."""
    wide = x.contiguous().to(torch.promote_types(x.dtype, torch.float32))
    return _scaled(wide, weight.to(x.dtype), eps)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(norm of the unrounded sum, the sum rounded to the dtype of x)."""
    wide = torch.promote_types(x.dtype, torch.float32)
    total = x.contiguous().to(wide) + residual.contiguous().to(wide)
    return _scaled(total, weight.to(x.dtype), eps), total.to(x.dtype)


def _scaled(wide: Tensor, weight: Tensor, eps: float) -> Tensor:
    variance = wide.pow(2).mean(dim=-1, keepdim=True)
    return (wide * torch.rsqrt(variance + eps)).to(weight.dtype) * weight


def rotary_table(head_dim: int, base: float, max_positions: int, dtype: torch.dtype) -> Tensor:
    """[max_positions, head_dim] cosines then sines of position * base^(-2i/head_dim) (Su et al. 2021).

    Angles are computed in float32, as the engine does, also where the table is then widened.
    """
    frequencies = 1.0 / (base ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim))
    angles = torch.einsum("i,j -> ij", torch.arange(max_positions, dtype=torch.float32), frequencies)
    return torch.cat((angles.cos(), angles.sin()), dim=-1).to(dtype)


def rotating_back(table: Tensor) -> Tensor:
    """The table whose rotation undoes that of `table`, which is also the gradient's."""
    cos, sin = table.chunk(2, dim=-1)
    return torch.cat((cos, -sin), dim=-1)


def rotate(x: Tensor, positions: Tensor, table: Tensor) -> Tensor:
    """Rotate the halves of x [T, H, D] by the angles of positions [T]; arithmetic in float32 or wider."""
    wide = torch.promote_types(x.dtype, torch.float32)
    cos, sin = table[positions].to(wide).unsqueeze(1).chunk(2, dim=-1)
    first, second = x.to(wide).chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """[T, 2F] -> [T, F]: silu of the first half times the second half (Shazeer 2020)."""
    half = gate_up.shape[-1] // 2
    return F.silu(gate_up[..., :half]) * gate_up[..., half:]


def check_temperature(temperature: float) -> None:
    """Raise ValueError where no log-probability is defined."""
    if not temperature > 0:
        raise ValueError(f"temperature = {temperature}: a log-probability needs a temperature above 0")


def token_logprobs(logits: Tensor, ids: Tensor, temperature: float) -> Tensor:
    """Log-softmax of logits [T, V] / temperature at ids [T], in float32 (float64 where the logits are)."""
    check_temperature(temperature)
    wide = torch.promote_types(logits.dtype, torch.float32)
    # A tensor and not a number: the engine divides by a float32 tensor, and 0.7 rounds on the way there.
    divisor = torch.tensor(temperature, dtype=torch.float32, device=logits.device).to(wide)
    logprobs = logits.to(wide).div(divisor).log_softmax(dim=-1)
    return logprobs.gather(-1, ids.unsqueeze(-1)).squeeze(-1)


def linear_gradients(
    grad: Tensor, x: Tensor, weight: Tensor, needs_dx: bool = True, needs_dw: bool = True
) -> tuple[Tensor | None, Tensor | None]:
    """(dx [..., K], dw [N, K]) of y = x W^T for grad [..., N]; dw in the dtype of the weight.

    Through the weight that the forward multiplied: the rounded one, where it is a float32 master. A CPU
    multiplies in float32: its products of bfloat16 round in between.
    """
    dtype = torch.float32 if x.device.type == "cpu" and x.dtype == torch.bfloat16 else x.dtype
    flat, dx, dw = grad.reshape(-1, grad.shape[-1]).to(dtype), None, None
    if needs_dx:
        dx = (flat @ weight.to(x.dtype).to(dtype)).to(x.dtype).reshape(x.shape)
    if needs_dw:
        dw = (flat.t() @ x.reshape(-1, x.shape[-1]).to(dtype)).to(weight.dtype)
    return dx, dw
