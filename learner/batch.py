"""What an update trains on: the action tokens of a batch in one flat order, each with its weight in the loss.

    Piece    one segment with at least one action token, and where its actions lie in the flat order
    Batch    the pieces of all responses, and one column per fact about an action token

Counting: a response is one unmasked episode with at least one action token, all its segments together. With B
responses, T_i action tokens in response i and advantage A_i, the token's coefficient is A_i / (B T_i), so
the loss -sum(coefficient * ratio) needs no denominator that depends on how the tokens are later split into
micro-batches. The flat order is: groups, episodes, segments, positions. Nothing here knows a model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from ..errors import NonFinite
from ..trajectory import Float32, Group, Int32, Segment, Trajectory, unmasked
from .advantages import advantages

Number = TypeVar("Number", bound=np.generic)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Piece:
    """A segment to run through the model.

    segment      its tokens
    first        index in the flat order of its first action token
    coefficient  A_i / (B T_i) of its episode; 0 where it is only scored
    name         "episode e, segment s", for errors
    """

    segment: Segment
    first: int
    coefficient: float
    name: str

    def __post_init__(self) -> None:
        if len(self.segment) and self.segment.action_mask[0]:
            raise ValueError(f"{self.name}: token 0 is an action, but nothing precedes it to predict it from")
        if self.segment.images:
            raise NotImplementedError(f"{self.name}: holds images, and the text learner cannot embed them")

    @property
    def actions(self) -> NDArray[np.int64]:
        """int64[n]: positions of the action tokens in the segment."""
        return np.flatnonzero(self.segment.action_mask)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Batch:
    """The action tokens of B responses, N in all.

    pieces              segments with actions, in flat order
    responses           B
    behaviour_logprobs  float32[N]
    policy_version      int32[N]
    coefficients        float32[N]  A_i / (B T_i)
    extreme             the response whose advantage is furthest from 0, and that advantage; None without any
    """

    pieces: tuple[Piece, ...]
    responses: int
    extreme: tuple[str, float] | None
    behaviour_logprobs: Float32
    policy_version: Int32
    coefficients: Float32

    @classmethod
    def of(cls, groups: Sequence[Group]) -> Batch:
        """The batch of whole groups; masked episodes and episodes without an action token are left out.

        Raises NonFinite for an episode whose advantage a float32 cannot hold.
        """
        episodes, advantage = unmasked(groups), advantages(groups)
        named = []
        for episode in episodes:
            _require_representable(episode, advantage[episode.episode_id])
            share = advantage[episode.episode_id] / (len(episodes) * episode.num_actions)
            named += [
                (segment, share, f"episode {episode.episode_id}, segment {index}")
                for index, segment in enumerate(episode.segments)
            ]
        ranked = sorted(episodes, key=lambda episode: abs(advantage[episode.episode_id]))
        extreme = (ranked[-1].episode_id, advantage[ranked[-1].episode_id]) if ranked else None
        return cls._from(named, responses=len(episodes), extreme=extreme)

    @classmethod
    def of_segments(cls, segments: Sequence[Segment]) -> Batch:
        """The same columns for segments that are only scored."""
        return cls._from(
            [(s, 0.0, f"segment {i}") for i, s in enumerate(segments)], responses=0, extreme=None
        )

    @classmethod
    def _from(
        cls,
        named: Sequence[tuple[Segment, float, str]],
        *,
        responses: int,
        extreme: tuple[str, float] | None,
    ) -> Batch:
        pieces: list[Piece] = []
        for segment, share, name in named:
            first = pieces[-1].first + pieces[-1].segment.num_actions if pieces else 0
            if segment.num_actions:
                pieces.append(Piece(segment=segment, first=first, coefficient=share, name=name))
        return cls(
            pieces=tuple(pieces),
            responses=responses,
            extreme=extreme,
            behaviour_logprobs=_column([p.segment.behaviour_logprobs[p.actions] for p in pieces], np.float32),
            policy_version=_column([p.segment.policy_version[p.actions] for p in pieces], np.int32),
            coefficients=_column([np.full(len(p.actions), p.coefficient) for p in pieces], np.float32),
        )

    def __len__(self) -> int:
        """N, the number of action tokens."""
        return len(self.behaviour_logprobs)

    def locate(self, index: int) -> str:
        """Where the action token at `index` of the flat order came from, for errors.

        >>> nan = float("nan")
        >>> s = Segment(token_ids=[1, 2], action_mask=[False, True], behaviour_logprobs=[nan, -1.0],
        ...             policy_version=[-1, 0])
        >>> Batch.of_segments([s, s]).locate(1)
        'segment 1, turn 0, token 1'
        """
        piece = next(p for p in reversed(self.pieces) if p.first <= index)
        token = int(piece.actions[index - piece.first])
        return f"{piece.name}, turn {piece.segment.turn_of(token)}, token {token}"


def _require_representable(episode: Trajectory, advantage: float) -> None:
    if not abs(advantage) <= np.finfo(np.float32).max:
        raise NonFinite(
            f"episode {episode.episode_id}: its reward of {episode.reward:g} gives an advantage of "
            f"{advantage:g}, which the loss, in float32, cannot hold. Nothing was updated. Bound the "
            "environment's rewards."
        )


def _column(parts: Sequence[NDArray[Any]], dtype: type[Number]) -> NDArray[Number]:
    return np.concatenate(parts).astype(dtype) if parts else np.zeros(0, dtype)
