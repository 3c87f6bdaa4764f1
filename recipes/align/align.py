"""Engine and learner on the same tokens: which operation first computes other bits, and what made it; then
the other gates of a model that is to be trained (`gates.py`).

    engine under each condition --captures--> compared with the engine that is asked for one request at a time
    learner, one by one and packed --captures-->       "
    learner, split over ranks --captures-->            "

    align(model, ...) -> Report          Report.ok: every operation was seen, none differs, each gate holds

Invariant: nothing passes unseen. An operation of which a comparison has no rows is a fault of the comparison,
except what a condition cannot compute again (the logits of a prefill are not kept by the engine).
Waits: the caller for both sides, one after the other: minutes on a large model.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from ...errors import ConfigError
from ...kernels import operations as kernel_operations
from ...kernels.vllm_settings import KernelsName
from ...learner.learner import Learner
from ...learner.learner_config import LearnerConfig
from ...learner.megatron.architecture import Architecture
from ...rollout import vllm_device
from ...rollout.engine_config import DtypeName
from ...trajectory import Segment
from .capture import Capture, Key, Operation, Prefix, Result, compare
from .conditions import CROWD, GRAPHS, Plan, engine_conditions
from .forward_pass import LOGITS, LOGPROB, operations
from .gates import Gate, gradient_gate, optimizer_gate, trained, update_gate
from .learner_capture import Watched
from .speed import throughput_gate
from .tensor_parallel import check_ranks, split_learner
from .threshold import Threshold, threshold

GateName = Literal["forward", "gradient", "optimizer", "update", "throughput"]
GATES: tuple[GateName, ...] = ("forward", "gradient", "optimizer", "update", "throughput")
# Throughput needs a machine to itself, so it is asked for by name.
USUAL: tuple[GateName, ...] = GATES[:-1]
# A step that moves every element of a bfloat16 weight, and a decay to see.
_TRAINING: Mapping[str, Any] = {"lr": 1e-2, "weight_decay": 0.1}

SAYS: Mapping[str, str] = {
    "warm": "engine, prompts in the prefix cache",
    "pairs": "engine, two requests at a time",
    "crowd": "engine, all requests at once",
    "prefill": "engine, prefilled instead of decoded",
    "chunks": "engine, prompts cut into chunks",
    "graphs": "engine, CUDA graphs, all requests at once",
    "padding": "engine, CUDA graphs, padded",
    "learner": "learner, one sequence at a time",
    "packed": "learner, all sequences packed",
    "tensor_parallel": "learner, all sequences packed, tensor parallel",
}
# The engine computes them for sampled rows alone.
_UNSEEN = {"prefill": (LOGITS,)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """One condition against the engine alone.

    condition     a key of `SAYS`
    largest_step  tokens of its largest forward pass
    results       one for each operation, in the order they run; of several ranks the one that differs most
    ranks         over which the learner's layers were split
    """

    condition: str
    largest_step: int
    results: tuple[Result, ...]
    ranks: int = 1

    @property
    def title(self) -> str:
        """For people."""
        return SAYS[self.condition] + (f" {self.ranks}" if self.ranks > 1 else "")

    @property
    def first(self) -> Result | None:
        """The first operation that differs; None where none does."""
        return next(iter(self.differing), None)

    @property
    def differing(self) -> tuple[Result, ...]:
        return tuple(result for result in self.results if result.differing)

    @property
    def unseen(self) -> tuple[Operation, ...]:
        """Operations of which there was nothing to compare, but should have been."""
        expected = _UNSEEN.get(self.condition, ())
        return tuple(r.operation for r in self.results if not r.rows and r.operation not in expected)


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What was found.

    sequences, tokens   that were run, and how many of the tokens were sampled
    threshold           of the first operation that differs in a crowd; None where none does
    places              key of a row -> (sequence, position) of its token
    """

    model: str
    device: str
    kernels: str
    contract: str
    sequences: int
    tokens: int
    sampled: int
    comparisons: tuple[Comparison, ...]
    threshold: Threshold | None
    gates: tuple[Gate, ...]
    places: Mapping[Key, tuple[int, int]]

    @property
    def ok(self) -> bool:
        return all(gate.holds for gate in self.gates)

    def place(self, result: Result) -> tuple[int, int] | None:
        """(sequence, position) of the first token on which an operation differs."""
        return None if result.first is None else self.places.get(result.first)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "model": self.model,
            "device": self.device,
            "kernels": self.kernels,
            "contract": self.contract,
            "sequences": self.sequences,
            "tokens": self.tokens,
            "sampled": self.sampled,
            "gates": [asdict(gate) for gate in self.gates],
            "ok": self.ok,
            "threshold": None if self.threshold is None else self._threshold(self.threshold),
            "comparisons": [self._comparison(comparison) for comparison in self.comparisons],
        }

    def _threshold(self, found: Threshold) -> dict[str, Any]:
        return {"operation": str(found.operation), "tokens": found.tokens, "calls": list(found.calls)}

    def _comparison(self, comparison: Comparison) -> dict[str, Any]:
        rows = [
            {
                "operation": str(r.operation),
                "rows": r.rows,
                "differing": r.differing,
                "first_token": self.place(r),
                "largest": r.largest,
            }
            for r in comparison.results
        ]
        first = comparison.first
        return {
            "condition": comparison.condition,
            "ranks": comparison.ranks,
            "largest_step": comparison.largest_step,
            "first_operation": None if first is None else str(first.operation),
            "unseen": [str(operation) for operation in comparison.unseen],
            "operations": rows,
        }


def align(
    model: Path,
    *,
    dtype: DtypeName | None = None,
    kernels: KernelsName = "aligned",
    requests: int = 8,
    new_tokens: int = 16,
    gates: Sequence[GateName] = USUAL,
    tensor_parallel: int = 1,
    temperature: float = 1.0,
    seed: int = 0,
    progress: Callable[[str], None] = lambda said: None,
) -> Report:
    """Run both sides. Raises ConfigError for a model that cannot be trained.

    dtype    None: one that has aligned kernels on this device
    kernels  of the engine; the learner's are always the aligned ones
    gates    besides "forward", which everything else rests on
    tensor_parallel
             ranks over which the learner is split in one more condition; 1: there is none
    """
    architecture = Architecture.read(model)
    check_ranks(architecture, tensor_parallel)
    device = vllm_device.device()
    if requests < 2:
        raise ConfigError(
            source="align", key="requests", value=requests, why="is no company.", remedy="Use 2 or more."
        )
    plan = Plan.drawn(
        model,
        dtype=dtype or ("float32" if device == "cpu" else "bfloat16"),
        kernels=kernels,
        vocabulary=architecture.vocabulary,
        context=architecture.max_positions,
        requests=requests,
        new_tokens=new_tokens,
        temperature=temperature,
        seed=seed,
    )
    names = operations(architecture.layers, qk_norm=architecture.qk_norm)
    reference, segments, comparisons = asyncio.run(_engine_side(plan, names, progress))
    crowd = next(c.first for c in comparisons if c.condition == "crowd")
    changes = asyncio.run(_threshold(plan, crowd, reference, segments, architecture.vocabulary, progress))
    watched = Watched(kernel_operations("aligned", device))
    learner = Learner(model, LearnerConfig(dtype=plan.dtype, kernels=watched.name, **_TRAINING), watched)
    watched.watch(learner)
    comparisons += _learner_side(learner, watched, reference, segments, tensor_parallel, names, progress)
    watched.rest()
    return Report(
        model=str(model),
        device=device,
        kernels=kernels,
        contract=learner.contract,
        sequences=len(segments),
        tokens=sum(map(len, segments)),
        sampled=sum(s.num_actions for s in segments),
        comparisons=tuple(comparisons),
        threshold=changes,
        gates=(
            _forward_gate(comparisons),
            *_update_gates(gates, learner, segments, plan, progress),
            *_speed_gates(gates, plan, architecture.vocabulary, progress),
        ),
        places=_places(segments),
    )


def _forward_gate(comparisons: Sequence[Comparison]) -> Gate:
    broken = [c for c in comparisons if c.first]
    unseen = [c for c in comparisons if c.unseen]
    says = f"{len(broken)} of {len(comparisons)} conditions have an operation that differs"
    if unseen:
        says += f"; nothing to compare of {unseen[0].unseen[0]} and others under {unseen[0].condition!r}"
    return Gate(name="forward", holds=not broken and not unseen, says=says)


def _update_gates(
    names: Sequence[GateName], learner: Learner, segments: Sequence[Segment], plan: Plan,
    progress: Callable[[str], None],
) -> list[Gate]:  # fmt: skip
    found: list[Gate] = []
    asked = [name for name in ("gradient", "optimizer", "update") if name in names]
    if not asked:
        return found
    progress("one update of the learner")
    update = trained(learner, segments)
    for name in asked:
        progress(f"gate {name}")
        if name == "gradient":
            found.append(gradient_gate(update))
        elif name == "optimizer":
            found.append(optimizer_gate(update))
        else:
            found.append(asyncio.run(update_gate(update, plan)))
    return found


def _speed_gates(
    names: Sequence[GateName], plan: Plan, vocabulary: int, progress: Callable[[str], None]
) -> list[Gate]:
    if "throughput" not in names:
        return []
    progress("gate throughput")
    return [asyncio.run(throughput_gate(plan, vocabulary))]


async def _engine_side(
    plan: Plan, names: Sequence[Operation], progress: Callable[[str], None]
) -> tuple[Capture, tuple[Segment, ...], list[Comparison]]:
    """The engine alone, what it sampled, and what the other conditions make of it."""
    reference, sampled = Capture(), tuple[Segment, ...]()
    comparisons: list[Comparison] = []
    progress("engine, one request at a time")
    async for name, capture, segments in engine_conditions(plan):
        if name == "alone":
            reference, sampled = capture, segments
            continue
        progress(SAYS[name])
        seen = (LOGPROB,) if name in GRAPHS else names
        comparisons.append(_compared(name, reference, capture, seen))
    return reference, sampled, comparisons


def _learner_side(
    learner: Learner, watched: Watched, reference: Capture, segments: Sequence[Segment], ranks: int,
    names: Sequence[Operation], progress: Callable[[str], None],
) -> Iterator[Comparison]:  # fmt: skip
    """The learner here under each condition, then as so many ranks, if that is more than one."""
    for condition, packs in (("learner", [[s] for s in segments]), ("packed", [list(segments)])):
        progress(SAYS[condition])
        capture = watched.fresh()
        for pack in packs:
            learner.score(pack)
        yield _compared(condition, reference, capture, names)
    if ranks > 1:
        progress(f"{SAYS['tensor_parallel']} {ranks}")
        threads = max(1, (os.cpu_count() or 1) // ranks)
        config = learner.config.model_copy(update={"tensor_parallel": ranks, "threads": threads})
        yield ranks_compared(reference, split_learner(learner.model_dir, config, segments), names)


async def _threshold(
    plan: Plan, first: Result | None, reference: Capture, segments: Sequence[Segment], vocabulary: int,
    progress: Callable[[str], None],
) -> Threshold | None:  # fmt: skip
    """From how many tokens on a step changes what a crowd changes first."""
    if first is None or first.first is None or first.operation in (LOGITS, LOGPROB):  # not of every row
        return None
    progress(f"how many tokens change {first.operation}")
    sequence, position = _places(segments)[first.first]
    ids = segments[sequence].token_ids[: position + 1].tolist()
    return await threshold(plan, first.operation, reference, ids, vocabulary)


def _compared(name: str, reference: Capture, capture: Capture, names: Sequence[Operation]) -> Comparison:
    if name == "crowd" and capture.largest_step <= CROWD:
        raise AssertionError(f"the crowd's largest step held {capture.largest_step} tokens")
    results = tuple(compare(reference, capture, names))
    return Comparison(condition=name, largest_step=capture.largest_step, results=results)


def ranks_compared(reference: Capture, captures: Sequence[Capture], names: Sequence[Operation]) -> Comparison:
    """Of each operation the rank on which it differs most; one that a rank has not seen is unseen."""
    by_rank = zip(*(compare(reference, capture, names) for capture in captures), strict=True)
    return Comparison(
        condition="tensor_parallel",
        largest_step=captures[0].largest_step,
        results=tuple(max(found, key=lambda result: (result.differing, -result.rows)) for found in by_rank),
        ranks=len(captures),
    )


def _places(segments: Sequence[Segment]) -> dict[Key, tuple[int, int]]:
    return {
        key: (index, position)
        for index, segment in enumerate(segments)
        for position, key in enumerate(Prefix().extend(segment.token_ids.tolist()))
    }
