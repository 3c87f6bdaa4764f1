"""Several ranks of one learner behind one object: each call of the controller is made by all of them.

    rank 0   RankedLearner.train(groups) --(method, arguments)--> every rank makes the same call
    rank n   follow(learner)             does what it hears until rank 0 closes, or until a rank fails

    torchrun --nproc-per-node 2 -m rz_agent.cli train --env python

Rank 0 runs the controller, the engine and the journal; the others hold their part of the model and write
nothing but their part of a checkpoint.
Invariants: no call returns before every rank has made it; a call that fails in the same way everywhere (a
ratio that is not finite) raises the learner's own error on rank 0 and the ranks stay in step; a call that
fails on some ranks only ends all of them with `RankFailed`.
Waits: followers for rank 0, without limit (episodes may take hours), and each rank for the others at the end
of a call, at most `grace`. A rank that is killed closes its connections, which wakes all who wait for it.
The end: ranks that part in step leave the process group, and no rank can use its learner any more. An
interpreter that ends while a thread of the group still holds its last message is aborted.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

import torch.distributed as dist
from torch import Tensor

from ..errors import RzError
from ..trajectory import Float32, Group, Segment
from .diagnostics import Metrics
from .megatron.parallel import leave

GRACE = timedelta(seconds=120)
NO_LIMIT = timedelta(days=365)


class RankFailed(RzError):
    """A rank of the learner failed or stopped alone: the ranks are no longer in step."""


class AnyLearner(Protocol):
    """What a run asks of its learner, wherever its ranks are; see `Learner` for what each call promises."""

    @property
    def version(self) -> int: ...

    @property
    def contract(self) -> str: ...

    def train(self, groups: Sequence[Group]) -> Metrics: ...

    def weights(self) -> dict[str, Tensor]: ...

    def score(
        self, segments: Sequence[Segment], weights: Mapping[str, Tensor] | None = None
    ) -> list[Float32]: ...

    def save(self, directory: Path | str) -> None: ...

    def load(self, directory: Path | str, *, exact: bool = True) -> None: ...

    def export(self, directory: Path | str) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One method of the learner, to be called on every rank.

    >>> Call(method="load", arguments=("checkpoints/000020",), options={"exact": False}).method
    'load'
    """

    method: str
    arguments: tuple[Any, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)

    def make(self, learner: AnyLearner) -> Any:
        return getattr(learner, self.method)(*self.arguments, **self.options)


class LearnerOfRanks(ABC):
    """The learner's interface over some way to make a call on every rank and to get rank 0's answer."""

    @abstractmethod
    def _everywhere(self, call: Call) -> Any:
        """Rank 0's answer, once every rank has made the call. Raises RankFailed, or what all raised."""

    @abstractmethod
    def close(self) -> None:
        """Let the other ranks go; idempotent."""

    def train(self, groups: Sequence[Group]) -> Metrics:
        figures: Metrics = self._everywhere(Call(method="train", arguments=(tuple(groups),)))
        return figures

    def weights(self) -> dict[str, Tensor]:
        tensors: dict[str, Tensor] = self._everywhere(Call(method="weights"))
        return tensors

    def score(
        self, segments: Sequence[Segment], weights: Mapping[str, Tensor] | None = None
    ) -> list[Float32]:
        found: list[Float32] = self._everywhere(Call(method="score", arguments=(tuple(segments), weights)))
        return found

    # Ranks may have other working directories, so they are told absolute paths.

    def save(self, directory: Path | str) -> None:
        self._everywhere(Call(method="save", arguments=(Path(directory).absolute(),)))

    def load(self, directory: Path | str, *, exact: bool = True) -> None:
        path = Path(directory).absolute()
        self._everywhere(Call(method="load", arguments=(path,), options={"exact": exact}))

    def export(self, directory: Path | str) -> None:
        self._everywhere(Call(method="export", arguments=(Path(directory).absolute(),)))


class Link:
    """What rank 0 says to the others, and how each says that a call went. Every rank makes one, at once.

    grace  how long a rank that has made its call waits for the others
    """

    def __init__(self, grace: timedelta = GRACE) -> None:
        self._calls = dist.new_group(backend="gloo", timeout=NO_LIMIT)
        self._outcomes = dist.new_group(backend="gloo", timeout=grace)

    def say(self, call: Call | None) -> None:
        """Rank 0: have every rank make this call; None lets them go."""
        try:
            dist.broadcast_object_list([call], src=0, group=self._calls)
        except RuntimeError as broken:
            raise RankFailed(f"a rank of the learner is gone: {broken}") from broken

    def hear(self) -> Call | None:
        """The others: wait for the next call."""
        heard: list[Call | None] = [None]
        try:
            dist.broadcast_object_list(heard, src=0, group=self._calls)
        except RuntimeError as broken:
            raise RankFailed(f"rank 0 of the learner is gone: {broken}") from broken
        return heard[0]

    def leave(self) -> None:
        """End this rank's part in every process group. Only in step, see `parallel.leave`."""
        del self._calls, self._outcomes  # a group's threads end when nobody names it any more
        leave()

    def make(self, call: Call, learner: AnyLearner) -> Any:
        """This rank's part of a call: its answer, or its error if every rank has one, else RankFailed."""
        answer, failure = None, None
        try:
            answer = call.make(learner)
        except Exception as error:
            failure = error
        outcomes = self._exchange(call, failure)
        if failure is not None and None not in outcomes:
            raise failure
        for rank, outcome in enumerate(outcomes):
            if outcome is not None:
                raise RankFailed(f"rank {rank} of the learner failed alone in {call.method}: {outcome}")
        return answer

    def _exchange(self, call: Call, failure: Exception | None) -> list[str | None]:
        """Every rank's failure in words, None where there was none."""
        mine = None if failure is None else f"{type(failure).__name__}: {failure}"
        outcomes: list[str | None] = [None] * dist.get_world_size()
        try:
            dist.all_gather_object(outcomes, mine, group=self._outcomes)
        except RuntimeError as broken:
            why = mine or f"a rank did not finish: {broken}"
            raise RankFailed(
                f"rank {dist.get_rank()} of the learner lost the others in {call.method}: {why}"
            ) from (failure or broken)
        return outcomes


class RankedLearner(LearnerOfRanks):
    """Rank 0's learner, with the other ranks of its process group following."""

    def __init__(self, learner: AnyLearner, link: Link) -> None:
        self._learner, self._link = learner, link
        self._following = True

    @property
    def version(self) -> int:
        return self._learner.version

    @property
    def contract(self) -> str:
        return self._learner.contract

    def close(self) -> None:
        if self._following:
            self._following = False
            self._link.say(None)
            self._link.leave()

    def _everywhere(self, call: Call) -> Any:
        try:
            self._link.say(call)
            return self._link.make(call, self._learner)
        except RankFailed:
            self._following = False
            raise


def follow(learner: AnyLearner, link: Link) -> None:
    """A rank above 0: make the calls of rank 0 until it closes, then leave. Raises RankFailed."""
    while (call := link.hear()) is not None:
        try:
            link.make(call, learner)
        except RankFailed:
            raise
        except Exception:  # every rank failed alike: rank 0 raises it and decides
            continue
    link.leave()


def gathered(build: Callable[[], AnyLearner], grace: timedelta = GRACE) -> AnyLearner:
    """Rank 0's learner of a torchrun world: `build`'s own where this process is alone."""
    learner = build()
    return RankedLearner(learner, Link(grace)) if dist.get_world_size() > 1 else learner


def launched() -> tuple[int, int]:
    """(rank, ranks) as torchrun says in its environment; (0, 1) without it."""
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
