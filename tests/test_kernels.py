"""The shared arithmetic: a token's bits depend on that token alone, and every gradient is the true one."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rz_agent.errors import ConfigError
from rz_agent.kernels import Operations, cpu_attention, cpu_library, operations
from rz_agent.kernels.cpu_linear import PackedWeight
from tiny_qwen import BFLOAT16, TIED, UNTIED, Shape, packed_logprobs, random_weights
from torch import Tensor

ALIGNED = operations("aligned")
REFERENCE = operations("reference")
DTYPES = [torch.float32, torch.bfloat16]
ROWS = [1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33, 47, 48, 49, 64, 100]


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("inputs", "outputs"), [(32, 64), (128, 300), (384, 128), (512, 330), (2048, 96)])
def test_a_row_of_a_linear_map_does_not_depend_on_the_rows_beside_it(
    dtype: torch.dtype, inputs: int, outputs: int
) -> None:
    packed = PackedWeight(randn(outputs, inputs, dtype=dtype))
    x = randn(200, inputs, seed=1, dtype=dtype)
    whole = packed(x)
    for rows in ROWS:
        assert torch.equal(packed(x[:rows]), whole[:rows]), rows
        assert torch.equal(packed(x[-rows:]), whole[-rows:]), rows


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_order_of_merged_weights_does_not_change_an_output(dtype: torch.dtype) -> None:
    """So a learner may keep q, k and v of a head together where the engine keeps all q first."""
    weight, x = randn(256, 128, dtype=dtype), randn(70, 128, seed=1, dtype=dtype)
    order = torch.randperm(256, generator=torch.Generator().manual_seed(2))
    assert torch.equal(PackedWeight(weight[order])(x), PackedWeight(weight)(x)[:, order])


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_packed_weight_is_a_copy_of_the_weight_it_was_made_from(dtype: torch.dtype) -> None:
    weight = randn(64, 96, dtype=dtype)
    packed, before = PackedWeight(weight), weight.clone()
    weight.add_(1)
    assert torch.equal(packed(torch.eye(96, dtype=dtype)).t(), before)


def test_bfloat16_products_are_rounded_once_from_a_sum_in_float32() -> None:
    weight, x = randn(64, 256, dtype=torch.bfloat16), randn(9, 256, seed=1, dtype=torch.bfloat16)
    exact = (x.double() @ weight.double().t()).to(torch.bfloat16)
    found = PackedWeight(weight)(x)
    # Where the float32 sum falls next to a rounding boundary, one unit in the last place.
    assert ((found.float() - exact.float()).abs() <= exact.float().abs() * 2**-7).all()


def test_a_weight_of_another_dtype_or_shape_is_refused() -> None:
    weight = randn(64, 64)
    packed = ALIGNED.pack(weight)
    with pytest.raises(ValueError, match="packed in"):
        ALIGNED.linear(randn(2, 64).bfloat16(), weight, packed)
    with pytest.raises(ValueError, match="needs its own pack"):
        ALIGNED.linear(randn(2, 64), randn(32, 64), packed)
    with pytest.raises(ValueError, match="use float32 or bfloat16"):
        ALIGNED.pack(weight.to(torch.float16))


@given(
    requests=st.lists(st.tuples(st.integers(1, 40), st.integers(0, 60)), min_size=1, max_size=6),
)
def test_cut_requests_cover_every_query_once_in_order(requests: list[tuple[int, int]]) -> None:
    query_lens = [queries for queries, _ in requests]
    seq_lens = [queries + before for queries, before in requests]
    pieces = cpu_attention.cut(query_lens, seq_lens)
    starts = pieces.query_start_loc.tolist()
    seen: list[tuple[int, int]] = []
    for owner, (a, b), end in zip(
        pieces.owner.tolist(), itertools.pairwise(starts), pieces.seq_lens.tolist(), strict=True
    ):
        assert 1 <= b - a <= cpu_attention.QUERY_TOKENS
        seen += [(owner, position) for position in range(end - (b - a), end)]
    assert seen == [
        (i, p) for i, (q, s) in enumerate(zip(query_lens, seq_lens, strict=True)) for p in range(s - q, s)
    ]
    assert pieces.longest == max(b - a for a, b in itertools.pairwise(starts))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(4, 2, 32), (4, 4, 32), (8, 2, 64), (8, 1, 128)])
def test_attention_of_a_sequence_does_not_depend_on_its_neighbours_or_its_future(
    dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int
) -> None:
    """A prefix of a sequence, alone or packed, gives the bits of the whole one, past every tile of keys."""
    length = 1100
    q = randn(length, heads, head_dim, dtype=dtype)
    k, v = (randn(length, kv_heads, head_dim, seed=s, dtype=dtype) for s in (1, 2))
    whole = ALIGNED.attention(q, k, v, (0, length), 0.2)
    cuts = [3, 300, 5, 257]
    qs, ks, vs = (torch.cat([x[:n] for n in cuts]) for x in (q, k, v))
    packed = ALIGNED.attention(qs, ks, vs, (0, *itertools.accumulate(cuts)), 0.2)
    for piece, n in zip(torch.split(packed, cuts), cuts, strict=True):
        assert torch.equal(piece, whole[:n]), n


@pytest.mark.parametrize("dtype", DTYPES)
def test_norm_rotation_activation_and_logprobs_of_a_token_do_not_depend_on_the_batch(
    dtype: torch.dtype,
) -> None:
    table = ALIGNED.rotary_table(64, 10000.0, 2048, dtype)
    x, residual, weight = (
        randn(100, 256, dtype=dtype),
        randn(100, 256, seed=1, dtype=dtype),
        randn(256, dtype=dtype),
    )
    q, k = x.view(100, 4, 64), x[:, :128].reshape(100, 2, 64)
    ids, positions = torch.arange(100), torch.arange(100) * 7
    steps: list[Callable[[int], Sequence[Tensor]]] = [
        lambda n: [ALIGNED.rms_norm(x[:n], weight, 1e-6)],
        lambda n: ALIGNED.add_rms_norm(x[:n], residual[:n], weight, 1e-6),
        lambda n: ALIGNED.rotary(q[:n], k[:n], positions[:n], table),
        lambda n: [ALIGNED.silu_and_mul(x[:n])],
        lambda n: [ALIGNED.token_logprobs(x[:n], ids[:n], 0.7)],
    ]
    for step in steps:
        whole = step(100)
        for rows in ROWS:
            assert all(torch.equal(a, b[:rows]) for a, b in zip(step(rows), whole, strict=True)), rows


def test_a_norm_of_a_view_into_merged_projections_equals_that_of_a_copy() -> None:
    merged = randn(50, 512)
    q = merged[:, :256].view(50, 4, 64)
    weight = randn(64, seed=1)
    assert torch.equal(ALIGNED.rms_norm(q, weight, 1e-6), ALIGNED.rms_norm(q.contiguous(), weight, 1e-6))


def test_a_row_of_the_rotary_table_does_not_depend_on_its_length() -> None:
    short, long = (ALIGNED.rotary_table(64, 10000.0, n, torch.float32) for n in (37, 5000))
    assert torch.equal(short, long[:37])


def test_a_feed_forward_width_with_a_vector_remainder_is_refused_where_bits_matter() -> None:
    with pytest.raises(ValueError, match="not a multiple of 32"):
        ALIGNED.silu_and_mul(randn(3, 2 * 1000))
    assert operations("standard").silu_and_mul(randn(3, 2 * 1000)).shape == (3, 1000)


@pytest.mark.parametrize("name", ["aligned", "standard", "reference"])
@pytest.mark.parametrize("temperature", [0.0, -1.0, float("nan")])
def test_a_temperature_without_a_distribution_is_refused(name: str, temperature: float) -> None:
    with pytest.raises(ValueError, match="temperature"):
        operations(name).token_logprobs(randn(2, 8), torch.tensor([0, 1]), temperature)  # type: ignore[arg-type]


# --- gradients --------------------------------------------------------------------------------------------


def gradients(step: Callable[..., Sequence[Tensor]], inputs: Sequence[Tensor]) -> list[Tensor]:
    """Gradients of a fixed random combination of what a step returns, in its inputs."""
    leaves = [x.clone().requires_grad_() for x in inputs]
    outputs = step(*leaves)
    weights = [randn(*out.shape, seed=17 + i).to(out.dtype) for i, out in enumerate(outputs)]
    combined = torch.stack([(out * w).sum() for out, w in zip(outputs, weights, strict=True)]).sum()
    combined.backward()  # type: ignore[no-untyped-call]
    return [leaf.grad if leaf.grad is not None else torch.zeros_like(leaf) for leaf in leaves]


def steps_of(
    ops: Operations, dtype: torch.dtype
) -> dict[str, tuple[Callable[..., Sequence[Tensor]], list[Tensor]]]:
    """Every operation as (function of its tensors, tensors)."""
    table = ops.rotary_table(32, 10000.0, 64, torch.float32).to(dtype)
    positions, ids = torch.cat([torch.arange(n) for n in (5, 1, 14)]), torch.arange(20) * 3
    x, gain = randn(20, 128), randn(128, seed=1)
    q, k, v = randn(20, 4, 32), randn(20, 2, 32, seed=1), randn(20, 2, 32, seed=2)
    return {
        "linear": (
            lambda x, w: [ops.linear(x, w, ops.pack(w.detach().to(x.dtype)))],
            [x, randn(64, 128, seed=3)],
        ),
        "rms_norm": (lambda x, w: [ops.rms_norm(x, w, 1e-6)], [x, gain]),
        "add_rms_norm": (lambda x, r, w: ops.add_rms_norm(x, r, w, 1e-6), [x, randn(20, 128, seed=4), gain]),
        "rotary": (lambda q, k: ops.rotary(q, k, positions, table), [q, k]),
        "attention": (lambda q, k, v: [ops.attention(q, k, v, (0, 5, 6, 20), 0.3)], [q, k, v]),
        "silu_and_mul": (lambda x: [ops.silu_and_mul(x)], [x]),
        "token_logprobs": (lambda x: [ops.token_logprobs(x, ids, 0.7)], [x]),
    }


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 3e-6), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("name", ["aligned", "standard"])
@pytest.mark.parametrize("operation", list(steps_of(REFERENCE, torch.float64)))
def test_the_gradient_of_each_operation_is_that_of_float64_autograd(
    operation: str, name: str, dtype: torch.dtype, tolerance: float
) -> None:
    step, inputs = steps_of(operations(name), dtype)[operation]  # type: ignore[arg-type]
    rounded = [x.to(dtype) for x in inputs]
    truth_step, _ = steps_of(REFERENCE, torch.float64)[operation]
    truth = gradients(truth_step, [x.double() for x in rounded])
    for found, expected in zip(gradients(step, rounded), truth, strict=True):
        assert found.dtype == dtype
        assert (found.double() - expected).norm() <= tolerance * expected.norm()


def test_attention_gradients_hold_over_several_blocks_of_queries() -> None:
    q, k, v = randn(300, 4, 32), randn(300, 2, 32, seed=1), randn(300, 2, 32, seed=2)
    cu_seqlens = (0, 290, 300)
    found = gradients(lambda q, k, v: [ALIGNED.attention(q, k, v, cu_seqlens, 0.3)], [q, k, v])
    truth = gradients(
        lambda q, k, v: [REFERENCE.attention(q, k, v, cu_seqlens, 0.3)], [x.double() for x in (q, k, v)]
    )
    for a, b in zip(found, truth, strict=True):
        assert (a.double() - b).norm() <= 3e-6 * b.norm()


def test_a_float32_master_gets_its_gradient_through_the_rounded_weight() -> None:
    master = randn(64, 128).requires_grad_()
    x = randn(20, 128, seed=1).bfloat16().requires_grad_()
    total = ALIGNED.linear(x, master, ALIGNED.pack(master.detach().bfloat16())).float().sum()
    total.backward()  # type: ignore[no-untyped-call]
    assert master.grad is not None
    assert x.grad is not None
    assert master.grad.dtype == torch.float32
    assert torch.allclose(master.grad, x.detach().float().sum(0).expand(64, -1), rtol=1e-5)
    exact = master.detach().bfloat16().double().sum(0).expand(20, -1)
    assert torch.allclose(x.grad.double(), exact, rtol=2**-7, atol=1e-6)


@pytest.mark.parametrize("shape", [TIED, UNTIED])
def test_the_gradient_of_a_whole_model_is_that_of_float64_autograd(shape: Shape) -> None:
    sequences = [[5, 9, 2, 77, 140], list(range(40, 90)), [1, 2]]
    weights = random_weights(shape, seed=0)

    def all_gradients(ops: Operations, dtype: torch.dtype) -> dict[str, Tensor]:
        leaves = {name: w.to(dtype, copy=True).requires_grad_() for name, w in weights.items()}
        total = torch.cat(packed_logprobs(ops, shape, leaves, sequences)).sum()
        total.backward()  # type: ignore[no-untyped-call]
        return {name: w.grad.double() for name, w in leaves.items() if w.grad is not None}

    found, truth = all_gradients(ALIGNED, torch.float32), all_gradients(REFERENCE, torch.float64)
    assert found.keys() == truth.keys() == weights.keys()
    for name in truth:
        assert (found[name] - truth[name]).norm() <= 1e-5 * truth[name].norm(), name


# --- whole model ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [TIED, UNTIED, BFLOAT16])
def test_packing_sequences_changes_no_bit_of_a_logprob(shape: Shape) -> None:
    weights = random_weights(shape, seed=0)
    generator = torch.Generator().manual_seed(3)
    sequences = [
        torch.randint(0, shape.vocab, (n,), generator=generator).tolist() for n in (2, 700, 3, 33, 150, 9)
    ]
    packed = packed_logprobs(ALIGNED, shape, weights, sequences, 0.7)
    for sequence, found in zip(sequences, packed, strict=True):
        assert torch.equal(found, packed_logprobs(ALIGNED, shape, weights, [sequence], 0.7)[0])


@pytest.mark.parametrize(("shape", "tolerance"), [(TIED, 2e-4), (BFLOAT16, 0.2)])
@pytest.mark.parametrize("name", ["aligned", "standard"])
def test_the_model_is_close_to_its_textbook_in_float64(name: str, shape: Shape, tolerance: float) -> None:
    weights = random_weights(shape, seed=0)
    sequences = [list(range(100)), [4, 4, 4]]
    found = torch.cat(packed_logprobs(operations(name), shape, weights, sequences))  # type: ignore[arg-type]
    exact = {key: w.double() for key, w in weights.items()}
    truth = torch.cat(packed_logprobs(REFERENCE, shape, exact, sequences))
    assert (found.double() - truth).abs().max() < tolerance


def test_standard_operations_are_close_to_the_aligned_ones_and_not_equal() -> None:
    weights = random_weights(TIED, seed=0)
    sequences = [list(range(100)), list(range(299, 0, -1))]
    aligned, standard = (
        torch.cat(packed_logprobs(operations(name), TIED, weights, sequences))
        for name in ("aligned", "standard")
    )
    assert (aligned != standard).float().mean() > 0.5
    assert (aligned - standard).abs().max() < 1e-3


# --- contract ---------------------------------------------------------------------------------------------


def test_a_contract_is_stable_and_tells_implementations_apart() -> None:
    contracts = {operations(name).contract() for name in ("aligned", "standard", "reference")}
    assert len(contracts) == 3
    assert operations("aligned").contract() in contracts


def test_the_contract_changes_with_whatever_changes_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    before = ALIGNED.contract()
    facts = cpu_library.describe()
    for name in facts:
        monkeypatch.setattr(cpu_library, "describe", lambda name=name: {**facts, name: facts[name] + "?"})
        assert ALIGNED.contract() != before, name


def test_an_unknown_name_or_a_device_without_kernels_is_refused_with_a_remedy() -> None:
    with pytest.raises(ConfigError, match='"aligned", "standard" or "reference"'):
        operations("fast")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match='kernels = "standard"'):
        operations("aligned", "meta")


@settings(max_examples=30)
@given(temperature=st.floats(0.1, 5.0), seed=st.integers(0, 1000))
def test_token_logprobs_are_a_log_softmax_at_the_temperature(temperature: float, seed: int) -> None:
    logits, ids = randn(4, 50, seed=seed) * 5, torch.tensor([0, 7, 49, 7])
    found = ALIGNED.token_logprobs(logits, ids, temperature)
    truth = (logits.double() / temperature).log_softmax(-1).gather(-1, ids[:, None])[:, 0]
    assert found.dtype == torch.float32
    assert torch.allclose(found.double(), truth, rtol=1e-5, atol=1e-5)
    assert (found <= 0).all()
