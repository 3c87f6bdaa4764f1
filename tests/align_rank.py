"""A rank of `test_align_ranks.py`, started by torchrun: `tensor_rank` in a build with faults.

align_rank.py FOLDER      one forward pass for each of `FAULTS`, each into a folder of its name
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rz_agent.learner.learner import Learner
from rz_agent.learner.megatron import whole_sums
from rz_agent.recipes.align.rank_process import rank_of
from rz_agent.recipes.align.tensor_rank import read_work, write_capture
from torch import Tensor


@contextlib.contextmanager
def one_bit_of_a_sum_on_rank_1(learner: Learner) -> Iterator[None]:
    def flip(row: Any, x: Any, output: tuple[Tensor, None]) -> tuple[Tensor, None]:
        whole = output[0].clone()
        whole.view(torch.int16).view(-1)[0] ^= dist.get_rank()
        return whole, None

    row = learner.model.module.decoder.layers[1].self_attention.linear_proj
    hook = row.register_forward_hook(flip, prepend=True)
    yield
    hook.remove()


@contextlib.contextmanager
def sums_of_parts(learner: Learner) -> Iterator[None]:
    """What a usual stack does."""

    def added(x: Tensor, weight: Tensor, share: Any, group: Any) -> Tensor:
        part = x @ weight.T
        dist.all_reduce(part, group=group)
        return part

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(whole_sums, "linear", added)
        yield


@contextlib.contextmanager
def another_weight_on_rank_1(learner: Learner) -> Iterator[None]:
    weight = learner.model.module.decoder.layers[1].mlp.linear_fc1.weight
    kept = weight.detach().clone()
    weight.data[0, 0] += dist.get_rank()
    learner.model.weights.advance()
    yield
    weight.data.copy_(kept)
    learner.model.weights.advance()


FAULTS: dict[str, Callable[[Learner], AbstractContextManager[None]]] = {
    "": lambda learner: contextlib.nullcontext(),
    "layer 1 output_projection": one_bit_of_a_sum_on_rank_1,
    "layer 0 output_projection": sums_of_parts,
    "layer 1 gate_up": another_weight_on_rank_1,
}
"""By what has to be named, in runs of one learner."""


def main(folder: Path) -> None:
    with rank_of(folder):
        work, learner, watched = read_work(folder)
        for name, planted in FAULTS.items():
            (folder / name).mkdir(exist_ok=True)
            capture = watched.fresh()
            with planted(learner):
                learner.score(work.segments)
            write_capture(folder / name, capture)
        dist.barrier()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
