"""One rank of the learner that `tensor_parallel.py` runs: the folder's `Work` in, this rank's capture out.

python -m torch.distributed.run --nproc-per-node RANKS -m rz_agent.recipes.align.tensor_rank FOLDER
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist

from ...kernels import operations as kernel_operations
from ...learner.learner import Learner
from ...learner.megatron.device import device
from ...learner.megatron.parallel import leave
from .capture import Capture
from .learner_capture import Watched
from .rank_process import rank_of
from .tensor_parallel import WORK, Work


def read_work(folder: Path) -> tuple[Work, Learner, Watched]:
    """What to do, and this rank's learner, watched."""
    work: Work = torch.load(folder / WORK, weights_only=False)
    watched = Watched(kernel_operations("aligned", device().type))
    learner = Learner(work.model, work.config, watched)
    watched.watch(learner)
    return work, learner, watched


def write_capture(folder: Path, capture: Capture) -> None:
    torch.save(capture, folder / f"rank-{dist.get_rank()}.pt")


def main(folder: Path) -> None:
    with rank_of(folder):
        work, learner, watched = read_work(folder)
        capture = watched.fresh()
        learner.score(work.segments)
        write_capture(folder, capture)
        dist.barrier()
        leave()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
