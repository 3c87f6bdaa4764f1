"""The loss is exactly REINFORCE Zero, counted per episode, and never softened."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rz_agent.errors import NonFinite
from rz_agent.learner.advantages import advantages
from rz_agent.learner.batch import Batch
from rz_agent.learner.loss import cause_of_overflow, policy_loss, ratios, require_finite
from rz_agent.trajectory import Group, Segment, unmasked
from tiny_learner import group, ragged_groups, segment


def tokens(mask: list[bool], logprobs: list[float]) -> Segment:
    """Tokens 0, 1, ... with these behaviour log-probabilities; actions are of version 0."""
    return Segment(
        token_ids=np.arange(len(mask), dtype=np.int32),
        action_mask=np.array(mask),
        behaviour_logprobs=np.array(logprobs, np.float32),
        policy_version=np.array([0 if acts else -1 for acts in mask], np.int32),
    )


def acted(*logprobs: float) -> Segment:
    """One observed token, then actions with these behaviour log-probabilities."""
    return tokens([False] + [True] * len(logprobs), [math.nan, *logprobs])


def loss_and_gradient(groups: list[Group], log_pi: list[float], **options: bool) -> tuple[float, list[float]]:
    batch = Batch.of(groups)
    logprobs = torch.tensor(log_pi, requires_grad=True)
    loss = policy_loss(
        logprobs, torch.tensor(batch.behaviour_logprobs), torch.tensor(batch.coefficients), **options
    )
    loss.backward()  # type: ignore[no-untyped-call]
    assert logprobs.grad is not None
    return float(loss.detach()), logprobs.grad.tolist()


def test_worked_example_of_two_episodes() -> None:
    """Rewards 1 and 0: A = 1/2, -1/2. T = 2, 1. w = 3, 1 and 1/3. L = -(1/2)(1/2 (3 + 1)/2 - 1/2 (1/3))."""
    groups = [group("g", [(1.0, [acted(-2.0, -2.0)]), (0.0, [acted(-2.0)])])]
    loss, gradient = loss_and_gradient(groups, [-2 + math.log(3), -2.0, -2 - math.log(3)])
    assert loss == pytest.approx(-(1 - 1 / 6) / 2, rel=1e-6)
    assert gradient == pytest.approx([-3 / 8, -1 / 8, 1 / 12], rel=1e-6)


def test_on_policy_the_gradient_is_minus_the_advantage_shared_over_the_episodes_tokens() -> None:
    groups = [group("g", [(1.0, [acted(-1.0, -3.0)]), (0.0, [acted(-2.0)])])]
    loss, gradient = loss_and_gradient(groups, [-1.0, -3.0, -2.0])
    assert loss == 0.0
    assert gradient == [-1 / 8, -1 / 8, 1 / 4]


@pytest.mark.parametrize("log_ratio", [5.0, 40.0, -40.0, 80.0])
def test_a_large_ratio_is_neither_clipped_nor_clamped(log_ratio: float) -> None:
    groups = [group("g", [(1.0, [acted(-90.0)]), (0.0, [acted(-90.0)])])]
    _, gradient = loss_and_gradient(groups, [-90 + log_ratio, -90.0])
    assert gradient[0] == pytest.approx(-math.exp(log_ratio) / 4, rel=1e-5)


def test_without_importance_sampling_every_weight_is_one_and_the_gradient_is_that_of_log_pi() -> None:
    groups = [group("g", [(1.0, [acted(-9.0)]), (0.0, [acted(-1.0)])])]
    loss, gradient = loss_and_gradient(groups, [-2.0, -4.0], importance_sampling=False)
    assert loss == 0.0
    assert gradient == [-1 / 4, 1 / 4]


def test_ratios_are_float32_however_they_come() -> None:
    assert (
        ratios(torch.zeros(1, dtype=torch.float64), torch.zeros(1, dtype=torch.float64)).dtype
        == torch.float32
    )


def test_an_episode_counts_once_however_many_segments_it_has() -> None:
    whole = [group("g", [(1.0, [acted(-1.0, -1.0, -1.0, -1.0)]), (0.0, [acted(-1.0)])])]
    split = [group("g", [(1.0, [acted(-1.0, -1.0, -1.0), acted(-1.0)]), (0.0, [acted(-1.0)])])]
    log_pi = [-0.5, -1.5, -2.5, -0.25, -1.0]
    assert loss_and_gradient(whole, log_pi) == loss_and_gradient(split, log_pi)


def test_a_masked_episode_changes_neither_the_loss_nor_its_groups_mean() -> None:
    kept = [(1.0, [acted(-1.0, -1.0)]), (0.0, [acted(-1.0)])]
    with_masked = group("g", [*kept, (0.0, [acted(-1.0, -1.0)])], masked=[2])
    log_pi = [-0.5, -1.5, -2.5]
    assert loss_and_gradient([with_masked], log_pi) == loss_and_gradient([group("g", kept)], log_pi)


def test_an_episode_without_an_action_is_in_the_mean_but_not_in_the_number_of_responses() -> None:
    silent = tokens([False], [math.nan])
    groups = [group("g", [(1.0, [acted(-1.0)]), (0.0, [silent])])]
    assert Batch.of(groups).responses == 1
    assert loss_and_gradient(groups, [-1.0])[1] == [-0.5]


def test_micro_batches_sum_to_the_batch() -> None:
    batch = Batch.of(ragged_groups())
    log_pi = torch.linspace(-5, -1, len(batch), requires_grad=True)
    mu, coefficients = torch.tensor(batch.behaviour_logprobs), torch.tensor(batch.coefficients)
    whole = torch.autograd.grad(policy_loss(log_pi, mu, coefficients), log_pi)[0]
    cuts = [slice(start, start + 7) for start in range(0, len(batch), 7)]
    parts = [torch.autograd.grad(policy_loss(log_pi[c], mu[c], coefficients[c]), log_pi)[0] for c in cuts]
    assert torch.equal(torch.stack(parts).sum(0), whole)


def test_token_counts_are_the_episodes_own_not_the_micro_batchs() -> None:
    """Three tokens of weight 2 where A = 1, one of weight 10 where A = -1: L = -(2 - 10) / 2."""
    groups = [group("g", [(1.0, [acted(-9.0, -9.0, -9.0)]), (-1.0, [acted(-9.0)])])]
    two, ten = -9 + math.log(2), -9 + math.log(10)
    assert loss_and_gradient(groups, [two] * 3 + [ten])[0] == pytest.approx(-(2 - 10) / 2, rel=1e-5)


@settings(deadline=None)
@given(seed=st.integers(0, 999), spread=st.floats(0, 8))
def test_loss_and_gradient_agree_with_a_float64_formula(seed: int, spread: float) -> None:
    groups = ragged_groups(seed)
    batch = Batch.of(groups)
    log_pi = np.random.default_rng(seed).normal(batch.behaviour_logprobs, spread).astype(np.float32)
    loss, gradient = loss_and_gradient(groups, log_pi.tolist())
    episodes, advantage = unmasked(groups), advantages(groups)
    expected, at = 0.0, 0
    slopes: list[float] = []
    for episode in episodes:
        for held in episode.segments:
            mu = held.behaviour_logprobs[held.action_mask].astype(np.float64)
            w = np.exp(log_pi[at : at + len(mu)].astype(np.float64) - mu)
            terms = -advantage[episode.episode_id] * w / (len(episodes) * episode.num_actions)
            expected, slopes, at = expected + terms.sum(), [*slopes, *terms], at + len(mu)
    scale = np.abs(slopes).sum() + 1e-12
    assert abs(loss - expected) < 1e-5 * scale
    np.testing.assert_allclose(gradient, slopes, rtol=2e-5, atol=1e-12)


@pytest.mark.parametrize(
    ("log_pi", "what"), [(math.nan, "log pi = nan"), (math.inf, "log pi = inf"), (-math.inf, "log pi = -inf")]
)
def test_a_log_probability_that_is_not_finite_stops_the_run_and_names_its_token(
    log_pi: float, what: str
) -> None:
    rng = np.random.default_rng(0)
    batch = Batch.of(
        [group("g", [(1.0, [segment(rng, [(2, 2)]), segment(rng, [(3, 2), (1, 2)])]), (0.0, [])])]
    )
    logprobs = torch.full((len(batch),), -3.0)
    logprobs[4] = log_pi
    with pytest.raises(NonFinite, match=rf"episode g\.0, segment 1, turn 1, token 6: {what}"):
        require_finite(logprobs, torch.tensor(batch.behaviour_logprobs), batch.locate)


def test_a_log_gap_of_a_thousand_is_flagged_not_flattened() -> None:
    batch = Batch.of([group("g", [(1.0, [acted(-1001.0)]), (0.0, [acted(-1.0)])])])
    with pytest.raises(NonFinite, match="ratio = inf"):
        require_finite(torch.tensor([-1.0, -1.0]), torch.tensor(batch.behaviour_logprobs), batch.locate)


@pytest.mark.parametrize(
    ("log_ratios", "advantage", "remedy"),
    [
        ([0.1, 0.3], 5e29, "Bound the environment's rewards"),
        ([0.1, 0.3], -5e29, "Bound the environment's rewards"),
        ([80.0, 0.3], 5e5, "Lower the learning rate or max_lag"),
        ([80.0, 0.3], 0.0, "Lower the learning rate or max_lag"),
    ],
)
def test_an_overflow_is_blamed_on_the_larger_of_advantage_and_ratio(
    log_ratios: list[float], advantage: float, remedy: str
) -> None:
    said = cause_of_overflow(torch.tensor(log_ratios), ("g.1", advantage))
    assert said.startswith(f"the largest advantage is {advantage:g}, of episode g.1, the largest ratio ")
    assert said.endswith(f"{remedy}.")


@pytest.mark.parametrize("reward", [1e39, -1e308, 1.7e308])
def test_an_advantage_that_float32_cannot_hold_is_refused_by_episode_and_reward(reward: float) -> None:
    groups = [group("g", [(0.0, [acted(-1.0)]), (reward, [acted(-1.0)]), (reward, [acted(-1.0)])])]
    with pytest.raises(NonFinite, match=r"episode g\.0: its reward of 0 .* Bound the environment's rewards"):
        Batch.of(groups)


def test_a_ratio_that_underflows_to_zero_is_finite_and_allowed() -> None:
    require_finite(torch.tensor([-1000.0]), torch.tensor([-1.0]), str)


def test_an_action_with_nothing_before_it_is_refused() -> None:
    first = tokens([True], [-1.0])
    with pytest.raises(ValueError, match=r"episode g\.0, segment 0: token 0 is an action"):
        Batch.of([group("g", [(1.0, [first])])])


def test_an_empty_batch_has_no_tokens_and_no_responses() -> None:
    rng = np.random.default_rng(0)
    batch = Batch.of([group("g", [(0.0, [segment(rng, [(1, 1)])])], masked=[0])])
    assert (len(batch), batch.responses, batch.pieces) == (0, 0, ())
