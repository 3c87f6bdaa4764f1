"""The curves of several runs in one picture: reward and D3 over the updates.

python benchmarks/compare_runs.py docs/lag64.png "with IS=runs/a" "without IS=runs/b"
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from rz_agent.recipes.metrics_writer import read_metrics
from rz_agent.recipes.summary_plot import running_mean


def column(lines: Sequence[dict[str, Any]], name: str) -> list[float]:
    return [float(line.get(name, math.nan)) for line in lines]


def draw(out: Path, runs: dict[str, list[dict[str, Any]]]) -> None:
    figure = Figure(figsize=(8, 5), layout="constrained")
    FigureCanvasAgg(figure)
    reward, d3 = figure.subplots(2, 1, sharex=True)
    for label, lines in runs.items():
        updates = [line["update"] for line in lines]
        reward.plot(updates, running_mean(column(lines, "reward/mean")), label=label)
        d3.plot(updates, column(lines, "is/d3"), lw=1)
    reward.set_ylabel("reward, mean of 10 updates")
    reward.set_ylim(0, 1)
    reward.legend()
    d3.set_ylabel("D3")
    d3.set_yscale("log", nonpositive="mask")
    d3.set_xlabel("update")
    figure.savefig(out, dpi=110)


def row(label: str, lines: Sequence[dict[str, Any]]) -> str:
    """Label, updates, reward first 5 and last 20, D3 median and peak, highest lag, audit."""
    rewards = column(lines, "reward/mean")
    d3 = [value for value in column(lines, "is/d3") if not math.isnan(value)]
    audited = sum(line.get("audit/tokens", 0) for line in lines)
    differing = sum(line.get("audit/differing", 0) for line in lines)
    return (
        f"{label:24} {len(lines):5d} "
        f"{statistics.fmean(rewards[:5]):9.3f} {statistics.fmean(rewards[-20:]):9.3f} "
        f"{statistics.median(d3):10.2e} {max(d3):10.2e} {max(column(lines, 'lag/max')):6.0f} "
        f"{differing:.0f} of {audited:.0f}"
    )


def main() -> None:
    arguments = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    arguments.add_argument("out", type=Path, help="the picture to write")
    arguments.add_argument("runs", nargs="+", metavar="LABEL=FOLDER")
    given = arguments.parse_args()
    runs = {label: read_metrics(Path(folder)) for label, _, folder in (r.partition("=") for r in given.runs)}
    draw(given.out, runs)
    print(
        f"{'run':24} {'upd':>5} {'first 5':>9} {'last 20':>9} {'D3 median':>10} {'peak':>10} {'lag':>6} audit"
    )
    for label, lines in runs.items():
        print(row(label, lines))


if __name__ == "__main__":
    main()
