"""`rz-agent align`: every operation of both sides is compared, and a fault in any of them is named."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rz_agent import align_cli
from rz_agent.errors import ConfigError
from rz_agent.kernels import operations as kernel_operations
from rz_agent.learner.learner import Learner
from rz_agent.learner.learner_config import LearnerConfig
from rz_agent.recipes.align.align import SAYS, align
from rz_agent.recipes.align.capture import Capture, Operation, Prefix, Result, compare
from rz_agent.recipes.align.conditions import GRAPHS, EngineRun, Plan
from rz_agent.recipes.align.forward_pass import operations
from rz_agent.recipes.align.gates import ULPS, gradient_gate, optimizer_gate, trained
from rz_agent.recipes.align.learner_capture import OutOfOrder, Watched
from rz_agent.rollout import vllm_device
from rz_agent.trajectory import Segment
from tiny_learner import VOCABULARY, build_model

LAYERS = 2
NAMES = operations(LAYERS, qk_norm=True)
X = Operation(None, "x")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("align") / "model"
    build_model(folder, layers=LAYERS)
    return folder


# --- captures ----------------------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 2**31 - 1)), st.integers(0, 40))
def test_a_token_has_one_key_however_its_sequence_was_cut(ids: list[int], cut: int) -> None:
    cut = min(cut, len(ids))
    whole, parts = Prefix().extend(ids), Prefix()
    assert parts.extend(ids[:cut]) + parts.extend(ids[cut:]) == whole
    assert len(set(whole)) == len(ids)
    assert whole[1:] != Prefix().extend(ids[1:]) or len(ids) < 2  # what came before counts


def compared(left: Sequence[float], right: Sequence[float]) -> Result:
    """Two captures of one operation: row i of each belongs to token i."""
    mine, theirs = Capture(), Capture()
    for capture, values in ((mine, left), (theirs, right)):
        capture.add(X, Prefix().extend(range(len(values))), torch.tensor(values)[:, None])
    (result,) = compare(mine, theirs, [X])
    return result


def test_rows_are_compared_by_their_bits_and_only_where_both_have_them() -> None:
    nan = float("nan")
    assert compared([1.0, nan], [1.0, nan, 3.0]).differing == 0
    assert compared([0.0], [-0.0]).differing == 1
    found = compared([1.0, 2.0, 3.0, 4.0], [1.0, 2.5, 3.0, 4.25])
    assert (found.rows, found.differing, found.largest) == (4, 2, 0.5)
    assert found.first == Prefix().extend(range(2))[-1]
    assert compared([], [1.0]).rows == 0


def test_padding_is_no_row_and_a_missing_row_is_an_error() -> None:
    capture, keys = Capture(), Prefix().extend([1, 2])
    capture.add(X, keys, torch.arange(8.0).view(4, 2))
    assert [row.tolist() for row in capture.rows(X).values()] == [[0, 1], [2, 3]]
    with pytest.raises(ValueError, match="1 rows for 2 tokens"):
        capture.add(X, keys, torch.zeros(1, 2))


# --- faults ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sampled:
    """What one engine computed and drew, one request at a time."""

    model: Path
    capture: Capture
    segments: tuple[Segment, ...]


@pytest.fixture(scope="module")
def sampled(model: Path) -> Sampled:
    plan = Plan.drawn(
        model, dtype="float32", kernels="aligned", vocabulary=VOCABULARY, context=512, requests=3,
        new_tokens=4, temperature=0.7, seed=0,
    )  # fmt: skip

    async def run() -> Sampled:
        async with EngineRun.of(plan, plan.step_tokens) as engine:
            return Sampled(model, *await engine.sampled(1))

    return asyncio.run(run())


class Faulty:
    """The aligned operations, but for one call of one of them: its first row is off by one bit."""

    def __init__(self, kind: str, call: int) -> None:
        self._real = kernel_operations("aligned")
        self._kind, self._call = kind, call
        self.name = self._real.name

    def __getattr__(self, name: str) -> Any:
        real = getattr(self._real, name)
        return self._wrong(real) if name == self._kind else real

    def _wrong(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def wrong(*args: Any) -> Any:
            output = real(*args)
            self._call -= 1
            if self._call == -1:
                first = output[0] if isinstance(output, tuple) else output
                first.view(torch.int32).view(len(first), -1)[0, 0] ^= 1
            return output

        return wrong


def judged(sampled: Sampled, inner: Any) -> list[Result]:
    """The learner with these operations, one sequence at a time, against the engine."""
    watched = Watched(inner)
    learner = Learner(sampled.model, LearnerConfig(kernels="aligned"), watched)
    watched.watch(learner)
    capture = watched.fresh()
    for segment in sampled.segments:
        learner.score([segment])
    return list(compare(sampled.capture, capture, NAMES))


def test_the_learner_computes_every_operation_as_the_engine_does(sampled: Sampled) -> None:
    results = judged(sampled, kernel_operations("aligned"))
    tokens = sum(len(segment) - 1 for segment in sampled.segments)  # the last one is fed to nobody
    actions = sum(segment.num_actions for segment in sampled.segments)
    assert [result.operation for result in results] == list(NAMES)
    assert {result.rows for result in results[:-2]} == {tokens}
    assert [result.rows for result in results[-2:]] == [actions, actions]
    assert [str(result.operation) for result in results if result.differing] == []


@pytest.mark.parametrize(
    ("kind", "call", "named"),
    [
        ("rms_norm", 0, "layer 0 input_norm"),
        ("linear", 0, "layer 0 qkv"),
        ("rms_norm", 1, "layer 0 q_norm"),
        ("rms_norm", 4, "layer 1 k_norm"),
        ("rotary", 1, "layer 1 rotary"),
        ("attention", 0, "layer 0 attention"),
        ("linear", 5, "layer 1 output_projection"),
        ("add_rms_norm", 2, "layer 1 post_norm"),
        ("add_rms_norm", 3, "final_norm"),
        ("linear", 2, "layer 0 gate_up"),
        ("silu_and_mul", 1, "layer 1 silu_and_mul"),
        ("linear", 7, "layer 1 down"),
        ("linear", 8, "logits"),
        ("token_logprobs", 0, "logprob"),
    ],
)
def test_one_wrong_bit_of_any_operation_is_named(sampled: Sampled, kind: str, call: int, named: str) -> None:
    results = judged(sampled, Faulty(kind, call))
    first = next(result for result in results if result.differing)
    assert str(first.operation) == named
    assert first.differing == 1
    segment = sampled.segments[0]
    keys, prompt = Prefix().extend(segment.token_ids.tolist()), len(segment) - segment.num_actions
    expected = {"logits": prompt - 1, "logprob": prompt}.get(named, 0)
    assert keys.index(first.first or b"") == expected


def test_operations_in_another_order_are_an_error(sampled: Sampled) -> None:
    watched = Watched(kernel_operations("aligned"))
    learner = Learner(sampled.model, LearnerConfig(kernels="aligned"), watched)
    watched.watch(learner)
    watched.fresh()
    norm = learner.model.module.decoder.layers[0].input_layernorm
    norm.forward = lambda hidden: (hidden, hidden)  # a layer without its first norm
    with pytest.raises(OutOfOrder, match="ran linear where layer 0 input_norm is norm"):
        learner.score([sampled.segments[0]])


# --- gates -------------------------------------------------------------------------------------------------


def test_a_wrong_gradient_and_a_wrong_step_are_seen(sampled: Sampled) -> None:
    learner = Learner(sampled.model, LearnerConfig(lr=1e-2, weight_decay=0.1))
    update = trained(learner, sampled.segments)
    assert gradient_gate(update).holds
    assert optimizer_gate(update).holds
    name = "model.layers.1.mlp.down_proj.weight"
    doubled = {**update.gradients, name: 2 * update.gradients[name]}
    assert not gradient_gate(replace(update, gradients=doubled)).holds
    assert "computed again, 1 of" in gradient_gate(replace(update, again=doubled)).says
    assert not gradient_gate(replace(update, again=doubled)).holds
    stale = {**update.after, name: update.before[name]}
    assert not optimizer_gate(replace(update, after=stale)).holds
    off = {**update.after, name: update.after[name] * (1 + 4 * ULPS * torch.finfo(torch.float32).eps)}
    assert not optimizer_gate(replace(update, after=off)).holds


# --- the command -------------------------------------------------------------------------------------------


def align_command(*arguments: str) -> subprocess.CompletedProcess[str]:
    """In a process of its own: vLLM keeps the streams that it finds when it is imported."""
    command = [sys.executable, "-m", "rz_agent.cli", "align", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)


@pytest.mark.slow
def test_a_model_whose_gates_hold_is_aligned(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "report.json"
    ranks = 1 if torch.cuda.device_count() == 1 else 2
    options = ("--dtype", "bfloat16", "--tensor-parallel", str(ranks), "--json", str(out))
    done = align_command(str(model), *options)
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    report = json.loads(out.read_text())
    assert [gate["holds"] for gate in report["gates"]] == [True] * 4
    seen = {c["condition"]: c for c in report["comparisons"]}
    impossible = {
        *(GRAPHS if vllm_device.device() == "cpu" else ()),
        *(["tensor_parallel"] if ranks == 1 else ()),
    }
    assert seen.keys() == SAYS.keys() - impossible
    assert report["threshold"] is None
    for comparison in report["comparisons"]:
        assert comparison["first_operation"] is None
        if comparison["condition"] in GRAPHS:
            assert [o["operation"] for o in comparison["operations"]] == ["logprob"]
            continue
        assert len(comparison["operations"]) == len(NAMES)
        unseen = [o["operation"] for o in comparison["operations"] if not o["rows"]]
        assert unseen == (["logits"] if comparison["condition"] == "prefill" else [])
    assert seen["crowd"]["largest_step"] > 256
    assert (f"{SAYS['tensor_parallel']} {ranks}  " in done.stdout) == (ranks > 1)
    assert max(comparison["ranks"] for comparison in report["comparisons"]) == ranks


@pytest.mark.slow
def test_a_stock_engine_is_not_and_the_operation_and_its_token_are_named(model: Path) -> None:
    options = ("--dtype", "bfloat16", "--gates", "forward", "--new-tokens", "4")
    done = align_command(str(model), "--kernels", "standard", *options)
    assert done.returncode == 1, done.stdout + done.stderr[-4000:]
    (line,) = [line for line in done.stdout.splitlines() if line.startswith(SAYS["packed"] + "  ")]
    assert "layer 0" in line
    assert "sequence" in line
    assert "forward  FAILS" in done.stdout


@pytest.mark.parametrize(
    ("option", "value"), [("gates", "forward,speed"), ("kernels", "fast"), ("dtype", "float16")]
)
def test_a_wrong_option_is_refused_by_name(tmp_path: Path, option: str, value: str) -> None:
    with pytest.raises(ConfigError) as refused:
        align_cli.align(tmp_path, **{option: value})  # type: ignore[arg-type]
    assert refused.value.key == f"--{option}"
    assert refused.value.remedy


def test_one_request_is_no_company(model: Path) -> None:
    with pytest.raises(ConfigError, match="requests"):
        align(model, requests=1)
