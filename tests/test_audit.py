"""The audit sees one differing bit, and tells the faults that cause one apart.

A real vLLM engine samples, a real Megatron learner rescores; each test plants one fault in between.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rz_agent.errors import ConfigError
from rz_agent.kernels import operations, vllm_versions
from rz_agent.learner.audit import Audit, AuditReport, ColdScore, chosen, different_bits
from rz_agent.learner.learner import Learner
from rz_agent.learner.learner_config import LearnerConfig
from rz_agent.recipes.metrics_writer import MetricsWriter
from rz_agent.recipes.recipe_file import load
from rz_agent.recipes.runs import describe, open_run, save_recipe
from rz_agent.recipes.sections import TrackingSection
from rz_agent.recipes.summary import summarize
from rz_agent.rollout import vllm_request
from rz_agent.rollout.engine import Completion
from rz_agent.rollout.engine_config import EngineConfig
from rz_agent.rollout.segment_builder import SegmentBuilder
from rz_agent.rollout.vllm_device import contract_of
from rz_agent.rollout.vllm_inprocess import VllmInProcess
from rz_agent.trajectory import Float32, Group, Sampling, Segment, Trajectory
from rz_agent.weight_store import WeightManifest, WeightStore
from tiny_learner import VOCABULARY, build_model

Tamper = Callable[[Completion], Completion]


class Bench:
    """An engine and a learner at version 1 of a random model, and version 0 in the store."""

    def __init__(self, folder: Path) -> None:
        build_model(folder / "model")
        self.learner = Learner(folder / "model", LearnerConfig(lr=1e-3))
        self.store = WeightStore(folder / "weights")
        config = EngineConfig(model=folder / "model", mode="inprocess", max_model_len=256, kv_cache_gb=0.25)
        self.engine = VllmInProcess(config)
        self.loop = asyncio.new_event_loop()
        self.loop.run_until_complete(self.engine.start())
        self.version = 0
        self.publish()

    def publish(self) -> None:
        """Move every weight a little, and give the new version to the engine."""
        weights = self.store.load(self.version) if self.version else self.learner.weights()
        generator = torch.Generator().manual_seed(self.version)
        moved = {
            name: value + 0.05 * value.abs().mean() * torch.randn(value.shape, generator=generator)
            for name, value in weights.items()
        }
        if not self.version:
            self.store.put(0, weights)
        self.version += 1
        manifest = self.store.put(self.version, moved)
        self.loop.run_until_complete(self.engine.update(manifest))

    def sample(self, tamper: Tamper = lambda completion: completion, temperature: float = 1.0) -> Group:
        """Two two-turn episodes on one prompt of three cache blocks, as the episode loop records them."""
        sampling = Sampling(temperature=temperature)
        trajectories = []
        for index in range(2):
            builder = SegmentBuilder(sampling=sampling, contract=self.engine.contract)
            builder.context(np.arange(100) % (VOCABULARY - 2) + 2)
            for turn in range(2):
                completion = self.loop.run_until_complete(
                    self.engine.generate(
                        builder.ids.tolist(),
                        sampling,
                        max_tokens=12,
                        stop_token_ids=(),
                        seed=10 * index + turn,
                    )
                )
                builder.actions(tamper(completion))
                builder.context([5, 6, 7])
            trajectories.append(
                Trajectory(
                    episode_id=f"g-{index}",
                    group_id="g",
                    task_id="t",
                    segments=(builder.build(),),
                    reward=1.0,
                )
            )
        return Group(group_id="g", task_id="t", trajectories=tuple(trajectories))

    def audit(self, share: float = 1.0) -> Audit:
        contract = operations("aligned").contract()
        return Audit(score=self.learner.score, weights=self.store, contract=contract, share=share)

    def cause(self, group: Group) -> str:
        """What the audit says of the first difference, with a cold score of the engine."""
        first = self.audit().check([group]).differences[0]
        [trajectory] = [t for t in group if t.episode_id == first.episode_id]
        segment = trajectory.segments[first.segment]
        cold = self.loop.run_until_complete(
            self.engine.score(segment.token_ids.tolist(), temperature=segment.sampling.temperature)
        )
        return self.audit().diagnose(
            segment, first.version, ColdScore(version=self.engine.version, logprobs=cold)
        )


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    made = Bench(tmp_path_factory.mktemp("audit"))
    yield made
    made.loop.run_until_complete(made.engine.close())
    made.loop.close()


def test_every_token_of_an_honest_rollout_is_audited_and_none_differs(bench: Bench) -> None:
    for temperature in (1.0, 0.7):
        group = bench.sample(temperature=temperature)
        report = bench.audit().check([group])
        assert report.tokens == sum(t.num_actions for t in group) == 48
        assert report.differing == 0
        assert report.max_abs_diff == 0.0


def test_a_learner_that_scores_beside_a_stepping_engine_disturbs_neither(bench: Bench) -> None:
    group = bench.sample()
    segments = [segment for trajectory in group for segment in trajectory.segments]
    expected = bench.learner.score(segments, bench.store.load(bench.version))

    async def beside() -> tuple[list[Completion], list[bool]]:
        def score() -> list[bool]:
            weights = bench.store.load(bench.version)
            again = [bench.learner.score(segments, weights) for _ in range(12)]
            return [
                bool(different_bits(a, b).any())
                for found in again
                for a, b in zip(expected, found, strict=True)
            ]

        scoring = asyncio.create_task(asyncio.to_thread(score))
        rounds = []
        while not scoring.done():
            requests = (
                bench.engine.generate(
                    list(range(2, 60)), Sampling(), max_tokens=24, stop_token_ids=(), seed=seed
                )
                for seed in range(6)
            )
            rounds += await asyncio.gather(*requests)
        return rounds, await scoring

    rounds, wrong = bench.loop.run_until_complete(beside())
    assert len(rounds) >= 6
    assert not any(wrong)
    for seed in range(6):
        bits = {completion.logprobs.tobytes() for completion in rounds[seed::6]}
        assert len(bits) == 1


def test_one_flipped_bit_is_found_and_named_by_episode_turn_token_and_version(bench: Bench) -> None:
    def flip(completion: Completion) -> Completion:
        logprobs = completion.logprobs.copy()
        logprobs.view(np.uint32)[4] ^= 1
        return replace(completion, logprobs=logprobs)

    report = bench.audit().check([bench.sample(flip)])
    assert report.differing == 4
    found = report.differences[0]
    assert (found.episode_id, found.segment, found.turn, found.position) == ("g-0", 0, 0, 104)
    assert found.version == bench.version
    assert 0 < abs(found.recorded - found.recomputed) < 1e-6
    assert f"(kernels {bench.engine.contract})" in str(found)


def test_each_token_of_a_batch_is_recomputed_with_the_weights_of_its_own_version(bench: Bench) -> None:
    """Two versions within a segment, as a turn after an update leaves them, and a third beside it."""

    def publish_between_turns(completion: Completion) -> Completion:
        bench.publish()
        return completion

    oldest = bench.version
    groups = [bench.sample(publish_between_turns), bench.sample()]
    held = [segment for group in groups for t in group for segment in t.segments]
    assert [sorted({*s.policy_version.tolist()} - {-1}) for s in held[:3]] == [
        [oldest, oldest + 1],
        [oldest + 2, oldest + 3],
        [oldest + 4],
    ]
    report = bench.audit().check(groups)
    assert (report.tokens, report.differing) == (96, 0)


def test_a_wrong_bit_in_a_token_of_the_older_version_is_named_with_that_version(bench: Bench) -> None:
    def flip_and_publish(completion: Completion) -> Completion:
        logprobs = completion.logprobs.copy()
        if completion.versions[0] == oldest:
            logprobs.view(np.uint32)[4] ^= 1
        bench.publish()
        return replace(completion, logprobs=logprobs)

    oldest = bench.version
    report = bench.audit().check([bench.sample(flip_and_publish)])
    assert [(d.turn, d.position, d.version) for d in report.differences] == [(0, 104, oldest)]


def test_a_recomputed_nan_is_an_infinite_difference_and_no_figure(bench: Bench) -> None:
    """A learner whose weights broke: nothing may read as "no difference"."""
    broken = {name: value.clone() for name, value in bench.store.load(bench.version).items()}
    broken["model.norm.weight"][0] = float("nan")

    def score(segments: Sequence[Segment], weights: object) -> list[Float32]:
        return bench.learner.score(segments, broken)

    audit = Audit(score=score, weights=bench.store, contract=bench.engine.contract, share=1.0)
    report = audit.check([bench.sample()])
    assert report.tokens == report.differing == 48
    assert report.max_abs_diff == math.inf
    assert "recomputed nan" in str(report.differences[0])
    assert report.metrics() == {"audit/tokens": 48.0, "audit/differing": 48.0}


def test_a_run_with_an_infinite_difference_is_summed_up_without_a_largest_one(tmp_path: Path) -> None:
    infinite = AuditReport(tokens=5, differing=5, max_abs_diff=math.inf, differences=())
    with MetricsWriter(tmp_path, TrackingSection(tensorboard=False)) as writer:
        writer.write({"update": 1, "audit/tokens": 5.0, "audit/differing": 0.0, "audit/max_abs_diff": 0.0})
        writer.write({"update": 2, **infinite.metrics()})
    figures = summarize(tmp_path, reason="done", exit_code=0, contract="").figures
    assert figures["audit"] == {"tokens": 10, "differing": 5}
    save_recipe(tmp_path, load("python"))
    told = dict(describe(open_run(tmp_path)))
    assert told["audit"] == "5 of 10 action tokens differ, some of them by no finite amount"


def test_tokens_that_other_kernels_recorded_are_refused_and_not_compared(bench: Bench) -> None:
    group = bench.sample()
    [first, second] = group.trajectories
    foreign = replace(second, segments=(replace(second.segments[0], contract="aligned:0123456789abcdef"),))
    with pytest.raises(ConfigError) as refused:
        bench.audit().check([replace(group, trajectories=(first, foreign))])
    assert refused.value.source == "episode g-1, segment 0"
    assert refused.value.value == "aligned:0123456789abcdef"
    assert bench.engine.contract in refused.value.why
    assert "torch and vLLM that made it" in refused.value.remedy


def test_a_run_with_standard_kernels_is_measured_and_not_refused(bench: Bench) -> None:
    """Its engine is stock and its learner standard: the contracts differ by design, and so do the bits."""
    group = bench.sample()
    stock = contract_of(bench.engine.config.model_copy(update={"kernels": "standard"}))
    recorded = [replace(t, segments=tuple(replace(s, contract=stock) for s in t.segments)) for t in group]
    standard = Learner(bench.learner.model_dir, LearnerConfig(lr=1e-3, kernels="standard"))
    audit = Audit(score=standard.score, weights=bench.store, contract=standard.contract, share=1.0)
    report = audit.check([replace(group, trajectories=tuple(recorded))])
    assert 0 < report.differing <= report.tokens == 48
    assert f"kernels recorded {stock}, learner {standard.contract}" in str(report.differences[0])


def test_a_skipped_weight_update_reads_as_the_version_before(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = bench.engine._update

    def skip(manifest: WeightManifest) -> None:
        bench.engine._version = manifest.version
        vllm_versions.tag(bench.engine._engine, manifest.version)
        bench.engine._engine.reset_prefix_cache(reset_running_requests=True)

    monkeypatch.setattr(bench.engine, "_update", skip)
    bench.publish()
    group = bench.sample()
    assert f"that of version {bench.version - 1}" in bench.cause(group)
    monkeypatch.setattr(bench.engine, "_update", honest)
    bench.publish()


def test_a_wrong_temperature_is_named(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = vllm_request.sampling_params

    def cooler(config: EngineConfig, sampling: Sampling, **rest: Any) -> Any:
        return honest(config, replace(sampling, temperature=0.7), **rest)

    monkeypatch.setattr(vllm_request, "sampling_params", cooler)
    assert bench.cause(bench.sample()).startswith("temperature: the record is at 0.7, not 1.0")


def test_log_probabilities_without_the_temperature_are_named(bench: Bench) -> None:
    group = bench.sample(temperature=1.0)
    [first, second] = group.trajectories
    relabelled = [
        replace(t, segments=tuple(replace(s, sampling=Sampling(temperature=0.6)) for s in t.segments))
        for t in (first, second)
    ]
    cause = bench.cause(replace(group, trajectories=tuple(relabelled)))
    assert cause.startswith("temperature: the record is at 1.0, not 0.6")


@pytest.mark.parametrize("by", [1, -1])
def test_an_off_by_one_record_is_named_with_its_direction(bench: Bench, by: int) -> None:
    def shift(completion: Completion) -> Completion:
        return replace(completion, logprobs=np.roll(completion.logprobs, by))

    assert bench.cause(bench.sample(shift)).startswith(f"shift: each record belongs to the token {-by:+d}")


def test_a_stale_prefix_cache_is_told_from_wrong_weights(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = vllm_request.prompt
    monkeypatch.setattr(
        vllm_request,
        "prompt",
        lambda ids, images, salt: honest(ids, images, salt if salt.startswith("score") else "one salt"),
    )
    monkeypatch.setattr(bench.engine._engine, "reset_prefix_cache", lambda **_: True)
    bench.sample()
    bench.publish()
    assert bench.cause(bench.sample()).startswith("stale cache")


def test_other_kernels_are_told_from_a_stale_cache(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    group = bench.sample()
    standard = Learner(bench.learner.model_dir, LearnerConfig(lr=1e-3, kernels="standard"))
    monkeypatch.setattr(bench, "learner", standard)
    report = bench.audit().check([group])
    assert 0 < report.differing <= report.tokens
    assert report.max_abs_diff < 1e-3
    assert bench.cause(group).startswith("kernels")


def test_tokens_of_versions_that_are_not_kept_are_not_counted_as_audited(
    bench: Bench, tmp_path: Path
) -> None:
    group = bench.sample()
    elsewhere = WeightStore(tmp_path)
    elsewhere.put(0, bench.store.load(0))
    contract = bench.engine.contract
    audit = Audit(score=bench.learner.score, weights=elsewhere, contract=contract, share=1.0)
    assert audit.check([group]) == AuditReport(tokens=0, differing=0, max_abs_diff=0.0, differences=())
    assert "audit/max_abs_diff" not in audit.check([group]).metrics()


def test_the_share_picks_whole_episodes_and_the_same_ones_each_time() -> None:
    names = [f"g{n:07d}-{k}" for n in range(500) for k in range(8)]
    picked = [name for name in names if chosen(name, 0.25)]
    assert 0.2 < len(picked) / len(names) < 0.3
    assert picked == [name for name in names if chosen(name, 0.25)]
    assert all(chosen(name, 1.0) for name in names)
    assert not any(chosen(name, 0.0) for name in names)


def test_bits_are_compared_not_values() -> None:
    left = np.array([0.0, -1.0, np.nan], np.float32)
    right = np.array([-0.0, -1.0, np.nan], np.float32)
    assert different_bits(left, right).tolist() == [True, False, False]
