"""Figures about a batch: how far the policy is from the one that sampled, how old the tokens are, how
episodes ended.

A figure that could not be computed is absent (an empty batch has no mean), never 0. All are computed in
float64: d3 of two nearly equal policies is a difference of nearly equal numbers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from ..errors import RzError
from ..trajectory import Group, Int32

Metrics = dict[str, float | list[int]]


class FutureToken(RzError):
    """A token claims a policy version that the learner has not reached yet."""


def d3(log_ratio: Tensor) -> Tensor:
    """Mean of w - 1 - log w, 0 where the policies agree and positive elsewhere; NaN without tokens
    (float64[]).

    The "k3" estimate of KL(mu || pi) (Schulman, "Approximating KL divergence"; REINFORCE Zero, section 3).
    """
    x = log_ratio.double()
    return (torch.expm1(x) - x).mean()


def kl(log_ratio: Tensor) -> Tensor:
    """Mean of -log w, the "k1" estimate of KL(mu || pi): unbiased, may be negative; NaN without tokens."""
    return -log_ratio.double().mean()


def effective_share(log_ratio: Tensor) -> Tensor:
    """Effective sample size per token, (sum w)^2 / (N sum w^2), in (0, 1]; NaN without tokens (float64[])."""
    weights = (
        torch.exp(log_ratio.double() - log_ratio.double().amax()) if len(log_ratio) else log_ratio.double()
    )
    return weights.sum() ** 2 / (len(weights) * (weights**2).sum())


def ratio_figures(log_ratio: Tensor) -> Metrics:
    """The `is/...` figures of N action tokens; empty without tokens.

    `is/log_ratio_max` is the log of the largest weight (signed), `is/log_ratio_mean` the mean of log w.
    """
    if not len(log_ratio):
        return {}
    return {
        "is/d3": float(d3(log_ratio)),
        "is/kl": float(kl(log_ratio)),
        "is/ess": float(effective_share(log_ratio)),
        "is/log_ratio_max": float(log_ratio.max()),
        "is/log_ratio_mean": float(log_ratio.double().mean()),
    }


def lag_figures(policy_version: Int32, version: int) -> Metrics:
    """`lag/mean`, `lag/max` and `lag/hist` (tokens at lag 0, 1, ...) of tokens trained at `version`.

    Raises FutureToken where a token was sampled by a later version than the one being trained.

    >>> lag_figures(np.array([3, 3, 1], dtype=np.int32), 3)
    {'lag/mean': 0.6666666666666666, 'lag/max': 2.0, 'lag/hist': [2, 0, 1]}
    """
    lags = version - policy_version.astype(np.int64)
    if not len(lags):
        return {}
    if lags.min() < 0:
        raise FutureToken(
            f"a token was sampled by policy version {policy_version.max()}, but the learner is at {version}: "
            "the engine and the learner disagree about versions. Resume from the learner's last checkpoint."
        )
    return {
        "lag/mean": float(lags.mean()),
        "lag/max": float(lags.max()),
        "lag/hist": np.bincount(lags).tolist(),
    }


def episode_figures(groups: Sequence[Group]) -> Metrics:
    """`reward/...` and `episode/...` of a batch: means over unmasked episodes; masked and truncated counted.

    `reward/group_std` is the mean over groups with at least two unmasked episodes of the population standard
    deviation: 0 means that no group taught anything.
    """
    kept = [episode for group in groups for episode in group.kept]
    spreads = [float(np.std([e.reward for e in group.kept])) for group in groups if len(group.kept) > 1]
    turns = [sum(len(segment.turns()) for segment in episode.segments) for episode in kept]
    figures: Mapping[str, list[float] | list[int]] = {
        "reward/mean": [episode.reward for episode in kept],
        "reward/group_std": spreads,
        "episode/turns": turns,
    }
    found: Metrics = {name: float(np.mean(values)) for name, values in figures.items() if values}
    found["episode/masked"] = float(sum(episode.masked for group in groups for episode in group))
    found["episode/truncated"] = float(sum(episode.status == "truncated" for episode in kept))
    return found
