"""Two ranks under torchrun are one learner: the same run, and no rank left waiting when another fails."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import recipe_of
from rz_agent.errors import ConfigError
from rz_agent.learner.learner import Learner
from rz_agent.learner.learner_config import LearnerConfig
from rz_agent.recipes.learner_side import check_launcher
from rz_agent.recipes.metrics_writer import read_metrics
from rz_agent.recipes.recipe import Recipe
from test_train import INPROCESS, groups_of, lasting, run
from tiny_learner import build_model, ragged_groups

Tables = dict[str, Any]
SCRIPT = Path(__file__).with_name("ranked_learner.py")
SPLITS: dict[str, dict[str, Any]] = {"data": {}, "tensor": {"learner.tensor_parallel": 2}}
# Replicas add whole gradients in another order; a split layer also adds its halves in another order.
WITHIN = {"data": 1e-6, "tensor": 1e-5}


def torchrun(*program: str, timeout: float) -> subprocess.CompletedProcess[str]:
    """The program on two ranks."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [*launch, *program], env=environment, capture_output=True, text=True, timeout=timeout
    )


# --- without a run ----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_ranks_stay_in_step_through_an_error_that_all_of_them_raise(tmp_path: Path) -> None:
    build_model(tmp_path / "model")
    done = torchrun(str(SCRIPT), str(tmp_path / "model"), str(tmp_path), "none", timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads((tmp_path / "found.json").read_text())
    alone = Learner(tmp_path / "model", LearnerConfig(lr=1e-3, micro_batch_tokens=40))
    for name, seed in (("first", 0), ("second", 1)):
        expected = alone.train(ragged_groups(seed))
        for figure in ("loss", "grad_norm", "is/d3", "update"):
            assert found[name][figure] == pytest.approx(expected[figure], rel=2e-4, abs=2e-5), figure
    assert found["bad"].startswith("episode bad.1, segment 0, turn 0, token 2:")
    before, after = found["threads"]
    assert after < before  # a thread of a group that outlives the interpreter aborts the process
    alone.load(tmp_path / "checkpoint")
    assert alone.version == 2
    assert (tmp_path / "exported" / "config.json").is_file()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("failure", "words"),
    [
        pytest.param("raise", "MemoryError: no memory left on rank 1", marks=pytest.mark.long),
        ("kill", "rank 0 of the learner lost the others in train"),
    ],
)
def test_a_rank_that_fails_alone_ends_all_of_them_and_none_waits_for_ever(
    tmp_path: Path, failure: str, words: str
) -> None:
    build_model(tmp_path / "model")
    done = torchrun(str(SCRIPT), str(tmp_path / "model"), str(tmp_path), failure, timeout=200)
    assert done.returncode != 0
    said = " ".join(path.read_text() for path in tmp_path.glob("failed-*.txt"))
    assert words in said
    assert not (tmp_path / "found.json").exists()


# --- a whole run ------------------------------------------------------------------------------------------


def launched_run(recipe: Recipe, root: Path) -> Path:
    """`rz-agent train` on two ranks; returns the run's folder."""
    source = root / f"{recipe.name}.toml"
    source.write_text(recipe.toml())
    program = ["-m", "rz_agent.cli", "train", "--recipe", str(source), "--runs", str(root / "runs")]
    done = torchrun(*program, timeout=500)
    assert done.returncode == 0, done.stderr[-4000:]
    return root / "runs" / recipe.name


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tensor", pytest.param("data", marks=pytest.mark.long)])
def test_a_run_on_two_ranks_gives_the_figures_of_one(small: Tables, tmp_path: Path, name: str) -> None:
    """At lag 0 and a small step, so that the last bits of the gradient do not change what is sampled."""
    changes = {
        "updates": 2,
        "env.id": "length_env:LengthEnv",
        "lag.max_lag": 0,
        "learner.lr": 1e-5,
    }
    one = tmp_path / "one"
    run(recipe_of(small, **changes, **INPROCESS), one)
    expected = read_metrics(one)
    actions = sum(t.num_actions for _, group in groups_of(one) for t in group.kept)
    two = launched_run(recipe_of(small, **changes, name=name, **SPLITS[name]), tmp_path)
    found = read_metrics(two)
    assert len(found) == len(expected) == 2
    for mine, theirs in zip(found, expected, strict=True):
        audited = [n for n in lasting(mine) if n.startswith("audit/")]
        assert mine["audit/tokens"] == theirs["audit/tokens"]
        assert theirs["grad_norm"] > 0
        for figure in lasting(theirs).keys() - audited:
            near = pytest.approx(theirs[figure], rel=WITHIN[name], abs=WITHIN[name])
            assert mine[figure] == near, (name, figure)
    assert sum(line["audit/tokens"] for line in found) == actions
    assert sum(line["audit/differing"] for line in found) == 0
    assert (two / "checkpoints" / "000002").is_dir()
    assert {path.name for path in (tmp_path / "runs").iterdir()} == {name}  # one folder a run, by rank 0


@pytest.mark.parametrize(
    ("changes", "key"),
    [({"runtime": "ray"}, "runtime"), ({"rollout.engine.mode": "inprocess"}, "rollout.engine.mode")],
)
def test_what_torchrun_cannot_run_is_refused(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], key: str
) -> None:
    recipe = recipe_of({}, **changes)
    check_launcher(recipe)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match=key):
        check_launcher(recipe)
