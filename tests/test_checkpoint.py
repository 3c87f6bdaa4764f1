"""A checkpoint continues bit for bit, is complete or absent, and says what it does not fit."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from rz_agent.errors import ConfigError
from rz_agent.learner.learner import Learner
from rz_agent.learner.learner_config import LearnerConfig
from tiny_learner import build_model, ragged_groups


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    build_model(path)
    return path


def learner(folder: Path, **options: Any) -> Learner:
    settings = {"lr": 1e-3, "weight_decay": 0.1, "clip_grad": 1.0, "micro_batch_tokens": 48, **options}
    return Learner(folder, LearnerConfig(**settings))


def same_bits(one: Learner, other: Learner) -> bool:
    theirs = other.weights()
    return all(torch.equal(weight, theirs[name]) for name, weight in one.weights().items())


@pytest.mark.parametrize(
    "options",
    [
        {"kernels": "aligned", "schedule": "cosine", "decay_updates": 9, "warmup_updates": 2},
        {"kernels": "standard", "dtype": "bfloat16"},
    ],
)
def test_train_save_load_train_equals_training_through(
    folder: Path, tmp_path: Path, options: dict[str, Any]
) -> None:
    through = learner(folder, **options)
    for update in range(3):
        through.train(ragged_groups(update))
    through.save(tmp_path / "at-3")
    resumed = learner(folder, **options)
    resumed.load(tmp_path / "at-3")
    assert resumed.version == 3
    for update in range(3, 6):
        a, b = through.train(ragged_groups(update)), resumed.train(ragged_groups(update))
        del a["time/train_s"], b["time/train_s"]
        assert a == b
    assert same_bits(through, resumed)


def test_a_checkpoint_before_the_first_update_loads(folder: Path, tmp_path: Path) -> None:
    fresh, resumed = learner(folder, kernels="standard"), learner(folder, kernels="standard")
    fresh.save(tmp_path / "at-0")
    resumed.load(tmp_path / "at-0")
    for held in (fresh, resumed):
        held.train(ragged_groups())
    assert same_bits(fresh, resumed)


def test_loading_replaces_what_was_trained_since(folder: Path, tmp_path: Path) -> None:
    held, through = learner(folder), learner(folder)
    held.train(ragged_groups())
    held.save(tmp_path / "at-1")
    held.train(ragged_groups(5))
    held.load(tmp_path / "at-1")
    through.train(ragged_groups())
    assert (held.version, same_bits(held, through)) == (1, True)


def test_saving_again_replaces_the_checkpoint(folder: Path, tmp_path: Path) -> None:
    held, other = learner(folder, kernels="standard"), learner(folder, kernels="standard")
    held.save(tmp_path / "last")
    held.train(ragged_groups())
    held.save(tmp_path / "last")
    other.load(tmp_path / "last")
    assert (other.version, [p.name for p in tmp_path.iterdir()]) == (1, ["last"])


def test_a_save_of_a_small_model_takes_no_process_and_little_time(folder: Path, tmp_path: Path) -> None:
    held = learner(folder, kernels="standard")
    started = time.process_time()
    held.save(tmp_path / "timed")
    assert time.process_time() - started < 2


def test_a_checkpoint_of_another_model_is_refused(folder: Path, tmp_path: Path) -> None:
    build_model(tmp_path / "deeper", layers=3)
    learner(folder, kernels="standard").save(tmp_path / "shallow")
    with pytest.raises(ConfigError, match="architecture"):
        learner(tmp_path / "deeper", kernels="standard").load(tmp_path / "shallow")


def test_other_kernels_may_take_the_weights_but_not_call_it_exact(folder: Path, tmp_path: Path) -> None:
    standard, aligned = learner(folder, kernels="standard"), learner(folder)
    standard.train(ragged_groups())
    standard.save(tmp_path / "standard")
    with pytest.raises(ConfigError, match="contract"):
        aligned.load(tmp_path / "standard")
    assert aligned.version == 0
    aligned.load(tmp_path / "standard", exact=False)
    assert (aligned.version, same_bits(standard, aligned)) == (1, True)


def test_a_folder_that_is_no_checkpoint_is_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not a complete checkpoint"):
        learner(folder, kernels="standard").load(tmp_path)


def test_a_save_killed_between_its_renames_leaves_the_old_checkpoint(folder: Path, tmp_path: Path) -> None:
    held, other = learner(folder, kernels="standard"), learner(folder, kernels="standard")
    held.save(tmp_path / "last")
    (tmp_path / "last").rename(tmp_path / ".last.replaced")
    other.load(tmp_path / "last")
    assert same_bits(held, other)


SAVES_FOREVER = """
import sys
from pathlib import Path
from tiny_learner import ragged_groups
from rz_agent.learner.learner import Learner
from rz_agent.learner.learner_config import LearnerConfig

held = Learner(sys.argv[1], LearnerConfig(kernels="standard", lr=1e-3))
while True:
    held.train(ragged_groups(held.version))
    held.save(Path(sys.argv[2]) / "last")
    print(held.version, flush=True)
"""


@pytest.mark.parametrize(
    "delay", [0.11, pytest.param(0.03, marks=pytest.mark.slow), pytest.param(0.29, marks=pytest.mark.slow)]
)
def test_a_kill_at_any_moment_leaves_a_checkpoint_that_loads(
    folder: Path, tmp_path: Path, delay: float
) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", "-c", SAVES_FOREVER, str(folder), str(tmp_path)]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        version = int(process.stdout.readline())
        time.sleep(delay)
        process.send_signal(signal.SIGKILL)
    resumed = learner(folder, kernels="standard")
    resumed.load(tmp_path / "last")
    assert resumed.version >= version
