"""What an episode leaves behind: the contract between rollout, journal and learner.

    Segment      tokens that the engine saw as one growing prompt
    Trajectory   one episode: its segments, reward and fate
    Group        n episodes of one task, the unit of the baseline and of the batch

Invariants, checked on construction: arrays of a segment have one length; a log-probability is
finite and at most 0 on every action token and NaN everywhere else; a policy version is at least 0
on every action token and -1 everywhere else. Whoever holds one of these holds a valid one, so no
consumer re-checks. Nothing here waits for anything and nothing here imports another of our modules
except the errors.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from .errors import MissingLogprob, NonFinite

Int32 = NDArray[np.int32]
Float32 = NDArray[np.float32]
Bool = NDArray[np.bool_]
Status = Literal["ok", "truncated", "masked"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """The distribution that actions are drawn from; mu is the log-probability under exactly this.

    temperature  > 0; 1 is the model's own distribution
    top_p, top_k 1 and 0 (off) for training, because a truncated mu has no support where pi has
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0

    @property
    def full_support(self) -> bool:
        return self.top_p == 1.0 and self.top_k == 0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Segment:
    """Tokens that the engine saw as one growing prompt.

    token_ids            int32[T]    prompt, actions and observations in order
    action_mask          bool[T]     True where the policy sampled the token
    behaviour_logprobs   float32[T]  log mu of that token; NaN elsewhere
    policy_version       int32[T]    version that sampled it; -1 elsewhere
    images               PNG files in the order of their placeholders
    sampling             the distribution sampled from
    contract             hash of the kernels that computed the log-probabilities

    >>> nan = float("nan")
    >>> turn = Segment(token_ids=[7, 8, 9], action_mask=[False, True, True],
    ...                behaviour_logprobs=[nan, -0.5, -0.25], policy_version=[-1, 3, 3])
    >>> turn.num_actions, turn.oldest_version
    (2, 3)
    """

    token_ids: Int32
    action_mask: Bool
    behaviour_logprobs: Float32
    policy_version: Int32
    images: tuple[bytes, ...] = ()
    sampling: Sampling = Sampling()
    contract: str = ""

    def __post_init__(self) -> None:
        columns = {
            "token_ids": np.int32,
            "action_mask": np.bool_,
            "behaviour_logprobs": np.float32,
            "policy_version": np.int32,
        }
        for name, dtype in columns.items():
            array: NDArray[Any] = np.array(getattr(self, name), dtype=dtype)
            array.flags.writeable = False
            object.__setattr__(self, name, array)
            if array.ndim != 1 or len(array) != len(self.token_ids):
                raise ValueError(
                    f"{name} has shape {array.shape}, token_ids {self.token_ids.shape}: "
                    "the columns of a segment have one entry a token"
                )
        mask, logprobs, versions = self.action_mask, self.behaviour_logprobs, self.policy_version
        acted = np.isfinite(logprobs) & (logprobs <= 0) & (versions >= 0)
        if not np.where(mask, acted, np.isnan(logprobs) & (versions == -1)).all():
            self._refuse_actions()

    def _refuse_actions(self) -> None:
        """Raise for the first fault of the columns."""
        mask, logprobs, versions = self.action_mask, self.behaviour_logprobs, self.policy_version
        if missing := np.flatnonzero(mask & np.isnan(logprobs)).tolist():
            raise MissingLogprob(f"action token {missing[0]} has no log-probability")
        if bad := np.flatnonzero(mask & ~(np.isfinite(logprobs) & (logprobs <= 0))).tolist():
            raise NonFinite(
                f"action token {bad[0]} has behaviour log-probability {logprobs[bad[0]]}: "
                "it must be finite and at most 0"
            )
        if stray := np.flatnonzero(~mask & ~np.isnan(logprobs)).tolist():
            raise ValueError(f"token {stray[0]} is no action, so its log-probability must be NaN")
        if unversioned := np.flatnonzero(mask & (versions < 0)).tolist():
            raise ValueError(f"action token {unversioned[0]} has no policy version")
        if stray := np.flatnonzero(~mask & (versions != -1)).tolist():
            raise ValueError(f"token {stray[0]} is no action, so its policy version must be -1")

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def num_actions(self) -> int:
        return int(self.action_mask.sum())

    @property
    def oldest_version(self) -> int | None:
        """Lowest policy version among the action tokens; None where there is none."""
        return int(self.policy_version[self.action_mask].min()) if self.num_actions else None

    def turns(self) -> list[range]:
        """Runs of consecutive action tokens: the positions of each turn's sampled tokens.

        >>> nan = float("nan")
        >>> s = Segment(token_ids=[1, 2, 3, 4], action_mask=[False, True, False, True],
        ...             behaviour_logprobs=[nan, 0, nan, 0], policy_version=[-1, 0, -1, 0])
        >>> s.turns()
        [range(1, 2), range(3, 4)]
        """
        edges = np.flatnonzero(np.diff(self.action_mask.astype(np.int8), prepend=0, append=0))
        return [range(int(a), int(b)) for a, b in zip(edges[::2], edges[1::2], strict=True)]

    def turn_of(self, position: int) -> int:
        """Which of `turns` the action token at `position` belongs to."""
        return next(number for number, turn in enumerate(self.turns()) if position in turn)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Trajectory:
    """One finished episode.

    reward       finite; meaningless (and 0.0) where the status is "masked"
    status       "ok"; "truncated" by turns, tokens or time (its reward counts);
                 "masked" by an infrastructure failure (neither its reward nor its tokens count)
    mask_reason  why, where masked
    metrics      unweighted figures of the rubric and the rollout, such as turns or wall seconds
    """

    episode_id: str
    group_id: str
    task_id: str
    segments: tuple[Segment, ...]
    reward: float
    status: Status = "ok"
    mask_reason: str = ""
    metrics: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not np.isfinite(self.reward):
            raise NonFinite(f"episode {self.episode_id}: reward {self.reward} is not finite")
        if (self.status == "masked") != bool(self.mask_reason):
            raise ValueError(
                f"episode {self.episode_id}: status {self.status!r} with mask_reason "
                f"{self.mask_reason!r}; exactly the masked episodes have a reason"
            )
        object.__setattr__(self, "segments", tuple(self.segments))

    @property
    def masked(self) -> bool:
        return self.status == "masked"

    @property
    def num_actions(self) -> int:
        return sum(segment.num_actions for segment in self.segments)

    @property
    def num_tokens(self) -> int:
        return sum(len(segment) for segment in self.segments)

    @property
    def oldest_version(self) -> int | None:
        versions = [v for s in self.segments if (v := s.oldest_version) is not None]
        return min(versions, default=None)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Group:
    """n finished episodes of one task, in the order of their episode index."""

    group_id: str
    task_id: str
    trajectories: tuple[Trajectory, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "trajectories", tuple(self.trajectories))
        if strangers := [t.episode_id for t in self if t.group_id != self.group_id]:
            raise ValueError(f"group {self.group_id} holds episode {strangers[0]} of another group")

    def __iter__(self) -> Iterator[Trajectory]:
        return iter(self.trajectories)

    def __len__(self) -> int:
        return len(self.trajectories)

    @property
    def kept(self) -> tuple[Trajectory, ...]:
        """The episodes that count: not masked."""
        return tuple(t for t in self if not t.masked)

    @property
    def oldest_version(self) -> int | None:
        """Lowest policy version among the action tokens of the episodes that count."""
        return min((v for t in self.kept if (v := t.oldest_version) is not None), default=None)


def unmasked(groups: Sequence[Group]) -> list[Trajectory]:
    """The responses of a batch: episodes that are not masked and have an action token."""
    return [t for group in groups for t in group.kept if t.num_actions]
