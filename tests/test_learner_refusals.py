"""What a learner refuses: numbers that are not finite, before and after its step; tokens of the future."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rz_agent.errors import NonFinite
from rz_agent.learner.diagnostics import FutureToken
from rz_agent.learner.learner import Learner
from rz_agent.learner.learner_config import LearnerConfig
from test_learner import Make, same_bits
from tiny_learner import build_model, group, ragged_groups, segment


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tied random Qwen3."""
    path = tmp_path_factory.mktemp("qwen3")
    build_model(path)
    return path


@pytest.fixture
def make(folder: Path) -> Make:
    def build(**options: Any) -> Learner:
        return Learner(folder, LearnerConfig(**{"lr": 1e-3, "micro_batch_tokens": 48, **options}))

    return build


def test_a_ratio_that_is_not_finite_updates_nothing(make: Make) -> None:
    learner, untouched = make(), make()
    rng = np.random.default_rng(0)
    far = segment(rng, [(2, 3)], logprobs=np.full(5, -200.0, np.float32))
    bad = group("bad", [(1.0, [segment(rng, [(2, 3)])]), (0.0, [far])])
    with pytest.raises(NonFinite, match=r"episode bad\.1, segment 0, turn 0, token 2: .*ratio = inf"):
        learner.train([bad])
    assert learner.version == 0
    assert same_bits(learner.weights(), untouched.weights())
    learner.train(ragged_groups())
    untouched.train(ragged_groups())
    assert same_bits(learner.weights(), untouched.weights()), "no gradient of the bad batch is left behind"


def test_a_loss_that_overflows_updates_nothing_and_is_blamed_on_the_ratio(make: Make) -> None:
    """Every ratio is finite, their weighted sum is not."""
    learner = make(kernels="standard")
    before = learner.weights()
    rng = np.random.default_rng(0)
    scored = learner.score([segment(np.random.default_rng(0), [(2, 3)])])[0]
    far = segment(rng, [(2, 3)], logprobs=np.where(np.isnan(scored), np.nan, scored - 88).astype(np.float32))
    with pytest.raises(NonFinite, match=r"the loss is -inf .* ratio 2\.34e\+38\. Lower the learning rate"):
        learner.train([group("bad", [(1e6, [far]), (0.0, [segment(rng, [(2, 3)])])])])
    assert (learner.version, same_bits(before, learner.weights())) == (0, True)


def test_a_reward_that_overflows_the_gradient_is_blamed_and_not_the_learning_rate(make: Make) -> None:
    learner = make(kernels="standard", clip_grad=1.0)
    before = learner.weights()
    rng = np.random.default_rng(0)
    episodes = [(1e30, [segment(rng, [(3, 4)])]), (0.0, [segment(rng, [(3, 4)])])]
    with pytest.raises(NonFinite, match=r"advantage is .*5e\+29, of episode bad\.1, .*Bound the .* rewards"):
        learner.train([group("bad", episodes)])
    assert (learner.version, same_bits(before, learner.weights())) == (0, True)


def test_a_step_that_leaves_a_weight_not_finite_names_it_and_is_no_version(folder: Path) -> None:
    config = LearnerConfig(kernels="standard")
    learner = Learner(folder, config.model_copy(update={"lr": math.inf}))  # which the schema refuses
    with pytest.raises(NonFinite, match=r"left model\.embed_tokens\.weight not finite.* Lower learner\.lr"):
        learner.train(ragged_groups())
    assert learner.version == 0


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_the_first_parameter_that_is_not_finite_is_named_as_the_checkpoint_does(
    make: Make, number: float
) -> None:
    learner = make(kernels="standard")
    assert learner.model.first_not_finite() is None
    weights = learner.weights()
    weights["model.norm.weight"][3] = number
    weights["model.layers.1.self_attn.k_proj.weight"][2, 5] = number
    with learner.model.holding(weights):
        named = learner.model.first_not_finite()
    assert named is not None
    assert "model.layers.1.self_attn.k_proj.weight" in named.split(" + ")
    assert learner.model.first_not_finite() is None


def test_a_token_from_a_later_version_is_refused(make: Make) -> None:
    learner = make(kernels="standard")
    with pytest.raises(FutureToken):
        learner.train(ragged_groups(version=1))
    assert learner.version == 0
