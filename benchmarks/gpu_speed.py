"""What the alignment costs an engine on a GPU: decoding and prefill, aligned beside vLLM as it comes.

    python benchmarks/gpu_speed.py                       # Qwen3-0.6B's shape, random weights
    python benchmarks/gpu_speed.py --shape 4b --passes 2

Both engines live side by side on one GPU, each in a process of its own, and take turns. "fast" is vLLM with
its defaults: Inductor, CUDA graphs, its own choice of kernels.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import time
from functools import partial
from pathlib import Path

import numpy as np
from random_qwen3 import SHAPES, shape, write_model
from rz_agent.recipes.align.speed import alternately, both_engines, prompts
from rz_agent.rollout.engine_config import EngineConfig

CONTEXT = 4096
DECODED, PREFILLED = 512, 2048
AT_ONCE = (16, 64, 256)


async def measure(arguments: argparse.Namespace, model: Path) -> None:
    config = EngineConfig(
        model=model,
        dtype="bfloat16",
        max_model_len=CONTEXT,
        max_num_seqs=256,
        max_num_batched_tokens=8192,
        kv_cache_gb=arguments.kv_cache_gb,
    )
    rng, vocabulary = np.random.default_rng(0), SHAPES[arguments.shape][-1]
    began = time.perf_counter()
    async with both_engines(config) as engines:
        print(f"both engines started in {time.perf_counter() - began:.0f} s", flush=True)
        print("| | fast, tokens/s | aligned, tokens/s | aligned / fast |\n| --- | --- | --- | --- |")
        work = [(f"decode, {n} requests", n, 16, DECODED, DECODED) for n in arguments.at_once]
        work.append((f"prefill, 64 x {PREFILLED:,}", 64, PREFILLED, 1, PREFILLED))
        for name, count, length, new, counted in work:
            draw = partial(prompts, rng, count, length, vocabulary)
            rates = await alternately(engines, draw, new, arguments.passes)
            pairs = zip(rates["aligned"], rates["standard"], strict=True)
            ratio = statistics.median(aligned / fast for aligned, fast in pairs)
            # A prefill samples one token of each request: its rate counts those.
            fast, aligned = (
                statistics.median(rates[side]) * counted / new for side in ("standard", "aligned")
            )
            print(f"| {name} | {fast:,.0f} | {aligned:,.0f} | {ratio:.2f} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=sorted(SHAPES), default="0.6b")
    parser.add_argument("--passes", type=int, default=3, help="after one to warm up")
    parser.add_argument("--at-once", type=int, nargs="*", default=AT_ONCE, help="requests decoded at once")
    parser.add_argument("--kv-cache-gb", type=float, default=20.0)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        model = write_model(Path(scratch) / "model", shape(arguments.shape, CONTEXT + 1))
        asyncio.run(measure(arguments, model))


if __name__ == "__main__":
    main()
