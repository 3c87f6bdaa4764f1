"""The figures of a run, one JSON object an update, and the same as TensorBoard events and to W&B.

    MetricsWriter(run_dir, tracking, keep_through=k)   k: the last durable update, 0 for a new run
    write(figures)                                     in the order of updates, each once

Invariants: metrics.jsonl holds each update at most once, in order, whatever was killed when: opening
drops half a last line and every update past `keep_through`, since a resume does those again. A
figure that could not be computed is an absent key; NaN or infinity is refused, and so is a repeat.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from ..errors import ConfigError, NonFinite
from .sections import TrackingSection, WandbSection

Figure = float | int | Sequence[float] | Sequence[int]
FILE = "metrics.jsonl"


def read_metrics(run_dir: Path) -> list[dict[str, Any]]:
    """All whole lines of metrics.jsonl, oldest first; empty when there is no file yet."""
    path = run_dir / FILE
    if not path.is_file():
        return []
    lines = path.read_bytes().split(b"\n")
    return [json.loads(line) for line in lines[:-1] if line]  # what follows the last newline is cut short


class MetricsWriter:
    """Writes to run_dir/metrics.jsonl, and as `tracking` says to run_dir/tensorboard and to W&B."""

    def __init__(
        self,
        run_dir: Path,
        tracking: TrackingSection,
        *,
        keep_through: int = 0,
        config: Mapping[str, Any] | None = None,
    ) -> None:
        run_dir.mkdir(parents=True, exist_ok=True)
        self.last_update = _cut(run_dir, keep_through)
        self._file = (run_dir / FILE).open("ab")
        self._board = _open_board(run_dir, self.last_update + 1) if tracking.tensorboard else None
        self._wandb = _open_wandb(run_dir, tracking.wandb, config or {}) if tracking.wandb else None

    def write(self, figures: Mapping[str, Figure]) -> None:
        """Append one update's figures; they are on disk on return."""
        update = figures.get("update")
        if not isinstance(update, int) or update <= self.last_update:
            raise ValueError(f"figures of update {update!r} after those of update {self.last_update}")
        _refuse_non_finite(figures)
        line = json.dumps(figures, allow_nan=False, default=_plain)
        self._file.write(line.encode() + b"\n")
        self._file.flush()
        os.fsync(self._file.fileno())
        self.last_update = update
        if self._board is not None:
            _to_board(self._board, figures, update)
        if self._wandb is not None:
            self._wandb.log({name: v for name, v in figures.items() if _is_scalar(v)}, step=update)

    def close(self) -> None:
        """Flush everything; the writer cannot be used afterwards."""
        self._file.close()
        if self._board is not None:
            self._board.close()
        if self._wandb is not None:
            self._wandb.finish()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _cut(run_dir: Path, keep_through: int) -> int:
    """Leave only whole lines of updates up to `keep_through`; returns the last one left, else 0."""
    kept = [line for line in read_metrics(run_dir) if line["update"] <= keep_through]
    scratch = run_dir / f"{FILE}.tmp"
    scratch.write_text("".join(json.dumps(line) + "\n" for line in kept))
    scratch.replace(run_dir / FILE)
    return int(kept[-1]["update"]) if kept else 0


def _plain(value: Any) -> Any:
    """numpy and torch numbers and arrays as JSON has them."""
    return value.tolist() if hasattr(value, "tolist") else float(value)


def _is_scalar(value: object) -> bool:
    return isinstance(value, int | float) or (hasattr(value, "ndim") and value.ndim == 0)


def _refuse_non_finite(figures: Mapping[str, Figure]) -> None:
    for name, value in figures.items():
        numbers = value if isinstance(value, Sequence) else [value]
        for item in numbers:
            if not math.isfinite(item):
                raise NonFinite(
                    f"update {figures['update']}: {name} = {item}. A figure that could not be computed "
                    "is left out; one that is not finite stops the run."
                )


def _open_board(run_dir: Path, first_update: int) -> Any:
    # torch is loaded by every run that writes figures, but not by the commands that only read them.
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(str(run_dir / "tensorboard"), purge_step=first_update)


def _to_board(board: Any, figures: Mapping[str, Figure], update: int) -> None:
    for name, value in figures.items():
        if _is_scalar(value):
            board.add_scalar(name, value, update)
        elif isinstance(value, Sequence) and sum(value) > 0:
            _add_histogram(board, name, value, update)
    board.flush()


def _add_histogram(board: Any, name: str, counts: Sequence[float], update: int) -> None:
    """counts[i] is how often the whole number i was seen, as in lag/hist."""
    seen = [i for i, count in enumerate(counts) if count]
    board.add_histogram_raw(
        name,
        min=seen[0],
        max=seen[-1],
        num=sum(counts),
        sum=sum(i * count for i, count in enumerate(counts)),
        sum_squares=sum(i * i * count for i, count in enumerate(counts)),
        bucket_limits=[i + 0.5 for i in range(len(counts))],
        bucket_counts=list(counts),
        global_step=update,
    )


def _open_wandb(run_dir: Path, wandb_section: WandbSection, config: Mapping[str, Any]) -> Any:
    try:
        import wandb
    except ImportError:
        raise ConfigError(
            source="recipe",
            key="tracking.wandb",
            value=wandb_section.project,
            why="needs the package wandb.",
            remedy="pip install wandb, or leave the table out.",
        ) from None
    return wandb.init(
        project=wandb_section.project,
        entity=wandb_section.entity,
        mode=wandb_section.mode,
        id=run_dir.resolve().name,
        name=run_dir.resolve().name,
        resume="allow",
        dir=str(run_dir),
        config=dict(config),
    )
