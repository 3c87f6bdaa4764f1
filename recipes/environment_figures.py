"""What an environment says of its episodes, as figures: the mean of each of its metrics over a batch.

    env/<metric>    of `@metric` functions and of the counts that every environment keeps

Invariant: an episode that was masked, or lacks a metric, does not count; a metric of no episode is absent.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from ..trajectory import Trajectory

_OURS = ("rollout/", "episode/")  # what the harness itself measured has figures of its own


def environment_figures(episodes: Iterable[Trajectory]) -> dict[str, float]:
    """Means by name, e.g. {"env/tool_calls": 1.5}."""
    values = defaultdict[str, list[float]](list)
    for episode in episodes:
        if not episode.masked:
            for name, value in episode.metrics.items():
                if not name.startswith(_OURS):
                    values[f"env/{name}"].append(value)
    return {name: sum(found) / len(found) for name, found in sorted(values.items())}
