"""The command line: exit codes, errors in words, and runs that can be listed, shown and exported."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import threading
import time
import tomllib
from pathlib import Path

import numpy as np
import pytest
import torch
from rz_agent import cli
from rz_agent.envs import ListTaskset, Task
from rz_agent.errors import ConfigError, EnvironmentBug, RunStopped
from rz_agent.recipes import doctor, evaluate, recipe_file, runs
from rz_agent.recipes.audit_run import audit_run
from rz_agent.recipes.library_output import tracebacks_go_to
from rz_agent.recipes.metrics_writer import MetricsWriter
from rz_agent.recipes.progress import LineObserver
from rz_agent.recipes.recipe import Recipe
from rz_agent.recipes.sections import EnvSection, ModelSection, TrackingSection
from rz_agent.trajectory import Segment, Trajectory
from rz_agent.weight_store import WeightStore
from typer.testing import CliRunner


def rz_agent(*arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "rz_agent.cli", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=cwd, timeout=120)


@pytest.fixture
def run(tmp_path: Path) -> runs.Run:
    """A run with three updates, figures, one version of weights and the model it began with."""
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    (model / "model.safetensors").write_bytes(b"the weights that it began with")
    (model / "tokenizer.json").write_text("[]")
    path = runs.new_run(tmp_path / "runs", "mine")
    runs.save_recipe(path, Recipe(name="mine", updates=5, model=ModelSection(path=str(model))))
    with MetricsWriter(path, TrackingSection(tensorboard=False)) as writer:
        for update in (1, 2, 3):
            audited = {"audit/tokens": 100.0, "audit/differing": 0.0, "audit/max_abs_diff": 0.0}
            writer.write(
                {"update": update, "reward/mean": update / 4, "is/d3": 0.1, "lag/max": 2.0, **audited}
            )
    WeightStore(path / "weights").put(3, {"w": torch.arange(4.0)})
    return runs.open_run(path)


def test_help_answers_at_once() -> None:
    """Under 1 s on an idle machine: no command imports for another what takes seconds."""
    start = time.monotonic()
    assert rz_agent("--help").returncode == 0
    assert time.monotonic() - start < 5
    heavy = "import sys, rz_agent.cli; print(*{'torch', 'vllm', 'pydantic', 'numpy'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", heavy], capture_output=True, text=True).stdout == "\n"


def test_a_wrong_recipe_is_said_in_words_with_exit_code_2() -> None:
    done = rz_agent("train", "--env", "python", "--set", "lag.max_lag=99", "--dry-run")
    assert done.returncode == 2
    assert "lag.max_lag = 99" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ("train", "--no-such-flag"),
        ("no-such-command",),
        ("train",),
        ("train", "--resume", "nothing"),
        ("train", "--recipe", "nothing"),
        ("runs", "show", "nothing"),
        ("doctor", "nothing"),
    ],
    ids=" ".join,
)
def test_what_cannot_be_meant_ends_with_exit_code_2(arguments: tuple[str, ...], tmp_path: Path) -> None:
    done = rz_agent(*arguments, cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.strip()
    assert "Traceback" not in done.stderr


def test_a_dry_run_prints_a_recipe_that_can_be_run_and_makes_no_folder(tmp_path: Path) -> None:
    done = rz_agent(
        "train", "--env", "python", "--set", "updates=7", "--name", "seven", "--dry-run", cwd=tmp_path
    )
    assert done.returncode == 0
    tables = tomllib.loads(done.stdout)
    assert (tables["updates"], tables["name"]) == (7, "seven")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "arguments",
    [
        ("--env", "pyton"),
        ("--env", "json:NoClass"),
        ("--env", "python", "--set", "env.options.nothing=1"),
        ("--env", "python", "--set", "model.path=/no/such/model"),
        ("--env", "python", "--set", 'sandbox.provider="no-such-provider"'),
    ],
    ids=" ".join,
)
def test_what_could_not_start_is_refused_before_there_is_a_folder(
    arguments: tuple[str, ...], tmp_path: Path
) -> None:
    done = rz_agent("train", *arguments, cwd=tmp_path)
    assert (done.returncode, "Traceback" in done.stderr) == (2, False)
    assert list(tmp_path.iterdir()) == []


def test_a_fault_of_the_sandboxes_names_the_file_that_describes_them(tmp_path: Path) -> None:
    (tmp_path / "box.toml").write_text('[sandbox]\nprovider = "no-such-provider"\n')
    with pytest.raises(ConfigError, match=r"box\.toml: sandbox\.provider"):
        cli.train(env="python", sandbox=tmp_path / "box.toml", dry_run=True)


def test_a_resumed_run_keeps_its_recipe_but_for_what_is_set(run: runs.Run, tmp_path: Path) -> None:
    done = rz_agent("train", "--resume", "mine", "--set", "updates=9", "--dry-run", cwd=tmp_path)
    tables = tomllib.loads(done.stdout)
    assert (tables["updates"], tables["model"]["path"]) == (9, run.recipe.model.path)
    refused = rz_agent("train", "--resume", "mine", "--env", "python", "--dry-run", cwd=tmp_path)
    assert refused.returncode == 2


def test_a_key_and_a_value_apart_are_refused_for_that_and_not_for_a_word_too_many() -> None:
    done = rz_agent("train", "--env", "python", "--set", "updates", "3")
    assert done.returncode == 2
    assert "'updates' is not KEY=VALUE" in done.stderr
    assert "--set updates=3" in done.stderr


def test_to_resume_a_finished_run_is_answered_with_how_to_make_more_updates(run: runs.Run) -> None:
    (run.path / "summary.json").write_text(json.dumps({"reason": "done"}))
    before = sorted(run.path.iterdir())
    done = rz_agent("train", "--resume", str(run.path), "--set", "updates=3")
    assert done.returncode == 0
    assert f"{run.path} is finished: it made its 3 updates" in done.stdout
    assert f"--resume {run.path} --set updates=6" in done.stdout
    assert sorted(run.path.iterdir()) == before


def test_a_finished_run_is_called_so_even_where_its_environment_is_gone(run: runs.Run) -> None:
    (run.path / "summary.json").write_text(json.dumps({"reason": "done"}))
    gone = ("--set", 'env.id="gone:GoneEnv"', "--set", "updates=3")
    done = rz_agent("train", "--resume", str(run.path), *gone)
    assert done.returncode == 0
    assert "is finished" in done.stdout


def test_training_from_python_refuses_what_cannot_start_before_there_is_a_folder(tmp_path: Path) -> None:
    from rz_agent.recipes.train import train

    recipe = recipe_file.for_environment("python", ["env.id='pyton'"])
    with pytest.raises(ConfigError, match="pyton"):
        train(recipe, run_dir=tmp_path / "run", resume=False, observer=LineObserver(io.StringIO(), 1))
    assert list(tmp_path.iterdir()) == []


def test_a_stopped_run_and_one_with_more_updates_to_make_are_not_finished(run: runs.Run) -> None:
    three = run.recipe.model_copy(update={"updates": 3})
    assert not cli._is_finished(run.path, three)
    (run.path / "summary.json").write_text(json.dumps({"reason": "done"}))
    assert cli._is_finished(run.path, three)
    assert not cli._is_finished(run.path, run.recipe)


def test_a_run_without_updates_has_nothing_to_audit_yet(run: runs.Run) -> None:
    with pytest.raises(ConfigError, match="there is nothing to audit yet"):
        audit_run(run.path)


def test_a_split_that_the_taskset_lacks_is_refused_before_the_model_is_looked_for() -> None:
    nowhere = ("--set", "model.path=nowhere")
    refused = CliRunner().invoke(cli.app, ["eval", "--env", "python", "--split", "dev", *nowhere]).exception
    assert isinstance(refused, ConfigError)
    assert "--split = 'dev'" in str(refused)
    assert "train, test" in str(refused)


def tasks_of(*splits: str) -> Recipe:
    """A recipe whose environment has one task in each of these splits."""
    tasks = [Task(id=split, split=split, prompt="?", answer="!") for split in splits]
    options = {"taskset": ListTaskset(tasks, name="mine")}
    return Recipe.model_construct(env=EnvSection.model_construct(id="rz/PythonMath-v0", options=options))


def test_an_evaluation_plays_the_split_asked_for_else_the_recipes_else_the_only_one() -> None:
    assert evaluate.with_split(tasks_of("train", "test"), "train").eval.split == "train"
    assert evaluate.with_split(tasks_of("train", "test"), None).eval.split == "test"
    assert evaluate.with_split(tasks_of("train"), None).eval.split == "train"
    for splits, asked in ((("train",), "test"), (("train", "dev"), None)):
        with pytest.raises(ConfigError, match="--split = 'test'") as refused:
            evaluate.with_split(tasks_of(*splits), asked)
        assert ", ".join(splits) in refused.value.remedy


@pytest.mark.slow
def test_a_model_that_is_being_built_does_not_outlive_the_first_signal(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "rz_agent.cli", "train", "--env", "python", "--set", "model.cache=cache"]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True) as training:
        assert training.stdout is not None
        for line in training.stdout:
            if "of 800 steps" in line:
                break
        training.terminate()
        said = training.stdout.read()
        assert training.wait() == 130
    assert "the tiny model's build was stopped" in said
    assert "go on with: rz-agent train --resume runs/python" in said
    assert list((tmp_path / "cache").iterdir()) == []


@pytest.mark.slow
def test_a_command_that_is_terminated_takes_its_half_made_files_with_it(tmp_path: Path) -> None:
    places = {**os.environ, "TMPDIR": str(tmp_path / "tmp")}
    (tmp_path / "tmp").mkdir()
    command = [sys.executable, "-m", "rz_agent.cli", "eval", "--env", "python", "--set", "model.cache=cache"]
    with subprocess.Popen(command, cwd=tmp_path, env=places, stderr=subprocess.PIPE, text=True) as evaluating:
        assert evaluating.stderr is not None
        for line in evaluating.stderr:
            if "of 800 steps" in line:
                break
        evaluating.terminate()
        evaluating.stderr.read()
        assert evaluating.wait() == 128 + signal.SIGTERM
    assert list((tmp_path / "cache").iterdir()) == []
    assert [path.name for path in (tmp_path / "tmp").iterdir() if path.name.startswith("rz-agent-")] == []


def test_a_new_run_never_takes_the_folder_of_another_and_says_so(tmp_path: Path) -> None:
    first, second, third = (runs.new_run(tmp_path, "mine") for _ in range(3))
    assert [path.name for path in (first, second, third)] == ["mine", "mine-2", "mine-3"]
    recipe = Recipe(name="mine")
    assert cli._taken(recipe, first, resume=False) == []
    assert cli._taken(recipe, second, resume=True) == []
    with pytest.raises(ConfigError, match=r"--name = 'mine' is taken by") as refused:
        runs.new_run(tmp_path, "mine", exact=True)
    assert f"--resume {first}" in refused.value.remedy
    [said] = cli._taken(recipe, second, resume=False)
    assert f"{first} exists, so this run is mine-2; --resume {first}" in said


def test_an_error_that_ends_a_run_leaves_its_traceback_in_the_run_and_says_how_to_go_on(
    tmp_path: Path,
) -> None:
    with (
        pytest.raises(EnvironmentBug, match="oops\\n  Go on with: rz-agent train --resume"),
        tracebacks_go_to(tmp_path),
    ):
        raise EnvironmentBug("oops")
    with pytest.raises(RunStopped, match=r"^enough$"), tracebacks_go_to(tmp_path):
        raise RunStopped("enough")
    log = (tmp_path / "libraries.log").read_text()
    assert log.count("Traceback") == 2
    assert "test_an_error_that_ends_a_run" in log


def test_runs_are_listed_and_shown(run: runs.Run, tmp_path: Path) -> None:
    listed = CliRunner().invoke(cli.app, ["runs", "list", "--runs", str(tmp_path / "runs")])
    assert "mine" in listed.stdout
    assert "update 3/5  reward 0.750" in listed.stdout
    shown = CliRunner().invoke(cli.app, ["runs", "show", "mine", "--runs", str(tmp_path / "runs")])
    assert "3 of 5" in shown.stdout
    assert "0 of 300 action tokens differ" in shown.stdout
    assert str(run.path / "summary.png") in shown.stdout
    as_json = CliRunner().invoke(cli.app, ["runs", "show", str(run.path), "--json"])
    assert json.loads(as_json.stdout)["last"]["update"] == 3


def test_an_exported_model_is_a_whole_folder_with_the_newest_weights(run: runs.Run, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    assert runs.export_model(run, tmp_path / "out") == 3
    assert {f.name for f in (tmp_path / "out").iterdir()} == {
        "config.json",
        "tokenizer.json",
        "model.safetensors",
    }
    assert torch.equal(load_file(tmp_path / "out" / "model.safetensors")["w"], torch.arange(4.0))


def test_an_exported_episode_is_valid_json_with_null_where_there_is_no_logprob() -> None:
    segment = Segment(
        token_ids=np.array([7, 8]),
        action_mask=np.array([False, True]),
        behaviour_logprobs=np.array([np.nan, -0.5]),
        policy_version=np.array([-1, 2]),
    )
    episode = Trajectory(episode_id="e", group_id="g", task_id="t", segments=(segment,), reward=1.0)
    line = json.dumps(runs._trajectory_json(4, episode), allow_nan=False)
    assert json.loads(line)["segments"][0]["behaviour_logprobs"] == [None, -0.5]


def test_the_first_interrupt_asks_and_the_handlers_are_given_back() -> None:
    stop, before = threading.Event(), signal.getsignal(signal.SIGINT)
    with cli._first_interrupt_asks(stop):
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.is_set()
    assert signal.getsignal(signal.SIGINT) is before


def test_the_second_interrupt_ends_at_once_with_130() -> None:
    code = (
        "import os, signal, threading; from rz_agent import cli\n"
        "with cli._first_interrupt_asks(threading.Event()):\n"
        "    os.kill(os.getpid(), signal.SIGINT); os.kill(os.getpid(), signal.SIGINT)\n"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 130


@pytest.mark.parametrize("check", ["packages", "gpu", "sandbox"])
def test_the_doctor_finds_this_installation_well(check: str) -> None:
    (finding,) = doctor.diagnose([check])
    assert finding.status in ("ok", "absent") if check == "gpu" else finding.status == "ok", finding


@pytest.mark.slow
@pytest.mark.parametrize("check", ["alignment", "ray"])
def test_the_doctor_finds_the_slow_parts_well(check: str) -> None:
    """The alignment needs engine and learner, and starts both."""
    (finding,) = doctor.diagnose([check])
    assert finding.status == "ok", finding


def test_the_doctor_survives_a_check_that_does_not_exist_in_its_process() -> None:
    (finding,) = doctor.diagnose(["nothing"])
    assert finding.status == "failed"
    assert finding.remedy
