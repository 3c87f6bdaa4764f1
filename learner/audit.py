"""Recompute recorded tokens with the weights of their own version: the kernel term must be 0 bits.

    check(groups)      -> AuditReport    which tokens differ; runs beside training, on a share of them
    diagnose(segment)  -> Cause          why, by asking which single fault reproduces the record

log pi_k - log mu_v splits into a kernel term (this module) and weight lag (what the loss corrects).
Rescoring at version v leaves only the kernel term, so one differing bit is a fault, whatever the lag.
That holds between equal kernel contracts only: tokens recorded under another contract are refused, not
compared. A learner with standard kernels promises no bits, so its tokens are compared to measure by how much
they differ.

A record is explained by the first hypothesis that reproduces every differing bit of a segment:
weights of a neighbouring version (an update was skipped or tagged early), another temperature
(the record is of a distribution that was not sampled from), a shift by one position. If none does
and the engine agrees with the learner on a cold cache, the record came from stale cached keys; if
the engine disagrees even cold, an operation differs.

Waits: the controller waits for `check`; it calls the scorer, which waits for nobody.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
from torch import Tensor

from ..errors import ConfigError
from ..trajectory import Bool, Float32, Group, Segment

Score = Callable[[Sequence[Segment], Mapping[str, Tensor] | None], list[Float32]]
NO_PROMISE = "standard:"  # contract of a learner whose engine, a stock one, has another by design
TEMPERATURES = tuple(round(0.1 * step, 1) for step in range(1, 21))


class WeightSource(Protocol):
    """Weights by version; `WeightStore` is one."""

    def versions(self) -> list[int]: ...

    def load(self, version: int) -> dict[str, Tensor]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """One token whose recorded and recomputed log-probability differ in at least one bit."""

    episode_id: str
    segment: int
    turn: int
    position: int
    version: int
    recorded: float
    recomputed: float
    contract_recorded: str
    contract_learner: str
    cause: str = "undiagnosed"

    def __str__(self) -> str:
        return (
            f"episode {self.episode_id} segment {self.segment} turn {self.turn} token {self.position} "
            f"version {self.version}: recorded {self.recorded:.9g}, recomputed {self.recomputed:.9g} "
            f"({self._kernels()}); {self.cause}"
        )

    def _kernels(self) -> str:
        if self.contract_recorded == self.contract_learner:
            return f"kernels {self.contract_learner}"
        return f"kernels recorded {self.contract_recorded}, learner {self.contract_learner}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ColdScore:
    """What the engine computes for a segment's tokens now, with nothing cached.

    version   of the weights that the engine holds
    logprobs  float32[T], NaN where nothing precedes the token
    """

    version: int
    logprobs: Float32


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditReport:
    """tokens audited, how many differ, and by how much; the first differences by name.

    max_abs_diff  infinite where a recomputed log-probability is not finite
    """

    tokens: int
    differing: int
    max_abs_diff: float
    differences: tuple[Difference, ...]

    def metrics(self) -> dict[str, float]:
        """The audit's figures; the largest difference is absent where there is none, or no finite one."""
        figures = {"audit/tokens": float(self.tokens), "audit/differing": float(self.differing)}
        if self.tokens and math.isfinite(self.max_abs_diff):
            figures["audit/max_abs_diff"] = self.max_abs_diff
        return figures


@dataclass(frozen=True, slots=True, kw_only=True)
class _Item:
    episode_id: str
    index: int
    segment: Segment


class Audit:
    """Audits a fixed share of the episodes, chosen by their id so that a resumed run audits the same.

    share            0 to 1, of the episodes
    contract         the learner's kernel contract hash
    keep_differences how many differing tokens a report names
    """

    def __init__(
        self, *, score: Score, weights: WeightSource, contract: str, share: float, keep_differences: int = 32
    ) -> None:
        self._score, self._weights, self._contract = score, weights, contract
        self._share, self._keep = share, keep_differences

    def check(self, groups: Sequence[Group]) -> AuditReport:
        """Rescore the chosen episodes' tokens of every version that is still kept.

        Raises ConfigError for a segment that other kernels than the learner's recorded.
        """
        items = self._items(groups)
        kept = set(self._weights.versions())
        versions = sorted({int(v) for item in items for v in item.segment.policy_version} & kept)
        tokens = differing = 0
        largest, named = 0.0, list[Difference]()
        for version in versions:
            at_version = [item for item in items if (item.segment.policy_version == version).any()]
            scores = self._score([item.segment for item in at_version], self._weights.load(version))
            for item, recomputed in zip(at_version, scores, strict=True):
                audited = item.segment.policy_version == version
                wrong = audited & different_bits(item.segment.behaviour_logprobs, recomputed)
                tokens += int(audited.sum())
                if wrong.any():
                    differing += int(wrong.sum())
                    largest = max(largest, largest_gap(item.segment.behaviour_logprobs, recomputed, wrong))
                    named += self._name(item, version, wrong, recomputed, self._keep - len(named))
        return AuditReport(tokens=tokens, differing=differing, max_abs_diff=largest, differences=tuple(named))

    def _items(self, groups: Sequence[Group]) -> list[_Item]:
        """The chosen episodes' segments with actions, each recorded by kernels that can be compared with."""
        items = [
            _Item(episode_id=t.episode_id, index=i, segment=s)
            for group in groups
            for t in group.kept
            if chosen(t.episode_id, self._share)
            for i, s in enumerate(t.segments)
            if s.num_actions
        ]
        if self._contract.startswith(NO_PROMISE):
            return items
        for item in items:
            if item.segment.contract != self._contract:
                raise ConfigError(
                    source=f"episode {item.episode_id}, segment {item.index}",
                    key="contract",
                    value=item.segment.contract,
                    why=f"but the learner computes with {self._contract!r}: their bits cannot be compared.",
                    remedy="Audit the run and go on with it on the kind of machine and with the versions of "
                    "torch and vLLM that made it; `rz-agent doctor` says what is installed here.",
                )
        return items

    def diagnose(self, segment: Segment, version: int, cold: ColdScore | None = None) -> str:
        """Name the single fault that reproduces the differing tokens of `segment` at `version`."""
        recorded = segment.behaviour_logprobs
        [honest] = self._score([segment], self._weights.load(version))
        wrong = (segment.policy_version == version) & different_bits(recorded, honest)
        if not wrong.any():
            return "no difference"
        for other in self._neighbours(version):
            [scores] = self._score([segment], self._weights.load(other))
            if not different_bits(recorded, scores)[wrong].any():
                return f"weights: the record is that of version {other}, not {version}"
        for temperature in TEMPERATURES:
            sampling = replace(segment.sampling, temperature=temperature)
            [scores] = self._score([replace(segment, sampling=sampling)], self._weights.load(version))
            if not different_bits(recorded, scores)[wrong].any():
                return f"temperature: the record is at {temperature}, not {segment.sampling.temperature}"
        for shift in (1, -1):
            if shifted_by(shift, recorded, honest, wrong):
                return f"shift: each record belongs to the token {shift:+d} beside it"
        return self._cause_by_cold_cache(segment, cold)

    def _cause_by_cold_cache(self, segment: Segment, cold: ColdScore | None) -> str:
        if cold is None:
            return "cache or kernels: ask the engine for a cold score to tell them apart"
        [learner] = self._score([segment], self._weights.load(cold.version))
        if different_bits(cold.logprobs, learner)[segment.action_mask].any():
            return "kernels: the engine differs on a cold cache too"
        return "stale cache: cold, the engine agrees with the learner; the record used cached keys"

    def _neighbours(self, version: int) -> list[int]:
        others = [v for v in self._weights.versions() if v != version]
        return sorted(others, key=lambda v: abs(v - version))[:8]

    def _name(
        self, item: _Item, version: int, wrong: Bool, recomputed: Float32, room: int
    ) -> list[Difference]:
        return [
            Difference(
                episode_id=item.episode_id,
                segment=item.index,
                turn=item.segment.turn_of(position),
                position=position,
                version=version,
                recorded=float(item.segment.behaviour_logprobs[position]),
                recomputed=float(recomputed[position]),
                contract_recorded=item.segment.contract,
                contract_learner=self._contract,
            )
            for position in np.flatnonzero(wrong)[: max(room, 0)].tolist()
        ]


def different_bits(a: Float32, b: Float32) -> Bool:
    """bool[T] where the float32 bit patterns differ: 0.0 and -0.0 differ, as do two NaN payloads."""
    left, right = np.ascontiguousarray(a, np.float32), np.ascontiguousarray(b, np.float32)
    differs: Bool = left.view(np.uint32) != right.view(np.uint32)
    return differs


def largest_gap(recorded: Float32, recomputed: Float32, wrong: Bool) -> float:
    """The largest distance between two columns where they differ; infinite beside a NaN or an infinity.

    >>> wrong = np.array([True, True])
    >>> largest_gap(np.float32([-1, -2]), np.float32([-1.5, np.nan]), wrong)
    inf
    """
    gaps = np.abs(recorded.astype(np.float64) - recomputed)[wrong]
    return float(np.where(np.isnan(gaps), np.inf, gaps).max())


def shifted_by(shift: int, recorded: Float32, honest: Float32, wrong: Bool) -> bool:
    """Whether each differing record equals the honest value `shift` positions on, in two places or more.

    A neighbour that is no action has no honest value and says nothing.
    """
    moved = np.roll(honest, -shift)
    if shift > 0:
        moved[-shift:] = np.nan
    else:
        moved[:-shift] = np.nan
    comparable = wrong & ~np.isnan(moved)
    return int(comparable.sum()) >= 2 and not different_bits(recorded, moved)[comparable].any()


def chosen(episode_id: str, share: float) -> bool:
    """Whether an episode is audited: a fixed function of its id, true for about `share` of the ids."""
    digest = hashlib.blake2b(episode_id.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") < share * 2**64
