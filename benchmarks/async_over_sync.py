"""What asynchrony is worth: updates a second of a run that samples ahead, over one that waits for each batch.

    python benchmarks/async_over_sync.py --env python --updates 30
    python benchmarks/async_over_sync.py --max-lag 64 --set 'runtime="ray"' --set model.dtype=bfloat16

Two training runs by the command line, one after the other, alike but for `lag.max_lag`: 0, where sampling and
training take turns, and `--max-lag`. With Ray and two GPUs the engine has one and the learner the other.
The first updates, which compile, are left out of the rates. `--set` is handed on to both.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rz_agent.recipes.metrics_writer import read_metrics

WARM_UP = 4
PARTS = ("time/rollout_wait_s", "time/train_s", "time/publish_s", "time/audit_s")


def trained(given: argparse.Namespace, max_lag: int, runs: Path) -> list[dict[str, Any]]:
    """The figures of each update of a run."""
    wanted = [f"lag.max_lag={max_lag}", f"updates={given.updates}", *given.set]
    options = [part for assignment in wanted for part in ("--set", assignment)]
    name = f"lag{max_lag}"
    command = ["train", "--env", given.env, "--runs", str(runs), "--name", name, *options]
    subprocess.run([sys.executable, "-m", "rz_agent.cli", *command], check=True)
    return read_metrics(runs / name)


def row(name: str, lines: Sequence[Mapping[str, Any]]) -> tuple[float, list[str]]:
    """Updates a second after the warm-up, and the row that shows them."""
    warm = lines[WARM_UP:]
    seconds = {part: sum(float(line[part]) for line in warm) for part in PARTS}
    rate = len(warm) / sum(seconds.values())
    shares = (f"{seconds[part] / sum(seconds.values()):.2f}" for part in PARTS)
    lag = statistics.fmean(float(line["lag/mean"]) for line in warm)
    audited = (sum(int(line[key]) for line in lines) for key in ("audit/tokens", "audit/differing"))
    tokens, differing = audited
    return rate, [name, f"{rate:.3f}", *shares, f"{lag:.1f}", f"{differing} of {tokens:,}"]


def main() -> None:
    given = parsed()
    table = Table(
        "run", "updates/s", "waits", "trains", "publishes", "audits", "mean lag", "tokens that differ"
    )
    rates = []
    with tempfile.TemporaryDirectory() as runs:
        for name, lag in (("synchronous", 0), ("asynchronous", given.max_lag)):
            rate, cells = row(name, trained(given, lag, Path(runs)))
            rates.append(rate)
            table.add_row(*cells)
    Console(width=120).print(table)
    print(f"asynchronous / synchronous: {rates[1] / rates[0]:.2f}")


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--env", default="python")
    parser.add_argument(
        "--updates", type=int, default=30, help=f"of each run, the first {WARM_UP} not counted"
    )
    parser.add_argument("--max-lag", type=int, default=64)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="of both recipes")
    given = parser.parse_args()
    if given.updates <= WARM_UP:
        parser.error(f"--updates {given.updates}: more than {WARM_UP} are needed, so many are not counted")
    return given


if __name__ == "__main__":
    main()
