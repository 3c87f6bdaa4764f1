"""What an episode is asked and what it tells while it runs: all that its runner shares with who starts it.

Invariant: task, seed and name of an episode are functions of the run's seed, its position and its index, so
an episode that is started again asks the same.
"""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from ..envs.task import Task
from ..trajectory import Trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeRequest:
    """One episode to run. `seed` and `episode_id` depend on the run's seed, position and index only."""

    task: Task
    group_id: str
    episode_id: str
    index: int
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Signals:
    """What an episode tells: it is about to send its first request; this version sampled its first token."""

    first_request: Callable[[], None]
    first_token: Callable[[int], None]


RunEpisode = Callable[[EpisodeRequest, Signals], Awaitable[Trajectory]]


def seed_of(*parts: object) -> int:
    """A 63-bit seed from the parts' text: the same parts, the same seed, on every machine.

    >>> seed_of(0, "g000001", 3) == seed_of(0, "g000001", 3)
    True
    """
    text = "\x1f".join(map(str, parts))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1
