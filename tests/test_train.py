"""A whole run with no part replaced: vLLM, Megatron-core, the sandbox, the journal."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from conftest import recipe_of, small_tables
from rz_agent.errors import ConfigError
from rz_agent.journal import Journal
from rz_agent.recipes.audit_run import audit_run
from rz_agent.recipes.metrics_writer import read_metrics
from rz_agent.recipes.progress import LineObserver
from rz_agent.recipes.recipe import Recipe
from rz_agent.recipes.train import train
from rz_agent.trajectory import Group
from synchronous_loop import synchronous_loop

Tables = dict[str, Any]
# What an update's figures may differ in between two runs that do the same: how long it took, and
# what the engine could share, which depends on who asked first.
BY_CLOCK = ("time/", "throughput/", "idle_share", "cache/", "infra_failed", "waited_s")
# Starts in half the time; for what does not depend on where the engine runs.
INPROCESS: Tables = {"rollout.engine.mode": "inprocess"}


def run(recipe: Recipe, run_dir: Path, *, resume: bool = False) -> Any:
    """Train in this process, as `rz-agent train` does in its own."""
    return train(recipe, run_dir=run_dir, resume=resume, observer=LineObserver(sys.stderr, recipe.updates))


def lasting(figures: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in figures.items() if not any(part in name for part in BY_CLOCK)}


def trained_groups(run_dir: Path) -> list[list[str]]:
    with Journal.open(run_dir / "journal.sqlite", run=None) as journal:
        return [list(record.group_ids) for record in journal.updates()]


def checksums(run_dir: Path) -> list[str]:
    with Journal.open(run_dir / "journal.sqlite", run=None) as journal:
        return [record.weights_checksum for record in journal.updates()]


def groups_of(run_dir: Path) -> list[tuple[int, Group]]:
    """(update, group) of everything that was trained on."""
    with Journal.open(run_dir / "journal.sqlite", run=None) as journal:
        return [(r.update, journal.group(name)) for r in journal.updates() for name in r.group_ids]


@pytest.mark.slow
def test_an_asynchronous_run_audits_every_action_token_and_finds_none_that_differs(
    small: Tables, tmp_path: Path
) -> None:
    recipe = recipe_of(small, updates=6)
    summary = run(recipe, tmp_path)
    assert (summary.reason, summary.exit_code) == ("done", 0)
    trained = groups_of(tmp_path)
    actions = sum(t.num_actions for _, group in trained for t in group.kept)
    assert summary.figures["audit"] == {"tokens": actions, "differing": 0, "max_abs_diff": 0.0}
    assert actions > 0
    lines = read_metrics(tmp_path)
    assert [line["update"] for line in lines] == [1, 2, 3, 4, 5, 6]
    assert 0 < max(line["lag/max"] for line in lines) <= recipe.lag.max_lag
    assert all(math.isfinite(line["is/d3"]) for line in lines)
    oldest = max(update - v for update, group in trained if (v := group.oldest_version) is not None)
    assert oldest <= recipe.lag.max_lag
    assert (tmp_path / "summary.png").stat().st_size > 1000
    assert json.loads((tmp_path / "summary.json").read_text())["exit_code"] == 0
    report = audit_run(tmp_path)
    assert (report.tokens, report.differing, report.updates) == (actions, 0, 6)


@pytest.fixture(scope="module")
def at_lag_0(unskilled: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Recipe, Path]:
    """A run that nobody interrupted."""
    recipe = recipe_of(small_tables(unskilled), **{"lag.max_lag": 0}, **INPROCESS)
    run_dir = tmp_path_factory.mktemp("at_lag_0")
    assert run(recipe, run_dir).exit_code == 0
    return recipe, run_dir


@pytest.mark.slow
def test_lag_0_equals_a_synchronous_loop_bit_for_bit(at_lag_0: tuple[Recipe, Path], tmp_path: Path) -> None:
    recipe, run_dir = at_lag_0
    judge = asyncio.run(synchronous_loop(recipe, Path(recipe.model.path), tmp_path))
    lines = read_metrics(run_dir)
    assert len(lines) == len(judge) == recipe.updates
    assert checksums(run_dir) == [figures["digest"] for figures in judge]
    assert all(line["grad_norm"] > 0 for line in lines)
    for line, figures in zip(lines, judge, strict=True):
        expected = json.loads(json.dumps(lasting({k: v for k, v in figures.items() if k != "digest"})))
        assert {name: line.get(name) for name in expected} == expected
        assert line["lag/max"] == 0


@pytest.mark.slow
def test_the_prefix_cache_serves_most_prompt_tokens_of_multi_turn_episodes(
    small: Tables, tmp_path: Path
) -> None:
    changes = {"env.id": "length_env:LongTalkEnv", "rollout.max_turns": 6, "rollout.context_len": 1024}
    summary = run(recipe_of(small, updates=2, **changes, **INPROCESS), tmp_path)
    lines = read_metrics(tmp_path)
    assert all(line["episode/turns"] == 6 for line in lines)
    # An update whose episodes were all played before the last one has no such figure.
    shares = [line["cache/hit_share"] for line in lines if "cache/hit_share" in line]
    assert shares
    assert min(shares) > 0.5
    assert summary.figures["audit"]["differing"] == 0


@pytest.mark.slow
def test_a_standard_kernel_run_shows_that_the_audit_can_see_a_mismatch(small: Tables, tmp_path: Path) -> None:
    recipe = recipe_of(small, kernels="standard", updates=1, **{"audit.on_mismatch": "warn"}, **INPROCESS)
    summary = run(recipe, tmp_path)
    assert summary.figures["audit"]["differing"] > 0
    assert summary.figures["audit"]["max_abs_diff"] < 1e-2


@pytest.mark.slow
def test_a_difference_stops_the_run_with_exit_code_3_and_says_where(small: Tables, tmp_path: Path) -> None:
    summary = run(recipe_of(small, kernels="standard", updates=2, **INPROCESS), tmp_path)
    assert summary.exit_code == 3
    assert "episode g00000" in summary.reason
    assert "kernels" in summary.reason


def test_a_new_run_in_the_folder_of_another_is_refused(small: Tables, tmp_path: Path) -> None:
    Journal.open(tmp_path / "journal.sqlite", run={}).close()
    with pytest.raises(ConfigError, match="already holds a run"):
        run(recipe_of(small), tmp_path)


def start(recipe: Recipe, run_dir: Path, *, resume: bool) -> subprocess.Popen[bytes]:
    """`rz-agent train` in a process group of its own."""
    command = [sys.executable, "-m", "rz_agent.cli", "train"]
    if resume:
        command += ["--resume", str(run_dir)]
    else:
        source = run_dir.parent / "recipe.toml"
        source.write_text(recipe.toml())
        command += ["--recipe", str(source), "--name", run_dir.name]
    command += ["--runs", str(run_dir.parent)]
    return subprocess.Popen(
        command,
        start_new_session=True,
        cwd=run_dir.parent,
        stdout=sys.stderr,
        # The environment is one of the tests' own.
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )


def wait_for_update_in_progress(run_dir: Path, process: subprocess.Popen[bytes], update: int) -> None:
    """Until the batch of `update` is recorded and the update itself is not yet."""
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline:
        assert process.poll() is None, "the run ended before it could be killed"
        try:
            with Journal.open(run_dir / "journal.sqlite", run=None) as journal:
                if journal.consumed(update) and len(journal.updates()) == update:
                    return
        except ConfigError:
            pass
        time.sleep(0.01)
    raise AssertionError(f"update {update} never began")


def kill_and_resume(recipe: Recipe, run_dir: Path, update: int) -> dict[str, set[int]]:
    """Kill the run in the middle of `update`, note what had finished, go on to the end."""
    process = start(recipe, run_dir, resume=False)
    with leaves_none(run_dir, process, update):
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    with Journal.open(run_dir / "journal.sqlite", run=None) as journal:
        finished = {r.group_id: set(journal.episodes(r.group_id)) for r in journal.groups()}
    process = start(recipe, run_dir, resume=True)
    with leaves_none(run_dir, process, update + 1):
        assert process.wait(timeout=400) == 0
    return finished


@contextlib.contextmanager
def leaves_none(run_dir: Path, process: subprocess.Popen[bytes], update: int) -> Iterator[None]:
    """Of what the run had started by this update, sandboxes among it, nothing is left after the block."""
    wait_for_update_in_progress(run_dir, process, update)
    started = psutil.Process(process.pid).children(recursive=True)
    yield
    _, alive = psutil.wait_procs(started, timeout=20)
    assert alive == []


@pytest.mark.slow
def test_killed_in_an_update_and_resumed_nothing_is_lost_trained_twice_or_skipped(
    small: Tables, tmp_path: Path
) -> None:
    """Through the command line, with a sandbox that is used in every episode."""
    recipe = recipe_of(small, updates=5, name="killed", **{"env.id": "length_env:CallingPythonMathEnv"})
    run_dir = tmp_path / "killed"
    before = kill_and_resume(recipe, run_dir, update=3)
    with Journal.open(run_dir / "journal.sqlite", run=None) as journal:
        for group_id, indices in before.items():
            assert indices <= set(journal.episodes(group_id))
        positions = [record.position for record in journal.groups()]
    assert positions == list(range(len(positions)))
    trained = [name for batch in trained_groups(run_dir) for name in batch]
    assert len(trained) == len(set(trained)) == recipe.updates * recipe.groups_per_batch
    assert max(u - v for u, g in groups_of(run_dir) if (v := g.oldest_version) is not None) <= 2
    lines = read_metrics(run_dir)
    assert sum(line.get("audit/differing", 0) for line in lines) == 0


@pytest.mark.slow
def test_at_lag_0_an_interrupted_run_equals_an_uninterrupted_one(
    at_lag_0: tuple[Recipe, Path], tmp_path: Path
) -> None:
    recipe, whole = at_lag_0
    cut = tmp_path / "cut"
    kill_and_resume(recipe.model_copy(update={"name": "cut"}), cut, update=2)
    assert checksums(cut) == checksums(whole)
    assert len(set(checksums(cut))) == recipe.updates
    assert trained_groups(cut) == trained_groups(whole)
    for mine, theirs in zip(read_metrics(cut), read_metrics(whole), strict=True):
        assert lasting(mine) == lasting(theirs)


@pytest.mark.slow
def test_interrupted_by_a_person_it_checkpoints_and_exits_130(small: Tables, tmp_path: Path) -> None:
    recipe = recipe_of(small, updates=200, name="asked", **{"checkpoint.every": 1000})
    run_dir = tmp_path / "asked"
    process = start(recipe, run_dir, resume=False)
    wait_for_update_in_progress(run_dir, process, 1)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to the run and to all that it started
    assert process.wait(timeout=120) == 130
    with Journal.open(run_dir / "journal.sqlite", run=None) as journal:
        point = journal.resume()
    assert point.update > 0
    assert point.replay == ()
    assert point.checkpoint is not None
    assert (run_dir / point.checkpoint).is_dir()
