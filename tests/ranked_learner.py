"""One rank of `test_learner_ranks.py`, started by torchrun: a ranked learner without a run around it.

ranked_learner.py MODEL OUT FAILURE     FAILURE: "none", "raise" or "kill", of rank 1 while it trains
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist
from rz_agent.errors import NonFinite
from rz_agent.learner.diagnostics import Metrics
from rz_agent.learner.learner import Learner
from rz_agent.learner.learner_config import LearnerConfig
from rz_agent.learner.ranks import LearnerOfRanks, Link, RankFailed, follow, gathered, launched
from rz_agent.trajectory import Group
from tiny_learner import group, ragged_groups, segment

GRACE = timedelta(seconds=15)


class Failing(Learner):
    """The learner of a rank that fails alone: its machine is out of memory, or gone."""

    failure = "none"

    def train(self, groups: Sequence[Group]) -> Metrics:
        if self.failure == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        raise MemoryError("no memory left on rank 1")


def bad_groups() -> list[Group]:
    """A batch with a token whose importance ratio is infinite."""
    import numpy as np

    rng = np.random.default_rng(0)
    far = segment(rng, [(2, 3)], logprobs=np.full(5, -200.0, np.float32))
    return [group("bad", [(1.0, [segment(rng, [(2, 3)])]), (0.0, [far])])]


def lead(learner: LearnerOfRanks, out: Path) -> None:
    """Rank 0: a good update, one that fails everywhere alike, another good one."""
    found: dict[str, object] = {"first": learner.train(ragged_groups())}
    try:
        learner.train(bad_groups())
    except NonFinite as error:
        found["bad"] = str(error)
    found["second"] = learner.train(ragged_groups(1))
    learner.save(out / "checkpoint")
    learner.export(out / "exported")
    threads = len(os.listdir("/proc/self/task"))
    learner.close()
    found["threads"] = [threads, len(os.listdir("/proc/self/task"))]
    (out / "found.json").write_text(json.dumps(found))


def main(model: Path, out: Path, failure: str) -> None:
    rank, _ = launched()
    # Its launcher ends a rank as soon as another has died. A rank has to end by itself, and to say why.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    config = LearnerConfig(lr=1e-3, micro_batch_tokens=40)
    try:
        if rank == 0:
            learner = gathered(lambda: Learner(model, config), GRACE)
            assert isinstance(learner, LearnerOfRanks)
            lead(learner, out)
        else:
            Failing.failure = failure
            kind = Learner if failure == "none" else Failing
            follow(kind(model, config), Link(GRACE))
        assert not dist.is_initialized()
    except RankFailed as error:
        (out / f"failed-{rank}.txt").write_text(str(error))
        raise


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
