"""Two ranks, split by data, tensor or pipeline, make the update that one rank makes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from learner_rank import SPLITS, lonely_batch, settings, trained
from rz_agent.learner.learner import Learner
from tiny_learner import build_model

RANK = Path(__file__).with_name("learner_rank.py")


@pytest.fixture(
    scope="module", params=["qwen3", pytest.param("llama-untied", marks=[pytest.mark.slow, pytest.mark.long])]
)
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What one rank did in this process, and what each of two ranks did under torchrun."""
    root = tmp_path_factory.mktemp("parallel")
    family, _, untied = request.param.partition("-")
    build_model(root / "model", family=family, tied=not untied)
    alone = Learner(root / "model", settings())
    one = trained(alone, range(3))
    alone.save(root / "checkpoint")
    one["resumed"] = trained(alone, range(3, 5))
    launch = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        str(RANK),
    ]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(
        [*launch, *(str(root / name) for name in ("model", "checkpoint", ""))],
        env={**environment, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    ranks = [torch.load(root / f"rank-{rank}.pt", weights_only=False) for rank in (0, 1)]
    return {"root": root, "one": one, "ranks": ranks}


@pytest.mark.parametrize("split", SPLITS)
def test_updates_agree_with_one_rank(run: dict[str, Any], split: str) -> None:
    found, one = run["ranks"][0][split], run["one"]
    for mine, theirs in zip(found["figures"], one["figures"], strict=True):
        assert mine.keys() == theirs.keys()
        for name in mine.keys() - {"time/train_s"}:
            assert mine[name] == pytest.approx(theirs[name], rel=2e-4, abs=2e-5), name
    assert one["weights"].keys() == found["weights"].keys()
    for name, weight in one["weights"].items():
        torch.testing.assert_close(found["weights"][name], weight, rtol=0, atol=1e-4)
    for mine, theirs in zip(found["scores"], one["scores"], strict=True):
        np.testing.assert_allclose(mine, theirs, atol=1e-3)


@pytest.mark.parametrize("split", SPLITS)
def test_the_first_forward_has_the_bits_of_one_rank_however_it_is_split(
    run: dict[str, Any], split: str
) -> None:
    for mine, theirs in zip(run["ranks"][0][split]["first"], run["one"]["first"], strict=True):
        assert np.array_equal(mine, theirs, equal_nan=True)


@pytest.mark.parametrize("split", SPLITS)
def test_every_rank_reports_the_same(run: dict[str, Any], split: str) -> None:
    mine, theirs = (rank[split] for rank in run["ranks"])
    for a, b in zip(mine["figures"], theirs["figures"], strict=True):
        assert {k: v for k, v in a.items() if k != "time/train_s"} == {
            k: v for k, v in b.items() if k != "time/train_s"
        }
    assert all(torch.equal(mine["weights"][name], theirs["weights"][name]) for name in mine["weights"])
    assert all(
        np.array_equal(a, b, equal_nan=True) for a, b in zip(mine["scores"], theirs["scores"], strict=True)
    )


@pytest.mark.parametrize("split", SPLITS)
def test_a_bad_token_stops_every_rank_with_the_same_words(run: dict[str, Any], split: str) -> None:
    mine, theirs = (rank[split]["bad"] for rank in run["ranks"])
    assert mine == theirs
    assert mine.startswith("episode bad.1, segment 0, turn 0, token 2:")


@pytest.mark.parametrize("split", SPLITS)
def test_a_weight_that_one_rank_broke_stops_every_rank_with_the_same_words(
    run: dict[str, Any], split: str
) -> None:
    mine, theirs = (rank[split]["broken"] for rank in run["ranks"])
    assert mine == theirs
    assert mine.startswith("version 5: the update at learning rate 0.001")
    assert "weight not finite" in mine


@pytest.mark.parametrize("split", SPLITS)
def test_a_batch_with_less_work_than_replicas_trains_all_of_it(run: dict[str, Any], split: str) -> None:
    figures = run["ranks"][0][split]["lonely"]
    assert sum(figures["lag/hist"]) == 4
    assert len(lonely_batch()) == 1
    assert figures["update"] == 4.0


@pytest.mark.parametrize("split", SPLITS)
def test_a_checkpoint_of_one_rank_continues_on_two(run: dict[str, Any], split: str) -> None:
    found, one = run["ranks"][0][split]["resumed"], run["one"]["resumed"]
    for mine, theirs in zip(found["figures"], one["figures"], strict=True):
        assert mine["loss"] == pytest.approx(theirs["loss"], rel=2e-4, abs=2e-5)
        assert mine["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=2e-4)
    for name, weight in one["weights"].items():
        torch.testing.assert_close(found["weights"][name], weight, rtol=0, atol=1e-4)


def test_a_checkpoint_of_two_ranks_loads_on_one_bit_for_bit(run: dict[str, Any]) -> None:
    alone = Learner(run["root"] / "model", settings())
    alone.load(run["root"] / "tensor-checkpoint")
    assert alone.version == 3
    theirs = run["ranks"][0]["tensor"]["weights"]
    assert all(torch.equal(weight, theirs[name]) for name, weight in alone.weights().items())
