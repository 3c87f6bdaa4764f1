"""The learner with its layers split over ranks, each a process of its own, on the tokens of the other sides.

    split_learner(model, config, segments) -> one Capture for each rank
        this process --Work in a folder--> torchrun --> tensor_rank.py x N --rank-n.pt in the folder--> here

Every rank keeps what it computes. What each holds a part of (its heads of queries, keys and values, its share
of the feed-forward and of the vocabulary) is put together here; what each has whole (embedding, norms of the
hidden state, output projection, down projection, log-probabilities) stays each rank's own, so that a sum over
ranks that went wrong on one of them alone is seen.
Waits: the caller for the ranks, see `rank_process.py`, which leaves none.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd
from pathlib import Path

import torch
from torch import Tensor

from ...errors import ConfigError
from ...learner.learner_config import LearnerConfig
from ...learner.megatron.architecture import Architecture
from ...trajectory import Segment
from .capture import Capture, Operation
from .forward_pass import operations
from .rank_process import run_ranks

WORK = "work.pt"
_PROGRAM = ("-m", "rz_agent.recipes.align.tensor_rank")


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What each rank is to score."""

    model: Path
    config: LearnerConfig
    segments: tuple[Segment, ...]


def check_ranks(architecture: Architecture, ranks: int) -> None:
    """Raise ConfigError where the model or this machine's GPUs cannot be split over that many ranks."""
    model = architecture
    together = gcd(model.heads, model.kv_heads, model.feed_forward, model.hidden, model.vocabulary)
    if together % ranks:
        raise ConfigError(
            source="command line",
            key="--tensor-parallel",
            value=ranks,
            why=f"does not divide {model.heads} heads, {model.kv_heads} key-value heads, feed-forward "
            f"{model.feed_forward}, hidden {model.hidden} and vocabulary {model.vocabulary}",
            remedy=f"Use {', '.join(str(n) for n in range(1, together + 1) if together % n == 0)}.",
        )
    if torch.cuda.is_available() and torch.cuda.device_count() < ranks:
        raise ConfigError(
            source="command line",
            key="--tensor-parallel",
            value=ranks,
            why="needs a GPU for each rank",
            remedy=f"Use {torch.cuda.device_count()} at most here.",
        )


def split_learner(model: Path, config: LearnerConfig, segments: Sequence[Segment]) -> list[Capture]:
    """What each of `config.tensor_parallel` ranks computes, all segments packed. Raises RanksFailed."""
    ranks = config.tensor_parallel
    with tempfile.TemporaryDirectory(prefix="rz-align-") as name:
        folder = Path(name)
        torch.save(Work(model=model.absolute(), config=config, segments=tuple(segments)), folder / WORK)
        run_ranks(_PROGRAM, folder, ranks)
        return read_captures(folder, ranks, Architecture.read(model))


def read_captures(folder: Path, ranks: int, architecture: Architecture) -> list[Capture]:
    """What the ranks left in the folder, in their order, with every operation whole."""
    held = [torch.load(folder / f"rank-{rank}.pt", weights_only=False) for rank in range(ranks)]
    whole = [Capture() for _ in held]
    for made, mine in zip(whole, held, strict=True):
        made.largest_step = mine.largest_step
    for operation in operations(architecture.layers, qk_norm=architecture.qk_norm):
        keys = list(held[0].rows(operation))
        if not keys:
            continue
        parts = [torch.stack([mine.rows(operation)[key] for key in keys]) for mine in held]
        widths = _widths(operation, architecture)
        for rank, made in enumerate(whole):
            made.add(operation, keys, _joined(parts, widths) if widths else parts[rank])
    return whole


def _widths(operation: Operation, model: Architecture) -> tuple[int, ...]:
    """Of the pieces of an output that are split over ranks, side by side; empty: every rank has all of it."""
    queries, keys = model.heads * model.head_dim, model.kv_heads * model.head_dim
    split = {
        "qkv": (queries, keys, keys),
        "q_norm": (queries,),
        "k_norm": (keys,),
        "rotary": (queries, keys),
        "attention": (queries,),
        "gate_up": (model.feed_forward, model.feed_forward),
        "silu_and_mul": (model.feed_forward,),
        "logits": (model.vocabulary,),
    }
    return split.get(operation.name, ())


def _joined(parts: Sequence[Tensor], widths: Sequence[int]) -> Tensor:
    """Each piece's parts of all ranks, then the next piece's."""
    pieces = [part.split_with_sizes([width // len(parts) for width in widths], 1) for part in parts]
    return torch.cat([part for piece in zip(*pieces, strict=True) for part in piece], 1)
