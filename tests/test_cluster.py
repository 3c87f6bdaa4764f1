"""`runtime = "ray"`, on a cluster of this machine: real actors, real engines, a real learner."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
from conftest import recipe_of
from hypothesis import given, settings
from hypothesis import strategies as st
from rz_agent.errors import ConfigError
from rz_agent.learner.ranks import RankFailed
from rz_agent.recipes.cluster import (
    Cluster,
    RayEngine,
    connected,
    engine_pool,
    learner_ranks,
    share,
)
from rz_agent.recipes.cluster_learner import RayLearner
from rz_agent.recipes.metrics_writer import read_metrics
from rz_agent.recipes.node_files import DamagedFolder, NodeFiles, files_of, folder_digest
from rz_agent.recipes.recipe import Recipe
from test_train import INPROCESS, checksums, groups_of, lasting, run
from tiny_engine import PLAIN, EngineHarness
from tiny_learner import build_model, ragged_groups
from tiny_qwen import TIED

Tables = dict[str, Any]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """Connected as a driver on none of the nodes: whatever an actor needs must be sent to it."""
    with connected(Recipe(runtime="ray")) as found:
        found.here = None
        yield found


# --- files for other nodes --------------------------------------------------------------------------------


@settings(max_examples=25, deadline=None)
@given(files=st.dictionaries(st.sampled_from(["a", "b.bin", "sub/c"]), st.binary(max_size=64), min_size=1))
def test_a_folder_arrives_whole_under_the_name_of_its_content(
    tmp_path_factory: pytest.TempPathFactory, files: dict[str, bytes]
) -> None:
    source, cache = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("cache")
    for name, content in files.items():
        (source / name).parent.mkdir(exist_ok=True)
        (source / name).write_bytes(content)
    digest, node = folder_digest(source), NodeFiles(cache)
    assert node.find(digest) is None
    for name in files_of(source):
        node.receive(name, np.fromfile(source / name, np.uint8))
    assert node.complete(digest) == NodeFiles(cache).find(digest)
    assert {n: (cache / digest / n).read_bytes() for n in files_of(cache / digest)} == files
    assert [path.name for path in cache.iterdir()] == [digest]


def test_a_folder_that_arrives_damaged_is_refused_and_leaves_nothing(
    tmp_path: Path,
) -> None:
    node = NodeFiles(tmp_path)
    node.receive("model.safetensors", np.arange(9, dtype=np.uint8))
    with pytest.raises(DamagedFolder, match="send it again"):
        node.complete("0" * 32)
    assert list(tmp_path.iterdir()) == []


# --- engines ----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_killed_engine_is_replaced_and_no_token_of_any_differs(cluster: Cluster) -> None:
    """Model and weights are sent through the object store; the engine is killed in the middle of requests."""
    harness = EngineHarness(TIED, "aligned")
    pool = engine_pool(cluster, harness.config, replicas=2)
    harness.engine = pool
    prompts = harness.prompts(*range(20, 32), seed=2)

    async def go() -> None:
        await pool.start()
        manifest = harness.manifest(seed=1)
        await pool.update(manifest)
        assert [await engine.checksums() for engine in pool.engines] == [dict(manifest.checksums)] * 2
        killed = pool.engines[0]
        assert isinstance(killed, RayEngine)
        process = await killed.process_id()
        sampling = asyncio.create_task(harness.sample(prompts, max_tokens=120))
        while not all(seat.load for seat in pool._seats):  # noqa: ASYNC110  the pool tells nobody its load
            await asyncio.sleep(0.001)
        os.kill(process, signal.SIGKILL)
        completions = await sampling
        assert harness.differing(prompts, completions) == (0, 120 * len(prompts))
        assert min(c.versions.min() for c in completions) >= 1
        newest = harness.manifest(seed=3)
        await pool.update(newest)
        assert len(pool.engines) == 2
        assert killed not in pool.engines
        assert await pool.checksums() == dict(newest.checksums)
        again = await harness.sample(prompts, max_tokens=4)
        assert harness.differing(prompts, again) == (0, 4 * len(prompts))
        assert {int(v) for c in again for v in c.versions} == {2}
        with pytest.raises(ValueError, match="outside the vocabulary"):
            await pool.generate([10**6], PLAIN, max_tokens=1, stop_token_ids=(), seed=0)
        await pool.close()

    asyncio.run(go())


# --- the learner ------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_two_ranks_as_actors_train_save_load_and_fail_as_one(cluster: Cluster, tmp_path: Path) -> None:
    recipe = recipe_of({"runtime": "ray", "ray": {"learner_replicas": 2}, "learner": {"lr": 1e-3}})
    assert learner_ranks(recipe) == 2
    build_model(tmp_path / "model")
    learner = RayLearner(cluster, tmp_path / "model", recipe.learner_config(), 2, tmp_path)
    groups = ragged_groups()
    segments = [held for group in groups for episode in group for held in episode.segments]
    figures = learner.train(groups)
    assert (figures["update"], learner.version) == (1.0, 1)
    made, scores = learner.weights(), learner.score(segments)
    learner.save(tmp_path / "checkpoint")
    learner.train(ragged_groups(1))
    for before, other in zip(scores, learner.score(segments, made), strict=True):
        assert np.array_equal(before, other, equal_nan=True)
    learner.load(tmp_path / "checkpoint")
    assert learner.version == 1
    assert all(bool((learner.weights()[name] == made[name]).all()) for name in made)
    with pytest.raises(ConfigError, match="not a complete checkpoint"):
        learner.load(tmp_path / "none")
    assert learner.version == 1
    ray.kill(learner._ranks[1])
    with pytest.raises(RankFailed, match="rank 1 of the learner failed alone in weights"):
        learner.weights()
    with pytest.raises(RankFailed):
        learner.train(groups)


# --- a whole run ------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_at_lag_0_a_run_on_ray_equals_the_local_run_bit_for_bit(
    small: Tables, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The engine's actor takes the weights from the memory of the learner's."""
    changes: dict[str, Any] = {"updates": 2, "lag.max_lag": 0, "env.id": "length_env:LengthEnv"}
    here, ray_run = tmp_path / "local", tmp_path / "ray"
    run(recipe_of(small, **changes, **INPROCESS), here)
    summary = run(recipe_of(small, runtime="ray", **changes), ray_run)
    assert (summary.reason, summary.exit_code) == ("done", 0)
    assert "from its file" not in capsys.readouterr().err
    actions = sum(t.num_actions for _, group in groups_of(ray_run) for t in group.kept)
    assert summary.figures["audit"] == {"tokens": actions, "differing": 0, "max_abs_diff": 0.0}
    assert actions > 0
    assert checksums(ray_run) == checksums(here)
    for mine, theirs in zip(read_metrics(ray_run), read_metrics(here), strict=True):
        assert lasting(mine) == lasting(theirs)
        assert mine["grad_norm"] > 0
    assert (ray_run / "checkpoints" / "000002").is_dir()


# --- configuration ----------------------------------------------------------------------------------------


def test_a_connection_of_the_caller_is_used_and_kept(cluster: Cluster) -> None:
    with connected(Recipe(runtime="ray")):
        pass
    assert ray.is_initialized()


def test_ray_does_not_take_over_the_signal_that_asks_a_run_to_end(cluster: Cluster) -> None:
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


@given(actors=st.integers(1, 200), gpus=st.integers(0, 16), cpus=st.integers(1, 300))
def test_every_actor_finds_a_place(actors: int, gpus: int, cpus: int) -> None:
    found = share(actors, {"CPU": float(cpus), "GPU": float(gpus)})
    part, devices = (found["num_gpus"], gpus) if gpus else (found["num_cpus"], cpus)
    assert 0 < part <= 1
    assert devices * int(1 / part + 1e-9) >= actors
