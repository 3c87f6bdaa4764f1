"""REINFORCE Zero: L = -(1/B) sum_i (1/T_i) sum_t A_i w_it with w = pi / mu, exactly.

No clip, no clamp, no mask: a ratio is exponentiated in float32 and used as it is. A ratio or
log-probability that is not finite stops the run and names its token, because every softening of it would be
a silent bias. The sum form takes coefficients A_i / (B T_i), so losses of micro-batches add up to the loss
of the batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from ..errors import NonFinite


def ratios(logprobs: Tensor, behaviour_logprobs: Tensor) -> Tensor:
    """w = exp(log pi - log mu), float32[N]; may be infinite: `require_finite` decides what that means."""
    return torch.exp(logprobs.float() - behaviour_logprobs.float())


def policy_loss(
    logprobs: Tensor, behaviour_logprobs: Tensor, coefficients: Tensor, *, importance_sampling: bool = True
) -> Tensor:
    """float32[]: -sum coefficient * w over N action tokens, with gradient -sum coefficient * w * grad log pi.

    logprobs            float32[N]  log pi of the action tokens, differentiable
    behaviour_logprobs  float32[N]  log mu, as the engine recorded it
    coefficients        float32[N]  A_i / (B T_i)
    importance_sampling False: the baseline that pretends to be on policy; every weight has the value 1 and
                        the gradient of log pi, whatever mu says
    """
    behaviour = behaviour_logprobs if importance_sampling else logprobs.detach()
    return -(coefficients * ratios(logprobs, behaviour)).sum()


def require_finite(logprobs: Tensor, behaviour_logprobs: Tensor, locate: Callable[[int], str]) -> None:
    """Raise NonFinite for the first of N action tokens whose log-probability or ratio is not finite."""
    weights = ratios(logprobs, behaviour_logprobs)
    bad = torch.nonzero(~(torch.isfinite(logprobs) & torch.isfinite(weights))).flatten()
    if len(bad):
        index = int(bad[0])
        raise NonFinite(
            f"{locate(index)}: log pi = {float(logprobs[index])}, "
            f"log mu = {float(behaviour_logprobs[index])}, ratio = {float(weights[index])}; "
            f"{len(bad)} of {len(weights)} action tokens are not finite. Nothing was updated. "
            "Lower the learning rate or max_lag, or audit the engine."
        )


def cause_of_overflow(log_ratios: Tensor, extreme: tuple[str, float]) -> str:
    """What to blame where a sum of advantage times ratio is not finite although each of them is.

    log_ratios  float32[N]  log pi - log mu, all finite
    extreme     the episode whose advantage is furthest from 0, and that advantage

    >>> cause_of_overflow(torch.tensor([0.0, 2.0]), ("e7", 1e30))
    "the largest advantage is 1e+30, of episode e7, the largest ratio 7.39. Bound the environment's rewards."
    """
    episode, advantage = extreme
    log_ratio = float(log_ratios.max())
    found = (
        f"the largest advantage is {advantage:g}, of episode {episode}, the largest ratio {_power(log_ratio)}"
    )
    if advantage and math.log(abs(advantage)) > log_ratio:
        return f"{found}. Bound the environment's rewards."
    return f"{found}. Lower the learning rate or max_lag."


def _power(exponent: float) -> str:
    """e to an exponent that a float32 has, for a person."""
    return f"{math.exp(min(exponent, 700.0)):.3g}"
