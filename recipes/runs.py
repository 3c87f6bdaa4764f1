"""The folders under runs/: list them, tell what one did, export what it made.

    runs/<name>/   recipe.toml  journal.sqlite  metrics.jsonl  summary.json  summary.png
                   checkpoints/  weights/  tensorboard/  libraries.log

Reads only, except `new_run`, which makes a folder, and the exports, which write where they are told.
A run can be read while it goes on.
"""

from __future__ import annotations

import json
import shutil
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import ConfigError
from ..trajectory import Segment, Trajectory
from .metrics_writer import read_metrics
from .model_source import model_folder
from .progress import number
from .recipe import Recipe, parse

RECIPE, JOURNAL, SUMMARY = "recipe.toml", "journal.sqlite", "summary.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What can be told about a run without loading a model.

    last      figures of its last update, empty before the first
    summary   summary.json, empty until the run has ended once
    """

    path: Path
    recipe: Recipe
    last: dict[str, Any]
    summary: dict[str, Any]

    @property
    def updates_done(self) -> int:
        return int(self.last["update"]) if self.last else 0

    @property
    def state(self) -> str:
        """Why it ended, its first line; or "unfinished" for one that goes on or was killed."""
        return str(self.summary.get("reason", "unfinished")).partition("\n")[0]


def new_run(root: Path, name: str, *, exact: bool = False) -> Path:
    """Make runs/<name>, or runs/<name>-2 and so on when that is taken; never reuses a folder.

    exact  refuse a name that is taken: a person chose it
    """
    root.mkdir(parents=True, exist_ok=True)
    if exact and (root / name).exists():
        raise ConfigError(
            source="command line",
            key="--name",
            value=name,
            why=f"is taken by {root / name}.",
            remedy=f"Choose another, or go on with that run: rz-agent train --resume {root / name}",
        )
    count = 1
    while True:
        path = root / (name if count == 1 else f"{name}-{count}")
        try:
            path.mkdir()
            return path
        except FileExistsError:
            count += 1


def save_recipe(run_dir: Path, recipe: Recipe) -> None:
    """Write the resolved recipe into the run, whole or not at all."""
    scratch = run_dir / f"{RECIPE}.tmp"
    scratch.write_text(recipe.toml())
    scratch.replace(run_dir / RECIPE)


def find_run(root: Path, name: str) -> Path:
    """The run of that name under `root`, or the folder at that path; a ConfigError names the others."""
    for path in (root / name, Path(name)):
        if (path / RECIPE).is_file():
            return path
    names = ", ".join(path.name for path in _run_folders(root)) or "there are none"
    raise ConfigError(
        source=str(root),
        key="run",
        value=name,
        why=f"is no run (no {RECIPE} in it).",
        remedy=f"Runs: {names}.",
    )


def list_runs(root: Path) -> list[Run]:
    """All runs under `root`, by name."""
    return [open_run(path) for path in _run_folders(root)]


def open_run(path: Path) -> Run:
    """Read one run's recipe, last figures and summary."""
    source = path / RECIPE
    metrics = read_metrics(path)
    summary = path / SUMMARY
    return Run(
        path=path,
        recipe=parse(tomllib.loads(source.read_text()), str(source)),
        last=metrics[-1] if metrics else {},
        summary=json.loads(summary.read_text()) if summary.is_file() else {},
    )


def describe(run: Run, window: int = 20) -> list[tuple[str, str]]:
    """(name, value) lines for a person: outcome, then where everything lies."""
    metrics = read_metrics(run.path)
    lines = [
        ("state", run.state),
        ("updates", f"{run.updates_done} of {run.recipe.updates}"),
        ("reward", _reward_line(metrics, window)),
        ("D3 over the run", _d3_line(metrics)),
        ("audit", _audit_line(metrics)),
        ("lag", _lag_line(metrics, run.recipe)),
    ]
    files = {
        "recipe": RECIPE,
        "figures": "metrics.jsonl",
        "plots": "summary.png",
        "journal": JOURNAL,
        "TensorBoard": "tensorboard",
        "libraries' output": "libraries.log",
    }
    lines += [(name, str(run.path / file)) for name, file in files.items() if (run.path / file).exists()]
    return lines


def _reward_line(metrics: list[dict[str, Any]], window: int) -> str:
    rewards = [line["reward/mean"] for line in metrics if "reward/mean" in line]
    if not rewards:
        return "-"
    first, last = rewards[:5], rewards[-window:]
    return (
        f"{number(sum(last) / len(last))} (mean of the last {len(last)} updates), "
        f"{number(sum(first) / len(first))} in the first {len(first)}"
    )


def _d3_line(metrics: list[dict[str, Any]]) -> str:
    values = sorted(line["is/d3"] for line in metrics if "is/d3" in line)
    if not values:
        return "-"
    middle = values[len(values) // 2]
    ratio = f", peak/median {number(values[-1] / middle, 1)}" if middle > 0 else ""
    return f"median {number(middle)}, peak {number(values[-1])}{ratio}"


def _audit_line(metrics: list[dict[str, Any]]) -> str:
    audited = [line for line in metrics if line.get("audit/tokens")]
    if not audited:
        return "nothing audited"
    tokens = sum(int(line["audit/tokens"]) for line in audited)
    differing = sum(int(line.get("audit/differing", 0)) for line in audited)
    found = f"{differing} of {tokens} action tokens differ"
    if any("audit/max_abs_diff" not in line for line in audited):
        return f"{found}, some of them by no finite amount"
    return f"{found}, largest difference {number(max(line['audit/max_abs_diff'] for line in audited))}"


def _lag_line(metrics: list[dict[str, Any]], recipe: Recipe) -> str:
    highest = max((line["lag/max"] for line in metrics if "lag/max" in line), default=None)
    return f"highest {number(highest)}, allowed {recipe.lag.max_lag}"


def export_model(run: Run, out: Path) -> int:
    """Write the newest weights as a Hugging Face folder; returns their version.

    Configuration and tokenizer are those of the model that the run began with.
    """
    from safetensors.torch import save_file

    from ..weight_store import WeightStore

    store = WeightStore(run.path / "weights")
    versions = store.versions()
    if not versions:
        raise ConfigError(
            source=str(run.path),
            key="weights",
            value="(none)",
            why="has no published weights yet.",
            remedy="Let it finish an update first.",
        )
    begun_with = model_folder(run.recipe.model)
    out.mkdir(parents=True, exist_ok=True)
    for file in begun_with.iterdir():
        if file.is_file() and file.suffix not in {".safetensors", ".bin"} and "safetensors" not in file.name:
            shutil.copy2(file, out / file.name)
    version = max(versions)
    tensors = {name: tensor.contiguous() for name, tensor in store.load(version).items()}
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    return version


def export_trajectories(run: Run, out: Path) -> int:
    """Write every consumed episode as one JSON line, in the order of training; returns how many."""
    from ..journal import Journal

    count = 0
    with Journal.open(run.path / JOURNAL, run=None) as journal, out.open("w") as file:
        for update in journal.updates():
            for group_id in journal.consumed(update.update):
                for trajectory in journal.group(group_id):
                    file.write(
                        json.dumps(_trajectory_json(update.update, trajectory), allow_nan=False) + "\n"
                    )
                    count += 1
    return count


def _trajectory_json(update: int, trajectory: Trajectory) -> dict[str, Any]:
    return {
        "update": update + 1,  # as in metrics.jsonl
        "episode_id": trajectory.episode_id,
        "group_id": trajectory.group_id,
        "task_id": trajectory.task_id,
        "reward": trajectory.reward,
        "status": trajectory.status,
        "mask_reason": trajectory.mask_reason,
        "metrics": dict(trajectory.metrics),
        "segments": [_segment_json(segment) for segment in trajectory.segments],
    }


def _segment_json(segment: Segment) -> dict[str, Any]:
    """JSON has no NaN: a token that is no action has the logprob null."""
    logprobs = zip(segment.behaviour_logprobs.tolist(), segment.action_mask.tolist(), strict=True)
    return {
        "token_ids": segment.token_ids.tolist(),
        "action_mask": segment.action_mask.tolist(),
        "behaviour_logprobs": [value if action else None for value, action in logprobs],
        "policy_version": segment.policy_version.tolist(),
        "temperature": segment.sampling.temperature,
        "contract": segment.contract,
        "images": len(segment.images),
    }


def _run_folders(root: Path) -> Iterator[Path]:
    if root.is_dir():
        yield from sorted(path for path in root.iterdir() if (path / RECIPE).is_file())
