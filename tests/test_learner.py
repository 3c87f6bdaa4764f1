"""The learner on a real Megatron model: right numbers, exact bits, and updates that happen wholly or not."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rz_agent.errors import ConfigError
from rz_agent.kernels import Operations, operations
from rz_agent.learner.advantages import advantages
from rz_agent.learner.diagnostics import FutureToken, Metrics
from rz_agent.learner.learner import Learner
from rz_agent.learner.learner_config import LearnerConfig
from rz_agent.learner.megatron import model as policy_model
from rz_agent.learner.megatron.architecture import Architecture
from rz_agent.trajectory import Group, Segment, unmasked
from tiny_learner import build_model, group, ragged_groups, segment, with_logprobs

Make = Callable[..., Learner]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tied random Qwen3."""
    path = tmp_path_factory.mktemp("qwen3")
    build_model(path)
    return path


@pytest.fixture
def make(folder: Path) -> Make:
    def build(model_dir: Path = folder, **options: Any) -> Learner:
        return Learner(model_dir, LearnerConfig(**{"lr": 1e-3, "micro_batch_tokens": 48, **options}))

    return build


def every_token(seed: int = 1) -> list[Segment]:
    """Ragged segments whose every token but the first is an action."""
    rng = np.random.default_rng(seed)
    return [segment(rng, [(1, n)]) for n in (40, 3, 17, 1)]


def segments_of(groups: list[Group]) -> list[Segment]:
    return [held for episode in unmasked(groups) for held in episode.segments]


def on_policy(learner: Learner, groups: list[Group]) -> list[Group]:
    """The same tokens, as if the learner's present weights had sampled them."""
    return [
        group(
            g.group_id,
            [
                (
                    e.reward,
                    [
                        with_logprobs(s, lp)
                        for s, lp in zip(e.segments, learner.score(e.segments), strict=True)
                    ],
                )
                for e in g
            ],
        )
        for g in groups
    ]


def same_bits(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize(
    ("family", "tied"), [("qwen3", True), ("qwen3", False), ("llama", True), ("llama", False)]
)
def test_standard_kernels_agree_with_transformers(
    tmp_path: Path, make: Make, family: str, tied: bool
) -> None:
    theirs = build_model(tmp_path, family=family, tied=tied)
    held = every_token()
    for scored, one in zip(make(tmp_path, kernels="standard").score(held), held, strict=True):
        ids = torch.tensor(one.token_ids).long()
        with torch.no_grad():
            expected = theirs(ids[None]).logits[0, :-1].log_softmax(-1).gather(-1, ids[1:, None])[:, 0]
        np.testing.assert_allclose(scored[1:], expected.numpy(), atol=2e-5)


@pytest.mark.parametrize(("family", "tied"), [("qwen3", True), ("qwen3", False), ("llama", True)])
def test_weights_go_in_and_come_out_bit_for_bit(tmp_path: Path, make: Make, family: str, tied: bool) -> None:
    theirs = build_model(tmp_path / "in", family=family, tied=tied)
    learner = make(tmp_path / "in", kernels="standard")
    state = theirs.state_dict()
    if tied:
        del state["lm_head.weight"]
    assert same_bits(learner.weights(), {name: state[name] for name in learner.weights()})
    assert learner.weights().keys() == state.keys()
    learner.export(tmp_path / "out")
    assert same_bits(make(tmp_path / "out", kernels="standard").weights(), learner.weights())


def plain_logprobs(
    kernels: Operations, folder: Path, tensors: dict[str, torch.Tensor], ids: torch.Tensor
) -> Any:
    """Log-probabilities of ids[1:], written out operation by operation as the engine runs them."""
    shape = Architecture.read(folder)
    heads, groups, width = shape.heads, shape.kv_heads, shape.head_dim
    table = kernels.rotary_table(width, shape.rotary_base, shape.max_positions, torch.float32)

    def linear(x: torch.Tensor, *names: str) -> torch.Tensor:
        weight = torch.cat([tensors[name] for name in names])
        return kernels.linear(x, weight, kernels.pack(weight))

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        return kernels.rms_norm(x, tensors[name], shape.norm_eps)

    hidden, residual = tensors["model.embed_tokens.weight"][ids], None
    for index in range(shape.layers):
        at = f"model.layers.{index}."
        weight = tensors[f"{at}input_layernorm.weight"]
        if residual is None:
            residual, hidden = hidden, kernels.rms_norm(hidden, weight, shape.norm_eps)
        else:
            hidden, residual = kernels.add_rms_norm(hidden, residual, weight, shape.norm_eps)
        mixed = linear(hidden, *(f"{at}self_attn.{name}_proj.weight" for name in "qkv"))
        by_head = mixed.view(len(ids), -1, width)
        q, k, v = (p.contiguous() for p in torch.tensor_split(by_head, (heads, heads + groups), 1))
        q, k = norm(q, f"{at}self_attn.q_norm.weight"), norm(k, f"{at}self_attn.k_norm.weight")
        q, k = kernels.rotary(q, k, torch.arange(len(ids)), table)
        mixed = kernels.attention(q, k, v, (0, len(ids)), width**-0.5).reshape(len(ids), -1)
        hidden = linear(mixed, f"{at}self_attn.o_proj.weight")
        weight = tensors[f"{at}post_attention_layernorm.weight"]
        hidden, residual = kernels.add_rms_norm(hidden, residual, weight, shape.norm_eps)
        gate_up = linear(hidden, f"{at}mlp.gate_proj.weight", f"{at}mlp.up_proj.weight")
        hidden = linear(kernels.silu_and_mul(gate_up), f"{at}mlp.down_proj.weight")
    assert residual is not None
    hidden, _ = kernels.add_rms_norm(hidden, residual, tensors["model.norm.weight"], shape.norm_eps)
    logits = linear(hidden, "model.embed_tokens.weight" if shape.tied else "lm_head.weight")
    return kernels.token_logprobs(logits[:-1], ids[1:], 1.0)


@torch.no_grad()
def test_the_aligned_model_has_the_bits_of_the_operations_run_one_by_one(folder: Path, make: Make) -> None:
    learner = make()
    held = every_token()
    for scored, one in zip(learner.score(held), held, strict=True):
        ids = torch.tensor(one.token_ids).long()
        expected = plain_logprobs(learner.operations, folder, learner.weights(), ids)
        assert np.array_equal(scored[1:], expected.numpy())


def test_packing_does_not_change_a_bit_of_the_aligned_score(make: Make) -> None:
    held = every_token() + segments_of(ragged_groups())
    together, small = make(micro_batch_tokens=4096), make(micro_batch_tokens=1)
    for a, b in zip(together.score(held), small.score(held), strict=True):
        assert np.array_equal(a, b, equal_nan=True)


def test_scores_are_nan_off_action_and_at_the_segments_temperature(make: Make) -> None:
    rng = np.random.default_rng(3)
    cold = segment(rng, [(4, 5), (2, 3)], temperature=0.5)
    warm = segment(np.random.default_rng(3), [(4, 5), (2, 3)], temperature=1.0)
    a, b = make(kernels="standard").score([cold, warm])
    assert np.array_equal(np.isnan(a), ~cold.action_mask)
    assert not np.allclose(a[cold.action_mask], b[cold.action_mask])


def test_nothing_to_score_scores_to_nothing(make: Make) -> None:
    assert make(kernels="standard").score([]) == []


def test_logits_in_chunks_give_the_same_scores_and_gradients(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, chunked = make(), make()
    groups = ragged_groups()
    first = whole.train(groups)
    monkeypatch.setattr(policy_model, "LOGIT_ROWS", 5)
    second = chunked.train(groups)
    assert first["loss"] == second["loss"]
    assert second["grad_norm"] == pytest.approx(first["grad_norm"], rel=1e-5)


def gradient_by_float64_autograd(theirs: Any, groups: list[Group]) -> dict[str, torch.Tensor]:
    """Of the same loss, with transformers' float64 model and the formula written out per episode."""
    model, episodes, advantage = theirs.double(), unmasked(groups), advantages(groups)
    model.zero_grad()
    for episode in episodes:
        for held in episode.segments:
            ids, mask = torch.tensor(held.token_ids).long(), torch.tensor(held.action_mask)
            logits = model(ids[None]).logits[0, :-1] / held.sampling.temperature
            log_pi = logits.log_softmax(-1).gather(-1, ids[1:, None])[:, 0][mask[1:]]
            w = torch.exp(log_pi - torch.tensor(held.behaviour_logprobs).double()[mask])
            loss = -advantage[episode.episode_id] * w.sum() / (len(episodes) * episode.num_actions)
            loss.backward()  # type: ignore[no-untyped-call]
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("kernels", ["aligned", "standard"])
@pytest.mark.parametrize(("family", "tied"), [("qwen3", True), ("qwen3", False), ("llama", True)])
def test_gradients_agree_with_float64_autograd_over_ragged_micro_batches(
    tmp_path: Path, make: Make, kernels: str, family: str, tied: bool
) -> None:
    expected = gradient_by_float64_autograd(build_model(tmp_path, family=family, tied=tied), ragged_groups())
    learner = make(tmp_path, kernels=kernels)
    metrics = learner.train(ragged_groups())
    found = learner.model.gradients()
    assert found.keys() == expected.keys()
    for name, gradient in found.items():
        scale = float(expected[name].norm())
        assert float((gradient.double() - expected[name]).norm()) < 2e-5 * scale, name
    norm = math.sqrt(sum(float(g.square().sum()) for g in expected.values()))
    assert metrics["grad_norm"] == pytest.approx(norm, rel=1e-5)


def tokens_counted(figures: Metrics) -> int:
    histogram = figures["lag/hist"]
    assert isinstance(histogram, list)
    return sum(histogram)


def test_episodes_with_advantage_zero_add_figures_but_no_gradient(make: Make) -> None:
    rng = np.random.default_rng(5)
    equal = group("c", [(1.0, [segment(rng, [(4, 9)])]), (1.0, [segment(rng, [(2, 30), (3, 5)])])])
    learner, alone = make(), make()
    with_equal, without = learner.train([*ragged_groups(), equal]), alone.train(ragged_groups())
    assert tokens_counted(with_equal) == tokens_counted(without) + 44
    assert with_equal["is/d3"] != without["is/d3"]
    for name, gradient in alone.model.gradients().items():
        found = learner.model.gradients()[name] * (8 / 6)  # B is 8 instead of 6
        torch.testing.assert_close(found, gradient, rtol=1e-4, atol=1e-6)


def test_a_batch_in_which_no_group_teaches_has_gradient_zero(make: Make) -> None:
    rng = np.random.default_rng(5)
    learner = make()
    before = learner.weights()
    metrics = learner.train([group("c", [(1.0, [segment(rng, [(4, 9)])]), (1.0, [segment(rng, [(2, 5)])])])])
    assert (metrics["loss"], metrics["grad_norm"]) == (0.0, 0.0)
    assert "is/d3" in metrics
    assert same_bits(before, learner.weights())


def test_the_split_into_micro_batches_does_not_change_the_update(make: Make) -> None:
    whole, split = make(micro_batch_tokens=4096), make(micro_batch_tokens=20)
    a, b = whole.train(ragged_groups()), split.train(ragged_groups())
    assert a["loss"] == b["loss"]
    assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=1e-5)


def test_layers_that_are_computed_again_give_the_same_update_bit_for_bit(make: Make) -> None:
    kept, again = make(), make(recompute=True)
    assert kept.train(ragged_groups())["grad_norm"] == again.train(ragged_groups())["grad_norm"]
    assert same_bits(kept.weights(), again.weights())


def test_layers_that_are_computed_again_keep_less(make: Make) -> None:
    def kept_for_backward(learner: Learner) -> int:
        tensors: dict[int, int] = {}

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            tensors[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            learner.train(ragged_groups())
        return sum(tensors.values())

    assert kept_for_backward(make(recompute=True)) < kept_for_backward(make())


def test_an_update_is_adamw_of_the_clipped_gradient(make: Make) -> None:
    learner = make(lr=1e-2, clip_grad=0.25, weight_decay=0.1, kernels="standard")
    shadow = {name: torch.nn.Parameter(w.double()) for name, w in learner.weights().items()}
    adamw = torch.optim.AdamW(
        [
            {"params": [p for p in shadow.values() if p.ndim > 1], "weight_decay": 0.1},
            {"params": [p for p in shadow.values() if p.ndim == 1], "weight_decay": 0.0},
        ],
        lr=1e-2,
        betas=(0.9, 0.95),
    )
    for _ in range(3):
        norm = learner.train(ragged_groups())["grad_norm"]
        assert isinstance(norm, float)
        assert norm > 0.25, "the norm is reported before clipping"
        for name, gradient in learner.model.gradients().items():
            shadow[name].grad = gradient.double()
        clipped = torch.nn.utils.clip_grad_norm_(shadow.values(), 0.25)
        assert float(clipped) == pytest.approx(0.25, rel=1e-4), "Megatron clips the gradient it holds"
        adamw.step()
    for name, weight in learner.weights().items():
        torch.testing.assert_close(weight.double(), shadow[name].data, rtol=0, atol=2e-5)


def test_on_policy_the_ratio_is_exactly_one(make: Make) -> None:
    learner = make()
    metrics = learner.train(on_policy(learner, ragged_groups()))
    assert (metrics["is/d3"], metrics["is/kl"], metrics["is/log_ratio_max"]) == (0.0, 0.0, 0.0)
    assert metrics["is/ess"] == 1.0


def test_metrics_have_the_names_of_the_design(make: Make) -> None:
    assert make(kernels="standard").train(ragged_groups()).keys() == {
        "update", "policy_version", "loss", "grad_norm", "lr", "time/train_s",
        "reward/mean", "reward/group_std", "episode/turns", "episode/masked", "episode/truncated",
        "is/d3", "is/kl", "is/ess", "is/log_ratio_max", "is/log_ratio_mean",
        "lag/mean", "lag/max", "lag/hist",
    }  # fmt: skip


def test_lag_is_counted_per_token_from_the_version_that_is_trained(make: Make) -> None:
    learner = make(kernels="standard")
    learner.train(ragged_groups(version=0))
    learner.train(ragged_groups(version=1))
    metrics = learner.train(ragged_groups(version=1))
    assert (metrics["lag/max"], metrics["lag/hist"]) == (1.0, [0, 72])


def test_the_same_batch_on_the_same_state_gives_the_same_bits(make: Make) -> None:
    one, other = make(), make()
    for _ in range(2):
        one.train(ragged_groups())
        other.train(ragged_groups())
    assert same_bits(one.weights(), other.weights())


def test_scoring_leaves_no_trace(make: Make) -> None:
    watched, plain = make(), make()
    old = watched.weights()
    for learner in (watched, plain):
        learner.train(ragged_groups())
    watched.score(every_token())
    watched.score(every_token(), old)
    for learner in (watched, plain):
        learner.train(ragged_groups())
    assert same_bits(watched.weights(), plain.weights())


def test_an_old_token_is_scored_with_the_weights_of_its_version_bit_for_bit(make: Make) -> None:
    learner = make()
    held, old = every_token(), learner.weights()
    recorded = learner.score(held)
    learner.train(ragged_groups())
    now, then, again = learner.score(held), learner.score(held, old), learner.score(held)
    assert all(np.array_equal(a, b, equal_nan=True) for a, b in zip(recorded, then, strict=True))
    assert all(np.array_equal(a, b, equal_nan=True) for a, b in zip(now, again, strict=True))
    assert not np.array_equal(recorded[0], now[0], equal_nan=True)


def test_a_batch_without_an_action_advances_the_version_and_moves_no_weight(make: Make) -> None:
    learner = make(kernels="standard", weight_decay=0.1)
    before = learner.weights()
    rng = np.random.default_rng(0)
    metrics = learner.train([group("g", [(0.0, [segment(rng, [(1, 2)])])], masked=[0])])
    assert learner.version == 1
    assert same_bits(before, learner.weights())
    assert not {"loss", "grad_norm", "is/d3", "reward/mean"} & metrics.keys()


def test_a_masked_episode_changes_no_bit_of_the_update(make: Make) -> None:
    with_masked, without = make(), make()
    kept = ragged_groups()
    episodes = [(e.reward, e.segments) for e in kept[0]]
    rng = np.random.default_rng(9)
    extended = group("a", [*episodes, (0.0, [segment(rng, [(3, 9)])])], masked=[3])
    without.train(kept)
    with_masked.train([extended, kept[1]])
    assert same_bits(with_masked.weights(), without.weights())


def test_without_importance_sampling_behaviour_logprobs_do_not_matter(make: Make) -> None:
    one, other = make(importance_sampling=False), make(importance_sampling=False)
    groups = ragged_groups()
    one.train(groups)
    other.train(on_policy(other, groups))
    assert same_bits(one.weights(), other.weights())


def test_bfloat16_weights_move_by_steps_too_small_for_bfloat16(make: Make) -> None:
    """float32 masters: steps that each round to nothing must add up."""
    learner = make(dtype="bfloat16", kernels="standard", lr=1e-4)
    before = learner.weights()
    assert {w.dtype for w in before.values()} == {torch.bfloat16}
    for _ in range(5):
        learner.train(ragged_groups())
    norm = "model.norm.weight"
    after_few = (learner.weights()[norm] != before[norm]).float().mean()
    for _ in range(15):
        learner.train(ragged_groups())
    after_many = (learner.weights()[norm] != before[norm]).float().mean()
    assert after_few < after_many


@pytest.mark.parametrize(
    ("options", "rates"),
    [
        ({"schedule": "constant"}, [1, 1, 1, 1]),
        ({"schedule": "constant", "warmup_updates": 2}, [0.5, 1, 1, 1]),
        ({"schedule": "linear", "decay_updates": 4, "min_lr": 0.0}, [0.75, 0.5, 0.25, 0]),
        ({"schedule": "cosine", "decay_updates": 4, "warmup_updates": 2, "min_lr": 0.5}, [0.5, 1, 0.75, 0.5]),
    ],
)
def test_the_learning_rate_follows_its_schedule(
    make: Make, options: dict[str, Any], rates: list[float]
) -> None:
    learner = make(lr=1.0, kernels="standard", **options)
    assert [learner.optimizer.rate(update) for update in range(4)] == pytest.approx(rates)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"schedule": "cosine"}, r"learner\.decay_updates = None but schedule = 'cosine'"),
        ({"lr": 1e-6, "min_lr": 1e-5}, r"learner\.min_lr = 1e-05 is above lr"),
        ({"warmup_updates": 9, "decay_updates": 9}, r"learner\.decay_updates = 9 ends within the warm-up"),
    ],
)
def test_an_impossible_schedule_is_refused_where_it_is_written(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LearnerConfig(**options)


def test_a_model_that_would_be_computed_wrongly_is_refused_by_name(tmp_path: Path, make: Make) -> None:
    build_model(tmp_path)
    config = tmp_path / "config.json"
    config.write_text(config.read_text().replace('"attention_bias": false', '"attention_bias": true'))
    with pytest.raises(ConfigError, match=r"config\.json: attention_bias = True is not implemented"):
        make(tmp_path, kernels="standard")


def test_operations_other_than_the_named_ones_are_refused(folder: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"learner\.kernels = 'aligned' but the operations given are 'standard'"
    ):
        Learner(folder, LearnerConfig(kernels="aligned"), operations("standard"))


def test_torch_cuda_is_itself_again_after_megatron_ran(make: Make) -> None:
    before = torch.cuda.current_device, torch.cuda.Stream, torch.cuda.synchronize
    learner = make(kernels="standard")
    with pytest.raises(FutureToken):
        learner.train(ragged_groups(version=7))
    learner.train(ragged_groups())
    assert before == (torch.cuda.current_device, torch.cuda.Stream, torch.cuda.synchronize)


def test_bfloat16_aligned_gradients_are_those_of_float64_up_to_its_rounding(folder: Path, make: Make) -> None:
    from transformers import AutoModelForCausalLM

    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    expected = gradient_by_float64_autograd(theirs, ragged_groups())
    learner = make(dtype="bfloat16")
    learner.train(ragged_groups())
    for name, gradient in learner.model.gradients().items():
        similar = torch.nn.functional.cosine_similarity(
            gradient.double().flatten(), expected[name].flatten(), 0
        )
        assert similar > 0.98, name


def test_learning_raises_the_probability_of_rewarded_tokens(make: Make) -> None:
    learner = make(lr=3e-3)
    start = on_policy(learner, ragged_groups())
    best = start[0].trajectories[0].segments
    before = np.nansum(learner.score(best)[0])
    for _ in range(5):
        learner.train(start)
    assert np.nansum(learner.score(best)[0]) > before + 1
