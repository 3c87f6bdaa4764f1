"""summary.png: what a run did, on one page, from its metrics.jsonl alone.

Panels share the axis of updates: reward, D3 (logarithmic: its peaks are what matters), KL (linear: an
estimate of a small KL may be negative), lag, gradient norm before clipping. A figure that is absent at an
update leaves a gap.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .metrics_writer import read_metrics

FILE = "summary.png"

# title, figure, second figure drawn lighter, logarithmic axis
PANELS = (
    ("reward", "reward/mean", None, False),
    ("D3", "is/d3", None, True),
    ("KL", "is/kl", None, False),
    ("lag (mean, max)", "lag/mean", "lag/max", False),
    ("gradient norm before clipping", "grad_norm", None, True),
)


def draw(run_dir: Path) -> Path | None:
    """Write run_dir/summary.png and return its path; None when there are no figures yet."""
    lines = read_metrics(run_dir)
    if not lines:
        return None
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 2.1 * len(PANELS)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(len(PANELS), 1, sharex=True)
    updates = [line["update"] for line in lines]
    for axis, (title, name, second, logarithmic) in zip(axes, PANELS, strict=True):
        _panel(axis, updates, lines, title, name, second, logarithmic)
    axes[-1].set_xlabel("update")
    figure.suptitle(run_dir.resolve().name)
    path = run_dir / FILE
    figure.savefig(path, dpi=110)
    return path


def _panel(
    axis: Any,
    updates: list[int],
    lines: list[dict[str, Any]],
    title: str,
    name: str,
    second: str | None,
    log: bool,
) -> None:
    axis.set_ylabel(title, fontsize=9)
    axis.grid(alpha=0.25)
    values = _column(lines, name)
    if second is not None:
        axis.plot(updates, _column(lines, second), color="tab:blue", alpha=0.35, lw=1)
    axis.plot(updates, values, color="tab:blue", lw=1, alpha=0.5 if name == "reward/mean" else 1)
    if name == "reward/mean":
        axis.plot(updates, running_mean(values), color="tab:blue", lw=2)
    if log and any(value > 0 for value in values if not math.isnan(value)):
        axis.set_yscale("log", nonpositive="mask")


def _column(lines: Sequence[dict[str, Any]], name: str) -> list[float]:
    return [float(line[name]) if name in line else math.nan for line in lines]


def running_mean(values: Sequence[float], window: int = 10) -> list[float]:
    """Mean of the last `window` values that are there, at each point.

    >>> running_mean([1.0, 3.0, 5.0], window=2)
    [1.0, 2.0, 4.0]
    """
    means = []
    for end in range(1, len(values) + 1):
        known = [v for v in values[max(0, end - window) : end] if not math.isnan(v)]
        means.append(sum(known) / len(known) if known else math.nan)
    return means
