"""Going on with a run: what may change, what may not, and what an audit that failed leaves behind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from rz_agent.errors import ConfigError, RunStopped
from rz_agent.journal import Journal
from rz_agent.journal_file import create
from rz_agent.recipes.continuation import require_same
from rz_agent.recipes.metrics_writer import MetricsWriter
from rz_agent.recipes.recipe import Recipe, parse
from rz_agent.recipes.resume import refuse_differences
from rz_agent.recipes.sections import TrackingSection


def recipe(**tables: Any) -> Recipe:
    return parse({"name": "mine", **tables}, "test")


def begun(folder: Path, *lives: Recipe) -> Path:
    """The journal of a run with these lives."""
    path = folder / "journal.sqlite"
    for life in lives:
        with Journal.open(path, run={"recipe": life.model_dump(mode="json")}):
            pass
    return path


@pytest.mark.parametrize(
    ("table", "key"),
    [
        ({"learner": {"lr": 5e-4}}, "learner.lr"),
        ({"learner": {"clip_grad": 0.5}}, "learner.clip_grad"),
        ({"learner": {"importance_sampling": False}}, "learner.importance_sampling"),
        ({"seed": 1}, "seed"),
        ({"env": {"id": "other:Env"}}, "env.id"),
        ({"env": {"options": {"max_turns": 2}}}, "env.options"),
        ({"model": {"seed": 3}}, "model.seed"),
        ({"kernels": "standard"}, "kernels"),
        ({"groups_per_batch": 4}, "groups_per_batch"),
        ({"rollout": {"group_size": 4}}, "rollout.group_size"),
    ],
)
def test_what_decided_the_recorded_updates_cannot_change(
    tmp_path: Path, table: dict[str, Any], key: str
) -> None:
    journal = begun(tmp_path, recipe())
    with pytest.raises(ConfigError, match="but the run began with") as refused:
        require_same(recipe(**table), journal)
    assert refused.value.key == key
    assert "runs export" in refused.value.remedy


@pytest.mark.parametrize(
    "table",
    [
        {"updates": 999},
        {"lag": {"max_lag": 0}},
        {"audit": {"on_mismatch": "warn", "share": 0.5}},
        {"checkpoint": {"every": 3}},
        {"learner": {"micro_batch_tokens": 512, "tensor_parallel": 2}},
        {"rollout": {"episodes_in_flight": 32, "engine": {"threads": 2}}},
        {"model": {"cache": "elsewhere"}},
        {"sandbox": {"shared": 3}},
    ],
    ids=str,
)
def test_everything_else_can(tmp_path: Path, table: dict[str, Any]) -> None:
    require_same(recipe(**table), begun(tmp_path, recipe()))


def test_the_first_life_counts_not_the_last(tmp_path: Path) -> None:
    journal = begun(tmp_path, recipe(), recipe(updates=999))
    require_same(recipe(), journal)


def test_a_run_that_was_killed_before_its_journal_began_may_change_at_will(tmp_path: Path) -> None:
    create(tmp_path / "journal.sqlite")
    require_same(recipe(seed=5), tmp_path / "journal.sqlite")


def figures(folder: Path, *differing: int) -> Path:
    """metrics.jsonl with one update for each of these counts of differing tokens."""
    with MetricsWriter(folder, TrackingSection(tensorboard=False)) as writer:
        for update, count in enumerate(differing, 1):
            writer.write({"update": update, "audit/tokens": 10, "audit/differing": count})
    return folder


def test_a_run_that_its_audit_stopped_stays_stopped(tmp_path: Path) -> None:
    with pytest.raises(
        RunStopped, match=r"5 differing of 10 tokens in update 2\n.*audit\.on_mismatch"
    ) as stopped:
        refuse_differences(figures(tmp_path, 0, 5), since=2)
    assert stopped.value.exit_code == 3


def test_a_difference_found_while_missing_figures_are_written_stops_the_run(tmp_path: Path) -> None:
    with pytest.raises(RunStopped, match="in update 2"):
        refuse_differences(figures(tmp_path, 0, 5, 0), since=1)


def test_a_difference_that_an_update_was_made_after_is_known(tmp_path: Path) -> None:
    refuse_differences(figures(tmp_path, 5, 0), since=2)
    refuse_differences(figures(tmp_path / "new"), since=0)
