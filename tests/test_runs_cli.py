"""What can be done with a run once it has ended: evaluate it, audit it, export it, repeat its updates.

One short run in this process serves them all; what changes something works on a copy of its folder.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import sqlite3
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import recipe_of, small_tables
from rz_agent import cli
from rz_agent.errors import RunStopped
from rz_agent.journal import Journal
from rz_agent.journal_columns import SegmentRow, decode, encode
from rz_agent.learner.learner import Learner
from rz_agent.recipes import evaluate
from rz_agent.recipes.metrics_writer import read_metrics
from rz_agent.recipes.progress import LineObserver
from rz_agent.recipes.recipe import Recipe
from rz_agent.recipes.resume import replay
from rz_agent.recipes.train import train
from rz_agent.trajectory import Segment, Trajectory
from rz_agent.weight_store import WeightStore
from safetensors.torch import load_file

pytestmark = pytest.mark.slow
EVALUATED = 5
Answer = tuple[int, str, str]


@pytest.fixture(scope="module")
def recipe(unskilled: Path) -> Recipe:
    changes: dict[str, Any] = {
        "rollout.engine.mode": "inprocess",
        "eval": {"every": 2, "episodes": EVALUATED},
    }
    return recipe_of(small_tables(unskilled), updates=2, **changes)


@pytest.fixture(scope="module")
def finished(recipe: Recipe, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of two updates, the second of which was followed by an evaluation."""
    path = tmp_path_factory.mktemp("runs") / "small"
    observer = LineObserver(sys.stderr, recipe.updates)
    assert train(recipe, run_dir=path, resume=False, observer=observer).exit_code == 0
    return path


@pytest.fixture
def rz_agent(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Answer]:
    """The command in this process: exit code, what it printed, what it complained of."""

    def command(*arguments: object) -> Answer:
        monkeypatch.setattr(sys, "argv", ["rz-agent", *map(str, arguments)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            cli.main()
        said = capsys.readouterr()
        return int(ended.value.code or 0), said.out, said.err

    return command


def reader_leaves(path: Path) -> bool:
    """Who reads a journal leaves SQLite's shared memory and an empty write-ahead log beside it."""
    return path.name.endswith("-shm") or (path.name.endswith("-wal") and not path.stat().st_size)


def contents(folder: Path) -> dict[str, str]:
    """Every file below a folder with a digest of its bytes."""
    files = (path for path in folder.rglob("*") if path.is_file() and not reader_leaves(path))
    return {str(f.relative_to(folder)): hashlib.sha256(f.read_bytes()).hexdigest() for f in files}


def batches(run_dir: Path) -> list[tuple[int, Trajectory]]:
    """(update, episode) of all that was trained on, in the order of training."""
    with Journal.open(run_dir / "journal.sqlite", run=None) as journal:
        return [(r.update, t) for r in journal.updates() for name in r.group_ids for t in journal.group(name)]


def test_eval_every_writes_the_figures_of_the_split_with_the_update_where_it_was_due(finished: Path) -> None:
    first, second = read_metrics(finished)
    assert not [name for name in first if name.startswith("eval/")]
    assert (second["eval/test/episodes"], second["eval/test/masked"]) == (EVALUATED, 0)
    assert second["eval/test/reward/mean"] > 0
    assert 0 <= second["eval/test/pass@1"] <= 1
    assert second["eval/test/episode/turns"] >= 1


def test_what_the_environment_measured_is_a_figure_of_every_update_and_evaluation(finished: Path) -> None:
    for update, line in enumerate(read_metrics(finished)):
        calls = [t.metrics["tool_calls"] for u, t in batches(finished) if u == update and not t.masked]
        assert line["env/tool_calls"] == sum(calls) / len(calls)
        assert not [name for name in line if name.startswith("env/rollout")]
    assert "eval/test/env/tool_calls" in line


def test_eval_gives_the_mean_reward_of_the_asked_episodes_and_leaves_the_run_alone(
    finished: Path, rz_agent: Callable[..., Answer], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Trajectory] = []
    figures = evaluate.figures

    def overheard(played: Sequence[Trajectory]) -> dict[str, float]:
        seen.extend(played)
        return figures(played)

    monkeypatch.setattr(evaluate, "figures", overheard)
    before = contents(finished)
    code, said, _ = rz_agent("eval", "--run", finished.name, "--runs", finished.parent, "--episodes", 7)
    assert code == 0
    printed = dict(re.findall(r"^(\S+) +(\S+)$", said, re.MULTILINE))
    rewards = [episode.reward for episode in seen]
    assert printed["episodes"] == "7"
    assert len(rewards) == len({episode.task_id for episode in seen}) == 7
    assert printed["reward/mean"] == f"{sum(rewards) / 7:.4g}"
    # The newest weights, tasks and seeds are those of the evaluation during the run.
    during = read_metrics(finished)[-1]["eval/test/reward/mean"]
    assert sum(rewards[:EVALUATED]) / EVALUATED == during != sum(rewards) / 7
    assert contents(finished) == before


def test_the_audit_of_a_sound_run_exits_0_and_counts_every_action_token(
    finished: Path, rz_agent: Callable[..., Answer]
) -> None:
    before = contents(finished)
    code, said, _ = rz_agent("audit", finished.name, "--runs", finished.parent)
    tokens = sum(t.num_actions for _, t in batches(finished) if not t.masked)
    assert (code, said.splitlines()) == (
        0,
        [f"0 of {tokens} tokens differ over 2 updates, largest difference 0"],
    )
    assert contents(finished) == before


def test_a_run_that_went_on_with_a_lower_lag_is_audited_to_its_last_token(
    finished: Path, unskilled: Path, tmp_path: Path, rz_agent: Callable[..., Answer]
) -> None:
    shutil.copytree(finished, tmp_path / "longer")
    changes: dict[str, Any] = {"rollout.engine.mode": "inprocess", "lag.max_lag": 0}
    longer = recipe_of(small_tables(unskilled), updates=3, **changes)
    observer = LineObserver(sys.stderr, longer.updates)
    assert train(longer, run_dir=tmp_path / "longer", resume=True, observer=observer).exit_code == 0
    trained = [(u, t) for u, t in batches(tmp_path / "longer") if not t.masked and t.num_actions]
    assert any(t.oldest_version is not None and t.oldest_version < u for u, t in trained)
    code, said, _ = rz_agent("audit", tmp_path / "longer")
    assert code == 0
    assert f"0 of {sum(t.num_actions for _, t in trained)} tokens differ over 3 updates" in said


def test_figures_that_a_kill_left_unwritten_are_written_when_the_run_goes_on(
    finished: Path, recipe: Recipe, tmp_path: Path
) -> None:
    run = tmp_path / "cut"
    shutil.copytree(finished, run)
    first, lost = read_metrics(run)
    (run / "metrics.jsonl").write_text(json.dumps(first) + "\n")
    observer = LineObserver(sys.stderr, recipe.updates)
    assert train(recipe, run_dir=run, resume=True, observer=observer).exit_code == 0
    kept, written = read_metrics(run)
    assert kept == first
    audited = written.pop("audit/tokens")  # only of versions whose weights are still kept
    assert 0 <= audited <= lost["audit/tokens"]
    assert {name: lost[name] for name in written} == written
    assert {"reward/mean", "is/d3", "grad_norm", "lag/mean", "env/tool_calls"} <= written.keys()


def test_a_run_does_not_go_on_with_another_learning_rate_and_keeps_its_recipe(
    finished: Path, tmp_path: Path, rz_agent: Callable[..., Answer]
) -> None:
    shutil.copytree(finished, tmp_path / "same")
    before = contents(tmp_path / "same")
    changed = ("--set", "learner.lr=9e-4", "--set", "updates=9")
    code, _, complaint = rz_agent("train", "--resume", tmp_path / "same", *changed)
    assert (code, "learner.lr = 0.0009 but the run began with 0.001" in complaint) == (2, True)
    after = contents(tmp_path / "same")
    assert {name: after[name] for name in before} | {"libraries.log": ""} == before | {"libraries.log": ""}


@dataclass(frozen=True, slots=True)
class Altered:
    """A copy of the run in whose journal one log-probability has another last bit."""

    run_dir: Path
    episode_id: str
    token: int
    version: int


def alter(run_dir: Path, update: int) -> Altered:
    """Flip a bit as a faulty engine would have recorded it: the record's own checksum is right."""
    episode = next(t for u, t in batches(run_dir) if u == update and t.num_actions)
    token = int(np.flatnonzero(episode.segments[0].action_mask)[2])
    with sqlite3.connect(run_dir / "journal.sqlite") as db:
        db.row_factory = sqlite3.Row
        where = "episode = (SELECT episode FROM episodes WHERE episode_id = ?) AND place = 0"
        row = db.execute(f"SELECT * FROM segments WHERE {where}", (episode.episode_id,)).fetchone()
        stored = decode(SegmentRow(**{f.name: row[f.name] for f in fields(SegmentRow)}), (), "copy")
        logprobs = stored.behaviour_logprobs.copy()
        logprobs.view(np.uint32)[token] ^= 1
        changed = encode(replace(stored, behaviour_logprobs=logprobs))
        values = (changed.columns, changed.checksum, episode.episode_id)
        done = db.execute(f"UPDATE segments SET columns = ?, checksum = ? WHERE {where}", values)
        assert done.rowcount == 1
    db.close()
    return Altered(run_dir, episode.episode_id, token, int(stored.policy_version[token]))


@pytest.mark.parametrize("update", [0, 1], ids=["first update", "last update"])
def test_the_audit_exits_3_and_names_episode_and_token_of_one_altered_bit(
    finished: Path, tmp_path: Path, rz_agent: Callable[..., Answer], update: int
) -> None:
    shutil.copytree(finished, tmp_path / "altered")
    altered = alter(tmp_path / "altered", update)
    code, said, complaint = rz_agent("audit", altered.run_dir)
    assert code == 3
    where = f"episode {altered.episode_id} segment 0 turn 0 token {altered.token} version {altered.version}: "
    assert where in said + complaint


def test_a_damaged_record_is_refused_by_name_and_not_audited(
    finished: Path, tmp_path: Path, rz_agent: Callable[..., Answer]
) -> None:
    """The same bit flipped by the disk: the record's checksum is wrong."""
    shutil.copytree(finished, tmp_path / "damaged")
    altered = alter(tmp_path / "damaged", 0)
    with sqlite3.connect(altered.run_dir / "journal.sqlite") as db:
        db.execute(
            "UPDATE segments SET checksum = zeroblob(16) WHERE place = 0 AND episode = "
            "(SELECT episode FROM episodes WHERE episode_id = ?)",
            (altered.episode_id,),
        )
    db.close()
    code, _, complaint = rz_agent("audit", altered.run_dir)
    assert code == 1
    assert f"episode {altered.episode_id}, segment 0: checksum" in complaint


def read_back(line: dict[str, Any]) -> Trajectory:
    segments = [
        Segment(
            token_ids=s["token_ids"],
            action_mask=s["action_mask"],
            behaviour_logprobs=np.array(s["behaviour_logprobs"], np.float32),  # null becomes NaN
            policy_version=s["policy_version"],
            contract=s["contract"],
        )
        for s in line["segments"]
    ]
    names = ("episode_id", "group_id", "task_id", "reward", "status", "mask_reason", "metrics")
    return Trajectory(segments=tuple(segments), **{name: line[name] for name in names})


def plain(episode: Trajectory) -> dict[str, Any]:
    """All that an episode says, comparable: arrays as bytes, so that NaN equals NaN."""
    columns = [[s.token_ids, s.action_mask, s.behaviour_logprobs, s.policy_version] for s in episode.segments]
    return {
        **{f.name: getattr(episode, f.name) for f in fields(episode) if f.name != "segments"},
        "columns": [[column.tobytes() for column in segment] for segment in columns],
        "sampling": [(s.contract, asdict(s.sampling)) for s in episode.segments],
    }


def test_export_writes_the_newest_weights_and_what_the_journal_holds(
    finished: Path, tmp_path: Path, rz_agent: Callable[..., Answer]
) -> None:
    before = contents(finished)
    lines = tmp_path / "episodes.jsonl"
    arguments = ("runs", "export", finished.name, tmp_path / "model", "--trajectories", lines)
    code, said, _ = rz_agent(*arguments, "--runs", finished.parent)
    held = batches(finished)
    assert code == 0
    assert f"{tmp_path / 'model'}: the weights of version 2" in said
    assert f"{lines}: {len(held)} episodes" in said
    written = [json.loads(line) for line in lines.read_text().splitlines()]
    assert len(written) == 2 * 4 * 4
    assert [line["update"] for line in written] == [update + 1 for update, _ in held]
    for line, (_, episode) in zip(written, held, strict=True):
        assert plain(read_back(line)) == plain(episode)
    weights, newest = load_file(tmp_path / "model" / "model.safetensors"), WeightStore(finished / "weights")
    expected = newest.load(2)
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[name], expected[name]) for name in weights)
    assert contents(finished) == before


def test_a_repeated_update_must_give_the_recorded_weights(
    finished: Path, recipe: Recipe, tmp_path: Path
) -> None:
    learner, store = Learner(recipe.model.path, recipe.learner_config()), WeightStore(tmp_path)
    with Journal.open(finished / "journal.sqlite", run=None) as journal:
        first, second = journal.updates()[:2]
        groups = [[journal.group(name) for name in record.group_ids] for record in (first, second)]
    replay(learner, first, groups[0], store)
    assert store.versions() == [1]
    other = replace(second, weights_checksum=first.weights_checksum)
    with pytest.raises(
        RunStopped, match=r"update 1, repeated .* gives weights \w{16} instead of \w{16}"
    ) as no:
        replay(learner, other, groups[1], store)
    assert f"{second.weights_checksum[:16]} instead of {first.weights_checksum[:16]}" in str(no.value)
    assert no.value.exit_code == 3
    assert store.versions() == [1]
