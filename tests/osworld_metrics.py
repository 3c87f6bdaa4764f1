"""Metrics of somebody else's, for tests: importing the module adds them."""

from __future__ import annotations

from typing import Any

from rz_agent.envs.osworld.metrics import METRICS


@METRICS.add("test_is_long")
def is_long(result: str, *, at_least: int) -> float:
    """It has so many characters."""
    return float(len(result) >= at_least)


@METRICS.add("test_half_a_dozen")
def half_a_dozen(result: Any) -> float:
    """No score."""
    return 6.0
