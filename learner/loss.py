"""REINFORCE Zero: L = -(1/B) sum_i (1/T_i) sum_t A_i w_it with w = pi / mu, exactly.

No clip, no clamp, no mask: a ratio is exponentiated in float32 and used as it is. A ratio or
log-probability that is not finite stops the run and names its token, because every softening of it would be
a silent bias. The sum form takes coefficients A_i / (B T_i), so losses of micro-batches add up to the loss
of the batch.
"""

from __future__ import annotations

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
    """float32[]: -sum coefficient * w over N action tokens; its gradient is -sum coefficient * w * grad log
    pi.

    logprobs            float32[N]  log pi of the action tokens, differentiable
    behaviour_logprobs  float32[N]  log mu, as the engine recorded it
    coefficients        float32[N]  A_i / (B T_i)
    importance_sampling False: the baseline that pretends to be on policy; every weight has the value 1 and
    the
                        gradient of log pi, whatever mu says
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
