"""`rz-agent align --tensor-parallel`: what several ranks compute is compared, and a fault named."""

from __future__ import annotations

import multiprocessing
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from align_rank import FAULTS
from rz_agent.errors import ConfigError
from rz_agent.kernels import operations as kernel_operations
from rz_agent.learner.learner import Learner
from rz_agent.learner.learner_config import LearnerConfig
from rz_agent.learner.megatron.architecture import Architecture
from rz_agent.recipes.align.align import align, ranks_compared
from rz_agent.recipes.align.capture import Capture
from rz_agent.recipes.align.forward_pass import operations
from rz_agent.recipes.align.learner_capture import Watched
from rz_agent.recipes.align.rank_process import RanksFailed, run_ranks
from rz_agent.recipes.align.tensor_parallel import WORK, Work, read_captures
from rz_agent.rollout import vllm_device
from tiny_learner import build_model, segment

FAULTY = str(Path(__file__).with_name("align_rank.py"))
# Ranks that need no learner, and so start at once: of two, the second fails alone, or both stay.
PLAIN = """
import os, pathlib, sys, time
from rz_agent.recipes.align.rank_process import rank_of
what, folder = sys.argv[1], pathlib.Path(sys.argv[2])
with rank_of(folder):
    if what == "fail" and os.environ["RANK"] == "1":
        raise MemoryError("no memory left")
    (folder / ("process-" + os.environ["RANK"])).touch()
    time.sleep(600)
"""
NAMES = operations(2, qk_norm=True)


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Work:
    model = tmp_path_factory.mktemp("align_ranks") / "model"
    build_model(model)
    rng = np.random.default_rng(0)
    segments = tuple(segment(rng, [(20, 10)], temperature=0.7) for _ in range(4))
    dtype = "float32" if vllm_device.device() == "cpu" else "bfloat16"
    config = LearnerConfig.model_validate({"tensor_parallel": 2, "threads": 1, "dtype": dtype})
    return Work(model=model, config=config, segments=segments)


def alone(work: Work) -> Capture:
    """One rank, which other tests compare with an engine."""
    watched = Watched(kernel_operations("aligned", vllm_device.device()))
    learner = Learner(work.model, work.config.model_copy(update={"tensor_parallel": 1}), watched)
    watched.watch(learner)
    capture = watched.fresh()
    learner.score(work.segments)
    return capture


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.device_count() == 1, reason="each rank needs a GPU of its own")
def test_two_ranks_have_the_bits_of_one_and_a_fault_of_the_split_is_named(work: Work, tmp_path: Path) -> None:
    reference, architecture = alone(work), Architecture.read(work.model)
    torch.save(work, tmp_path / WORK)
    run_ranks([FAULTY], tmp_path, 2)
    for name in FAULTS:
        found = ranks_compared(reference, read_captures(tmp_path / name, 2, architecture), NAMES)
        assert [result.operation for result in found.results] == list(NAMES)
        assert found.unseen == ()
        assert str(found.first.operation if found.first else "") == name
    one_bit = ranks_compared(
        reference, read_captures(tmp_path / "layer 1 output_projection", 2, architecture), NAMES
    )
    assert one_bit.first is not None
    assert one_bit.first.differing == 1
    assert found.title.endswith("tensor parallel 2")


def left_of(folder: Path) -> list[str]:
    """Command lines of processes that were started for this folder."""
    lines = [" ".join(process.info["cmdline"] or ()) for process in psutil.process_iter(["cmdline"])]
    return [line for line in lines if str(folder) in line]


@pytest.fixture
def plain(tmp_path: Path) -> str:
    (tmp_path / "plain.py").write_text(PLAIN)
    return str(tmp_path / "plain.py")


@pytest.mark.slow
def test_a_rank_that_fails_is_named_and_none_is_left(plain: str, tmp_path: Path) -> None:
    with pytest.raises(RanksFailed, match="of 2 ranks rank 1 failed: MemoryError: no memory left"):
        run_ranks([plain, "fail"], tmp_path, 2)
    assert left_of(tmp_path) == []


@pytest.mark.slow
def test_ranks_end_with_the_process_that_asked_for_them(plain: str, tmp_path: Path) -> None:
    """Killed, it cannot end them: they see that it is gone."""
    fork = multiprocessing.get_context("fork")
    asking = fork.Process(target=run_ranks, args=([plain, "stay"], tmp_path, 2))
    asking.start()
    until = time.monotonic() + 100
    while len(list(tmp_path.glob("process-*"))) < 2 and time.monotonic() < until:
        time.sleep(0.1)
    assert len(left_of(tmp_path)) >= 3  # two ranks and their launcher
    asking.kill()
    asking.join()
    until = time.monotonic() + 60
    while left_of(tmp_path) and time.monotonic() < until:
        time.sleep(0.1)
    assert left_of(tmp_path) == []


@pytest.mark.parametrize("ranks", [3, 4])
def test_ranks_that_the_model_does_not_allow_are_refused_with_those_it_does(work: Work, ranks: int) -> None:
    with pytest.raises(
        ConfigError, match=f"--tensor-parallel = {ranks} does not divide 4 heads, 2 key"
    ) as refused:
        align(work.model, tensor_parallel=ranks)
    assert refused.value.remedy == "Use 1, 2."
