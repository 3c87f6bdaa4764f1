"""How much better an episode was than its group: A = R - mean of the group's rewards.

Invariants: a masked episode has no advantage and does not enter its group's mean; a group with fewer than two
unmasked episodes has no baseline, so its advantages are 0 (an episode alone says nothing about better or
worse). There is no division by the standard deviation and nothing is dropped: advantages are taken before
any batching.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..trajectory import Group


def advantages(groups: Sequence[Group]) -> dict[str, float]:
    """Advantage of every unmasked episode, by episode id (REINFORCE Zero: group-mean baseline, no scaling).

    Means are taken in float64; an advantage that overflows it is not finite, which `Batch` refuses. Raises
    ValueError where an episode id occurs twice.
    """
    found: dict[str, float] = {}
    for group in groups:
        rewards = np.array([episode.reward for episode in group.kept], dtype=np.float64)
        with np.errstate(over="ignore", invalid="ignore"):
            centred = rewards - rewards.mean() if len(rewards) > 1 else np.zeros(len(rewards))
        for episode, advantage in zip(group.kept, centred.tolist(), strict=True):
            if episode.episode_id in found:
                raise ValueError(f"episode id {episode.episode_id!r} occurs twice in one batch")
            found[episode.episode_id] = advantage
    return found
