"""Figures: exact on worked examples, absent where there is nothing to measure."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rz_agent.learner.diagnostics import (
    FutureToken,
    d3,
    effective_share,
    episode_figures,
    kl,
    lag_figures,
    ratio_figures,
)
from tiny_learner import group, segment

LOG_RATIOS = st.lists(st.floats(-20, 20, width=32), min_size=1, max_size=50).map(torch.tensor)


def test_worked_example() -> None:
    """w = 3 and 1: D3 = (3 - 1 - log 3)/2, KL = -log 3 / 2, ESS = 16 / (2 * 10)."""
    figures = ratio_figures(torch.tensor([math.log(3), 0.0]))
    assert figures["is/d3"] == pytest.approx((2 - math.log(3)) / 2)
    assert figures["is/kl"] == pytest.approx(-math.log(3) / 2)
    assert figures["is/ess"] == pytest.approx(0.8)
    assert figures["is/log_ratio_max"] == pytest.approx(math.log(3))
    assert figures["is/log_ratio_mean"] == pytest.approx(math.log(3) / 2)


def test_equal_policies_have_exactly_no_divergence_and_full_sample_size() -> None:
    agree = torch.zeros(5)
    assert (float(d3(agree)), float(kl(agree)), float(effective_share(agree))) == (0.0, 0.0, 1.0)


def test_a_tiny_divergence_is_not_lost_to_cancellation() -> None:
    assert float(d3(torch.tensor([1e-5]))) == pytest.approx(0.5e-10, rel=1e-3)


def test_without_tokens_a_figure_is_nan_and_absent_never_zero() -> None:
    nothing = torch.zeros(0)
    assert all(math.isnan(float(figure(nothing))) for figure in (d3, kl, effective_share))
    assert ratio_figures(nothing) == {}
    assert lag_figures(np.zeros(0, np.int32), 3) == {}


@settings(deadline=None)
@given(LOG_RATIOS)
def test_d3_is_never_negative(log_ratio: torch.Tensor) -> None:
    assert float(d3(log_ratio)) >= 0


@settings(deadline=None)
@given(LOG_RATIOS)
def test_effective_share_lies_between_one_token_and_all(log_ratio: torch.Tensor) -> None:
    assert 1 / len(log_ratio) - 1e-12 <= float(effective_share(log_ratio)) <= 1 + 1e-12


def test_effective_share_survives_ratios_beyond_float32() -> None:
    assert float(effective_share(torch.tensor([300.0, 300.0]))) == 1.0


@settings(deadline=None)
@given(st.lists(st.integers(0, 64), min_size=1, max_size=200))
def test_the_lag_histogram_counts_every_token_once(lags: list[int]) -> None:
    figures = lag_figures(np.array([100 - lag for lag in lags], np.int32), 100)
    assert figures["lag/hist"] == [lags.count(lag) for lag in range(max(lags) + 1)]
    assert figures["lag/max"] == max(lags)
    assert figures["lag/mean"] == pytest.approx(np.mean(lags))


def test_a_token_from_the_future_is_an_error() -> None:
    with pytest.raises(FutureToken, match="sampled by policy version 5, but the learner is at 4"):
        lag_figures(np.array([3, 5], np.int32), 4)


def test_episode_figures_leave_masked_episodes_out_of_means() -> None:
    rng = np.random.default_rng(0)
    turns = [[(1, 2)], [(1, 2), (1, 2), (1, 2)], [(1, 2)]]
    episodes = [(r, [segment(rng, t)]) for r, t in zip([1.0, 0.0, 0.0], turns, strict=True)]
    alone = group("h", [(1.0, [segment(rng, [(1, 1)])])])
    assert episode_figures([group("g", episodes, masked=[2]), alone]) == {
        "reward/mean": pytest.approx(2 / 3),
        "reward/group_std": 0.5,
        "episode/turns": pytest.approx(5 / 3),
        "episode/masked": 1.0,
        "episode/truncated": 0.0,
    }


def test_a_wholly_masked_batch_has_no_mean_reward() -> None:
    rng = np.random.default_rng(0)
    figures = episode_figures([group("g", [(0.0, [segment(rng, [(1, 1)])])], masked=[0])])
    assert figures == {"episode/masked": 1.0, "episode/truncated": 0.0}
