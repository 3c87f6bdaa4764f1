"""The figures of a run: written once each, shown to a person, drawn on one page."""

from __future__ import annotations

import io
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from rz_agent.errors import NonFinite
from rz_agent.recipes import summary_plot
from rz_agent.recipes.metrics_writer import MetricsWriter, read_metrics
from rz_agent.recipes.progress import LineObserver, LiveObserver, number, observer
from rz_agent.recipes.sections import TrackingSection

QUIET = TrackingSection(tensorboard=False)


def figures(update: int, **more: Any) -> dict[str, Any]:
    return {
        "update": update,
        "reward/mean": 0.5,
        "is/d3": 1e-3 * update,
        "lag/mean": 2.0,
        "lag/max": 4.0,
        **more,
    }


def written(run_dir: Path) -> list[int]:
    return [line["update"] for line in read_metrics(run_dir)]


def test_figures_are_on_disk_in_the_order_of_updates(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path, QUIET) as writer:
        for update in (1, 2, 3):
            writer.write(figures(update))
            assert written(tmp_path)[-1] == update
    assert written(tmp_path) == [1, 2, 3]


def test_an_absent_figure_stays_absent(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path, QUIET) as writer:
        writer.write({"update": 1})
    assert read_metrics(tmp_path) == [{"update": 1}]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_figure_that_is_not_finite_stops_the_run_and_is_named(tmp_path: Path, bad: float) -> None:
    with MetricsWriter(tmp_path, QUIET) as writer, pytest.raises(NonFinite, match=r"update 1: is/kl"):
        writer.write(figures(1, **{"is/kl": bad}))
    assert written(tmp_path) == []


def test_an_update_is_never_written_twice(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path, QUIET) as writer:
        writer.write(figures(2))
        for update in (1, 2):
            with pytest.raises(ValueError, match="after those of update 2"):
                writer.write(figures(update))


@given(before=st.integers(0, 8), durable=st.integers(0, 8), torn=st.booleans(), after=st.integers(0, 4))
def test_a_resumed_run_has_each_update_once(
    tmp_path_factory: pytest.TempPathFactory, before: int, durable: int, torn: bool, after: int
) -> None:
    run_dir = tmp_path_factory.mktemp("run")
    with MetricsWriter(run_dir, QUIET) as writer:
        for update in range(1, before + 1):
            writer.write(figures(update))
    if torn:
        with (run_dir / "metrics.jsonl").open("ab") as file:
            file.write(b'{"update": 99, "reward/me')
    with MetricsWriter(run_dir, QUIET, keep_through=durable) as writer:
        assert writer.last_update == min(before, durable)
        for update in range(durable + 1, durable + 1 + after):
            writer.write(figures(update))
    assert written(run_dir) == [*range(1, min(before, durable) + 1), *range(durable + 1, durable + 1 + after)]


def board_scalars(run_dir: Path, tag: str) -> list[tuple[int, float]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run_dir / "tensorboard"))
    events.Reload()
    return [(event.step, event.value) for event in events.Scalars(tag)]


def test_tensorboard_shows_the_same_figures_under_the_same_names_once_each(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path, TrackingSection()) as writer:
        for update in (1, 2, 3):
            writer.write(figures(update, **{"lag/hist": [1, 0, 2]}))
    with MetricsWriter(tmp_path, TrackingSection(), keep_through=2) as writer:
        writer.write(figures(3, **{"reward/mean": 0.75}))
    assert board_scalars(tmp_path, "reward/mean") == [(1, 0.5), (2, 0.5), (3, 0.75)]


def test_one_line_tells_an_update_and_a_missing_figure_is_a_dash() -> None:
    out = io.StringIO()
    with LineObserver(out, total_updates=10) as display:
        display.phase("starting the engine")
        display.update(figures(1, **{"audit/tokens": 40.0, "audit/differing": 0.0}))
        display.update({"update": 2})
    first, second, third = out.getvalue().splitlines()
    assert "starting the engine" in first
    assert "update 1/10  reward 0.500" in second
    assert "audit 0 of 40 differ" in second
    assert "reward -" in third
    assert "left 0:00" in third


def test_the_live_display_shows_phase_figures_and_a_differing_audit() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=120)
    with LiveObserver(console, total_updates=10, title="mine") as display:
        display.phase("training", "update 4")
        display.update(figures(4, **{"audit/tokens": 40.0, "audit/differing": 3.0}))
        display.live({"episodes running": 96})
        display.note("something to keep")
    assert isinstance(console.file, io.StringIO)
    shown = console.file.getvalue()
    for text in (
        "mine",
        "training: update 4",
        "update 4/10",
        "3 of 40 differ",
        "episodes running",
        "something to keep",
    ):
        assert text in shown


def test_a_pipe_gets_lines() -> None:
    assert isinstance(observer(io.StringIO(), 10, "mine"), LineObserver)


@given(st.none() | st.booleans() | st.text() | st.integers() | st.floats(allow_nan=True))
def test_anything_can_be_shown_as_a_number_or_a_dash(value: object) -> None:
    assert number(value)


def test_the_plot_is_a_picture_of_the_run(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path, QUIET) as writer:
        for update in range(1, 30):
            writer.write(figures(update, **{"is/kl": 0.1 / update, "grad_norm": 1.0}))
    path = summary_plot.draw(tmp_path)
    assert path is not None
    assert path.read_bytes().startswith(b"\x89PNG")


def test_the_plot_of_a_run_with_gaps_is_drawn_and_without_figures_there_is_none(tmp_path: Path) -> None:
    assert summary_plot.draw(tmp_path) is None
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps({"update": u}) + "\n" for u in (1, 2)))
    assert summary_plot.draw(tmp_path) is not None


def test_what_libraries_and_child_processes_print_goes_to_the_log_and_the_run_to_the_terminal(
    tmp_path: Path,
) -> None:
    code = (
        "import pathlib, subprocess, sys\n"
        "from rz_agent.recipes.library_output import libraries_write_to\n"
        "with libraries_write_to(pathlib.Path('.')) as terminal:\n"
        "    print('chatter'); print('warning', file=sys.stderr); subprocess.run(['echo', 'child'])\n"
        "    print('update 1', file=terminal)\n"
        "print('the end')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert done.stdout.split("\n") == ["update 1", "the end", ""]
    assert done.stderr == ""
    assert set((tmp_path / "libraries.log").read_text().split()) == {"chatter", "warning", "child"}


@pytest.mark.parametrize(("failure", "kept"), [("", False), ("1 / 0", True)])
def test_a_command_without_a_folder_keeps_what_libraries_print_only_if_it_fails(
    tmp_path: Path, failure: str, kept: bool
) -> None:
    code = (
        "from rz_agent.recipes.library_output import libraries_are_quiet\n"
        "with libraries_are_quiet() as terminal:\n"
        "    print('chatter'); print('shown', file=terminal)\n"
        f"    {failure or 'pass'}\n"
        "print('result')"
    )
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False
    )
    assert done.stdout == ("" if failure else "result\n")
    assert done.stderr.startswith("shown\n")
    logs = list(tmp_path.glob("*/libraries.log"))
    assert [log.read_text() for log in logs] == ["chatter\n"] * kept
    assert all(str(log) in done.stderr for log in logs)
