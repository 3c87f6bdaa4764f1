"""Every Triton kernel compiles for a Hopper GPU, on a machine that has none.

What the interpreter takes, the compiler may refuse. Sizes are those of Qwen3-4B.
"""

from __future__ import annotations

import os
from typing import Any

import pytest

pytest.importorskip("triton")

from rz_agent.kernels import cuda_attention, cuda_gradients, cuda_linear, cuda_rows

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="kernels are interpreted")

HIDDEN, WIDE, FEED_FORWARD, HEAD, VOCABULARY = 2560, 4096, 9728, 128, 151936
ATTENTION = {"HEADS": 32, "KV_HEADS": 8, "WIDTH": HEAD, "D": HEAD}
# Types of what is no tensor in bfloat16.
OTHER = {
    "positions": "*i64", "ids": "*i64", "blocks": "*i32", "temperatures": "*fp32", "log_sums": "*fp32",
    "grads": "*fp32", "inner": "*fp32", "parts": "*fp32", "rows": "i32", "tokens": "i32", "eps": "fp32",
    "scale": "fp32",
}  # fmt: skip


# A kernel, its sizes, and how it is compiled: warps, or warps and steps in flight.
Case = tuple[Any, dict[str, Any], tuple[int, ...]]


def product(tile: cuda_linear.Tile) -> Case:
    m, n, k, *compiled = tile
    sizes = {"OUTPUTS": 2 * FEED_FORWARD, "INPUTS": HIDDEN, "M": m, "N": n, "K": k, "GROUP": 8}
    return cuda_linear._product_kernel, sizes, tuple(compiled)


def attention(kernel: Any, tile: cuda_attention.Tile) -> Case:
    own, step, *compiled = tile
    assert own % step == 0, "the rows before a program's own come in whole steps"
    return kernel, ATTENTION | {"OWN": own, "STEP": step}, tuple(compiled)


FLOATS = {"logprob": {"out": "*fp32"}}  # results in another type than the rest

KERNELS: dict[str, Case] = {
    **{f"product {tile}": product(tile) for tile in cuda_linear.TILES},
    "norm": (
        cuda_rows._norm_kernel,
        {"WIDTH": HIDDEN, "BLOCK": WIDE, "ROWS": 1, "COUNT": 1, "STRIDE": HIDDEN, "ADDED": HIDDEN},
        (16,),
    ),
    "head norm": (
        cuda_rows._norm_kernel,
        {"WIDTH": HEAD, "BLOCK": HEAD, "ROWS": 16, "COUNT": 32, "STRIDE": 6144, "ADDED": None},
        (8,),
    ),
    "rotary": (
        cuda_rows._rotate_kernel,
        {"COUNT": 32, "STRIDE": 6144, "HALF": HEAD // 2, "BLOCK": HEAD // 2, "ROWS": 16},
        (4,),
    ),
    "silu": (cuda_rows._silu_kernel, {"WIDTH": FEED_FORWARD, "BLOCK": 1024}, (4,)),
    "temper": (cuda_rows._temper_kernel, {"WIDTH": VOCABULARY, "BLOCK": 1024}, (4,)),
    "logprob": (cuda_rows._logprob_kernel, {"WIDTH": VOCABULARY, "BLOCK": 4096}, (16,)),
    "logit gradient": (cuda_rows._logit_gradient_kernel, {"WIDTH": VOCABULARY, "BLOCK": 1024}, (4,)),
    "query gradient": attention(cuda_attention._query_gradient_kernel, cuda_attention.QUERY_TILE),
    "key gradient": attention(cuda_attention._key_gradient_kernel, cuda_attention.KEY_TILE),
    "inner products": (
        cuda_attention._inner_kernel,
        {"HEADS": 32, "WIDTH": HEAD, "D": HEAD, "ROWS": cuda_attention._ROWS},
        (4,),
    ),
    "norm gradient": (
        cuda_gradients._norm_gradient_kernel,
        {"WIDTH": HIDDEN, "BLOCK": WIDE, "ROWS": 1, "COUNT": 1, "STRIDE": HIDDEN, "TILES": 16, "MORE": True},
        (16,),
    ),
    "head norm gradient": (
        cuda_gradients._norm_gradient_kernel,
        {"WIDTH": HEAD, "BLOCK": HEAD, "ROWS": 16, "COUNT": 32, "STRIDE": 6144, "TILES": 16, "MORE": False},
        (4,),
    ),
    "silu gradient": (cuda_gradients._silu_gradient_kernel, {"WIDTH": FEED_FORWARD, "BLOCK": 1024}, (4,)),
}


@pytest.mark.parametrize("name", list(KERNELS))
def test_it_compiles_for_hopper(name: str) -> None:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel, sizes, compiled = KERNELS[name]
    signature = {
        argument: "constexpr" if argument in sizes else OTHER.get(argument, "*bf16")
        for argument in kernel.arg_names
    }
    signature |= FLOATS.get(name, {})
    places = {(kernel.arg_names.index(argument),): size for argument, size in sizes.items()}
    pointers = [index for index, argument in enumerate(kernel.arg_names) if signature[argument][0] == "*"]
    aligned = {(index,): [["tt.divisibility", 16]] for index in pointers}
    made = triton.compile(
        ASTSource(fn=kernel, signature=signature, constexprs=places, attrs=aligned),
        target=GPUTarget("cuda", 90, 32),
        options=dict(zip(("num_warps", "num_stages"), compiled, strict=False)),
    )
    assert made.asm["cubin"]
    assert made.metadata.shared <= 227 << 10  # bytes that a program can have there
