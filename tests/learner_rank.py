"""One rank of `test_learner_parallel.py`, started by torchrun: trains on every split of two ranks in turn.

    learner_rank.py MODEL CHECKPOINT OUT

Megatron's groups are per process, so they are taken down between the splits; a learner never does that.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from rz_agent.errors import NonFinite
from rz_agent.learner.learner import Learner
from rz_agent.learner.learner_config import LearnerConfig
from rz_agent.learner.megatron import checkpoint
from tiny_learner import group, ragged_groups, segment

SPLITS: dict[str, dict[str, int]] = {
    "data": {},
    "tensor": {"tensor_parallel": 2},
    "pipeline": {"pipeline_parallel": 2},
}


def settings(**options: Any) -> LearnerConfig:
    """Small micro-batches, so that there are several and replicas get unequal work."""
    return LearnerConfig(**{"lr": 1e-3, "micro_batch_tokens": 40, "clip_grad": 1.0, **options})


def trained(learner: Learner, updates: range) -> dict[str, Any]:
    """Scores before and after training on the batches of these updates, figures and weights."""
    segments = [held for g in ragged_groups() for episode in g for held in episode.segments]
    first = learner.score(segments)
    figures = [learner.train(ragged_groups(update)) for update in updates]
    weights = learner.weights()
    return {"first": first, "figures": figures, "weights": weights, "scores": learner.score(segments)}


def lonely_batch() -> list[Any]:
    """One segment with actions: there is work for one replica only."""
    import numpy as np

    rng = np.random.default_rng(0)
    return [group("g", [(1.0, [segment(rng, [(3, 4)])]), (0.0, [])])]


def stopped_by_a_bad_token(learner: Learner) -> str:
    """The message of the error that a ratio that is not finite raises on this rank."""
    import numpy as np

    rng = np.random.default_rng(0)
    far = segment(rng, [(2, 3)], logprobs=np.full(5, -200.0, np.float32))
    try:
        learner.train([group("bad", [(1.0, [segment(rng, [(2, 3)])]), (0.0, [far])])])
    except NonFinite as error:
        return str(error)
    return "no error"


def stopped_by_a_broken_weight(learner: Learner) -> str:
    """The message of the error on this rank when a step gives rank 1 a weight that is not finite."""
    if dist.get_rank() == 1:
        _, state = next(checkpoint._states(learner.optimizer.optimizer))
        state["exp_avg"].view(-1)[0] = float("inf")
    try:
        learner.train(ragged_groups())
    except NonFinite as error:
        return f"version {learner.version}: {error}"
    return "no error"


def main(model: Path, saved: Path, out: Path) -> None:
    found: dict[str, Any] = {}
    for name, split in SPLITS.items():
        learner = Learner(model, settings(**split))
        found[name] = trained(learner, range(3))
        if name == "tensor":
            learner.save(out / "tensor-checkpoint")
        found[name]["bad"] = stopped_by_a_bad_token(learner)
        found[name]["lonely"] = learner.train(lonely_batch())
        resumed = Learner(model, settings(**split))
        resumed.load(saved)
        found[name]["resumed"] = trained(resumed, range(3, 5))
        found[name]["broken"] = stopped_by_a_broken_weight(resumed)
        parallel_state.destroy_model_parallel()
    torch.save(found, out / f"rank-{dist.get_rank()}.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*(Path(argument) for argument in sys.argv[1:]))
