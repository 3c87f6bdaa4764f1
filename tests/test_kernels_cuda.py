"""The Triton kernels of `kernels/cuda*.py`, run by Triton's interpreter where there is no GPU.

What only a GPU can show (FlashAttention-3, equality with a live engine) is in benchmarks/gpu_alignment.py.
"""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from rz_agent.errors import ConfigError
from rz_agent.kernels import (
    cuda,
    cuda_attention,
    cuda_gradients,
    cuda_linear,
    cuda_rows,
    formulas,
    vllm_settings,
    vllm_stamps,
)
from rz_agent.kernels.attention_backward import attention_gradients
from rz_agent.rollout import vllm_device
from rz_agent.rollout.engine_config import EngineConfig

# Triton reads this when it is imported, so a process that has imported it already cannot turn it on.
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
runnable = pytest.mark.skipif(
    not (INTERPRETED or torch.cuda.is_available()), reason="runs in the interpreter's process"
)
Operation = Callable[..., Any]
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
CLOSE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}  # the interpreter rounds to bfloat16 towards zero


def drawn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def close(found: Tensor, wanted: Tensor, tolerance: float | None = None) -> None:
    tolerance = CLOSE[found.dtype] if tolerance is None else tolerance
    torch.testing.assert_close(found, wanted.to(found.dtype), rtol=tolerance, atol=tolerance)


@pytest.mark.slow
@pytest.mark.skipif(INTERPRETED or torch.cuda.is_available(), reason="the kernels run in this process")
def test_the_kernels_run_in_tritons_interpreter() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__]
    run = subprocess.run(command, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout


@runnable
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [32, 96])
def test_row_operations_compute_the_formulas(dtype: torch.dtype, width: int) -> None:
    x, residual = drawn(5, width, dtype=dtype), drawn(5, width, dtype=dtype, seed=1)
    weight = drawn(width, dtype=dtype, seed=2)
    close(cuda_rows.rms_norm(x, weight, 1e-6), formulas.rms_norm(x, weight, 1e-6))
    for found, wanted in zip(
        cuda_rows.add_rms_norm(x, residual, weight, 1e-6),
        formulas.add_rms_norm(x, residual, weight, 1e-6),
        strict=True,
    ):
        close(found, wanted)
    close(cuda_rows.silu_and_mul(x), formulas.silu_and_mul(x))
    heads, positions = drawn(5, 3, width, dtype=dtype), torch.tensor([0, 7, 3, 1, 30], device=DEVICE)
    table = formulas.rotary_table(width, 1e4, 32, dtype).to(DEVICE)
    close(cuda_rows.rotate(heads, positions, table), formulas.rotate(heads, positions, table))


@runnable
def test_a_part_of_the_columns_of_a_product_is_read_where_it_lies() -> None:
    product, residual = drawn(70, 5 * 32), drawn(70, 2 * 32, seed=1)
    weight, positions = drawn(32, seed=2), torch.arange(70, device=DEVICE)
    table = formulas.rotary_table(32, 1e4, 128, torch.float32).to(DEVICE)
    heads, half = product[:, 32:128].view(70, 3, 32), residual.chunk(2, -1)[1].unsqueeze(1)
    other = product[:, :32].unsqueeze(1)
    assert not any(x.is_contiguous() for x in (heads, half, other))
    same: list[tuple[Operation, tuple[Any, ...]]] = [
        (cuda_rows.rms_norm, (heads, weight, 1e-6)),
        (cuda_rows.rotate, (heads, positions, table)),
        (cuda_rows.add_rms_norm, (other, half, weight, 1e-6)),
        (cuda_gradients.rms_norm_gradients, (heads, weight, heads.flip(0), 1e-6)),
    ]
    for operation, given in same:
        copies = [x.contiguous() if isinstance(x, Tensor) else x for x in given]
        pairs = zip(as_tuple(operation(*given)), as_tuple(operation(*copies)), strict=True)
        assert all(torch.equal(there, copied) for there, copied in pairs), operation


@runnable
def test_a_row_has_the_same_bits_at_every_place() -> None:
    x, residual, weight = drawn(1, 4, 96), drawn(1, 4, 96, seed=1), drawn(96, seed=2)
    found = cuda_rows.add_rms_norm(x.expand(33, 4, 96), residual.expand(33, 4, 96), weight, 1e-6)
    for many, one in zip(found, cuda_rows.add_rms_norm(x, residual, weight, 1e-6), strict=True):
        assert all(torch.equal(row, one[0]) for row in many)


def as_tuple(found: Any) -> tuple[Tensor, ...]:
    return found if isinstance(found, tuple) else (found,)


def gradients(operation: Operation, tensors: Sequence[Tensor], *rest: Any) -> tuple[Tensor, ...]:
    """Of the operation's outputs, weighted at random, in its tensors."""
    inputs = [tensor.clone().requires_grad_() for tensor in tensors]
    found = operation(*inputs, *rest)
    outputs = as_tuple(found)
    weights = [drawn(*out.shape, seed=9 + i) for i, out in enumerate(outputs)]
    return torch.autograd.grad(outputs, inputs, weights)


@runnable
@pytest.mark.parametrize("vocabulary", [384, 5000])
def test_token_logprobs_and_their_gradient_are_those_of_log_softmax(vocabulary: int) -> None:
    logits, ids = drawn(4, vocabulary) * 3, torch.tensor([0, 7, 300, vocabulary - 1], device=DEVICE)
    ours: Operation = cuda._TokenLogprobs.apply
    close(ours(logits, ids, 0.7), formulas.token_logprobs(logits, ids, 0.7))
    [found] = gradients(ours, [logits], ids, 0.7)
    [wanted] = gradients(formulas.token_logprobs, [logits], ids, 0.7)
    close(found, wanted)


@runnable
@pytest.mark.parametrize(("rows", "outputs", "inputs"), [(1, 96, 128), (70, 130, 96), (130, 64, 72)])
def test_a_product_is_that_of_linear_with_every_tile(rows: int, outputs: int, inputs: int) -> None:
    x, weight = drawn(rows, inputs), drawn(outputs, inputs, seed=1)
    for tile in cuda_linear.TILES:
        close(cuda_linear.product(x, weight, tile), x @ weight.t(), 1e-4)


@runnable
@pytest.mark.parametrize("kv_heads", [1, 2])
@pytest.mark.parametrize("lengths", [(1,), (3, 70)])
def test_attention_gradients_are_those_of_the_formula(lengths: tuple[int, ...], kv_heads: int) -> None:
    cu_seqlens = tuple(itertools.accumulate(lengths, initial=0))
    tokens, scale = cu_seqlens[-1], 24**-0.5
    q, grad = drawn(tokens, 2, 24), drawn(tokens, 2, 24, seed=1)
    k, v = drawn(tokens, kv_heads, 24, seed=2), drawn(tokens, kv_heads, 24, seed=3)
    out, log_sums = causal(q, k, v, cu_seqlens, scale)
    found = cuda_attention.gradients(q, k, v, out, log_sums, grad, cu_seqlens, scale)
    q, k, v, out, grad = (x.double() for x in (q, k, v, out, grad))
    wanted = attention_gradients(q, k, v, out, grad, cu_seqlens, scale)
    for one, other in zip(found, wanted, strict=True):
        close(one, other, 1e-4)


def causal(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: tuple[int, ...], scale: float
) -> tuple[Tensor, Tensor]:
    """Output and log of the sums of exponentials, as FlashAttention-3 returns them."""
    outs, sums = [], []
    for start, end in itertools.pairwise(cu_seqlens):
        queries = q[start:end].transpose(0, 1)
        keys, values = (
            x[start:end].transpose(0, 1).repeat_interleave(q.shape[1] // k.shape[1], 0) for x in (k, v)
        )
        future = torch.ones(end - start, end - start, dtype=torch.bool, device=q.device).triu(1)
        scores = (queries @ keys.transpose(-1, -2) * scale).masked_fill(future, float("-inf"))
        outs.append((scores.softmax(-1) @ values).transpose(0, 1))
        sums.append(scores.logsumexp(-1))
    return torch.cat(outs), torch.cat(sums, 1)


def linear(x: Tensor, weight: Tensor) -> Any:
    product: Operation = cuda._Linear.apply
    return product(x, weight, cuda.CudaWeight(weight.detach()))


@runnable
def test_every_backward_is_that_of_the_formula() -> None:
    x, residual, weight = drawn(6, 64), drawn(6, 64, seed=1), drawn(64, seed=2)
    positions = torch.arange(6, device=DEVICE)
    table = formulas.rotary_table(32, 1e4, 32, torch.float32).to(DEVICE)
    cases: list[tuple[Operation, Operation, tuple[Tensor, ...], tuple[Any, ...]]] = [
        (cuda._Norm.apply, formulas.rms_norm, (x, weight), (1e-6,)),
        (cuda._AddNorm.apply, formulas.add_rms_norm, (x, residual, weight), (1e-6,)),
        (cuda._SiluAndMul.apply, formulas.silu_and_mul, (x,), ()),
        (
            cuda._Rotary.apply,
            lambda q, k, *rest: (formulas.rotate(q, *rest), formulas.rotate(k, *rest)),
            (x.view(6, 2, 32), residual.view(6, 2, 32)),
            (positions, table),
        ),
        (
            linear,
            lambda a, b: a @ b.t(),
            (x, drawn(16, 64, seed=4)),
            (),
        ),
    ]
    for ours, formula, tensors, rest in cases:
        pairs = zip(gradients(ours, tensors, *rest), gradients(formula, tensors, *rest), strict=True)
        for found, wanted in pairs:
            close(found, wanted, 1e-4)


@runnable
@pytest.mark.parametrize(("rows", "width"), [(1, 8), (600, 24), (37, 2500)])
def test_gradients_of_many_rows_are_summed_whole_and_alike(rows: int, width: int) -> None:
    x, grad, more = (drawn(rows, width, seed=i) for i in range(3))
    weight = drawn(width, seed=3)
    found = cuda_gradients.rms_norm_gradients(x, weight, grad, 1e-6, more)
    again = cuda_gradients.rms_norm_gradients(x, weight, grad, 1e-6, more)
    assert all(torch.equal(a, b) for a, b in zip(found, again, strict=True))
    held, scales = x.double().requires_grad_(), weight.double().requires_grad_()
    wanted = torch.autograd.grad(formulas.rms_norm(held, scales, 1e-6), [held, scales], grad.double())
    close(found[0], wanted[0] + more, 1e-4)
    close(found[1], wanted[1], 1e-3)


class Scheduler:
    """The little of vLLM's scheduler that stamps read: steps go out, and come back later."""

    def __init__(self, version: int) -> None:
        self.vllm_config = SimpleNamespace(
            additional_config=vllm_settings.additional_config("aligned", version)
        )
        self.requests: dict[str, None] = {}

    def schedule(self) -> Any:
        return vllm_stamps.schedule(lambda scheduler: SimpleNamespace(), self)

    def update(self, version: int) -> None:
        vllm_settings.set_version(self.vllm_config, version)

    def come_back(self, step: Any, **tokens: int) -> dict[str, Any]:
        """Some requests' new tokens, and the answers; a request that is no longer known has ended."""
        answers = {
            name: SimpleNamespace(
                request_id=name,
                new_token_ids=[0] * count,
                finish_reason=None if name in self.requests else "length",
                kv_transfer_params=None,
            )
            for name, count in tokens.items()
        }
        outputs = {0: SimpleNamespace(outputs=list(answers.values()))}
        vllm_stamps.update_from_output(lambda *given: outputs, self, step, None)
        return answers


def test_a_step_that_comes_back_after_an_update_keeps_the_version_that_sampled_it() -> None:
    scheduler = Scheduler(version=3)
    scheduler.requests = {"a": None, "b": None}
    before, late = scheduler.schedule(), scheduler.schedule()
    scheduler.come_back(before, a=1, b=1)
    scheduler.update(4)
    after = scheduler.schedule()
    scheduler.come_back(late, a=1)
    del scheduler.requests["a"]
    ended = scheduler.come_back(after, a=2, b=1)
    assert vllm_stamps.carried(ended["a"].kv_transfer_params).tolist() == [3, 3, 4, 4]
    assert ended["b"].kv_transfer_params is None
    del scheduler.requests["b"]
    last = scheduler.come_back(scheduler.schedule(), b=0)
    assert vllm_stamps.carried(last["b"].kv_transfer_params).tolist() == [3, 4]


def test_the_stamps_of_an_aborted_request_are_forgotten() -> None:
    scheduler = Scheduler(version=0)
    scheduler.requests = {"a": None, "b": None}
    scheduler.come_back(scheduler.schedule(), a=1, b=1)
    del scheduler.requests["a"]
    scheduler.come_back(scheduler.schedule(), b=1)
    assert list(scheduler.__dict__["rz_stamps"]) == ["b"]
    assert vllm_stamps.carried(None).dtype == np.int32


def test_an_engine_on_cuda_refuses_a_dtype_that_has_no_aligned_kernels(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(vllm_device, "device", lambda: "cuda")
    with pytest.raises(ConfigError, match=r"model\.dtype = 'float32' has no aligned kernels on CUDA"):
        vllm_device.contract_of(EngineConfig(model="model", dtype="float32"))


def test_aligned_kernels_on_cuda_need_the_gpu_that_attention_is_built_for() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(ConfigError, match="is not a Hopper GPU"):
        cuda.AlignedCuda()
