"""A Gymnasium environment whose random numbers are made when they are asked for, which few agents' are.

Invariant: `np_random` is what `gymnasium.Env.reset` would have made of the same seed. Nothing here waits.
"""

from __future__ import annotations

import gymnasium
from gymnasium.utils import seeding
from numpy.random import Generator

from .message import Observation


class LazilySeeded(gymnasium.Env[Observation, str]):
    """Call `seed_with` where an environment of Gymnasium's calls `super().reset(seed=seed)`."""

    def seed_with(self, seed: int | None) -> None:
        """Begin the random numbers of a seed; None goes on with those there are."""
        if seed is not None:
            self._np_random, self._np_random_seed = None, seed

    @property
    def np_random(self) -> Generator:
        if self._np_random is None and self._np_random_seed is not None:
            self._np_random, self._np_random_seed = seeding.np_random(self._np_random_seed)
        return super().np_random

    @np_random.setter
    def np_random(self, value: Generator) -> None:
        self._np_random, self._np_random_seed = value, -1  # as Gymnasium has it: whose seed nobody knows
