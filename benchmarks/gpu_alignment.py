"""Whether engine and learner compute the same bits on a GPU: every token of a live engine, scored again.

Prints one table: tokens checked and differing, for decoding, second turns on a warm prefix, batches of few
requests, another temperature, prompts cut into chunks, scores of a prefill, and requests during which the
weights change. The model has random weights, so that log-probabilities are spread and disagreement shows.

    python benchmarks/gpu_alignment.py                  # Qwen3-0.6B's shape, untied: 0.75 B parameters
    python benchmarks/gpu_alignment.py --shape small    # 4 layers, heads of 64
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from random_qwen3 import SHAPES, random_weights, shape, write_model
from rz_agent.kernels import cuda_attention, cuda_library, cuda_linear
from rz_agent.kernels.attention_backward import attention_gradients
from rz_agent.learner.audit import different_bits
from rz_agent.learner.learner import Learner
from rz_agent.learner.learner_config import LearnerConfig
from rz_agent.learner.megatron.architecture import Architecture
from rz_agent.rollout.engine import Completion, Engine, make_engine
from rz_agent.rollout.engine_config import EngineConfig
from rz_agent.trajectory import Float32, Int32, Sampling, Segment
from rz_agent.weight_store import WeightStore

# (outputs, inputs) of the products of Qwen3-0.6B and 4B but for their heads, and rows around tiles and graphs
PRODUCTS = (
    (4096, 1024), (1024, 2048), (6144, 1024), (1024, 3072), (6144, 2560), (2560, 4096), (19456, 2560),
    (2560, 9728),
)  # fmt: skip
ROWS = (1, 3, 17, 64, 65, 127, 128, 129, 200, 255, 256, 257, 384, 511, 513, 1000, 1024, 2049, 4096)
CHUNK = 2048  # tokens of one engine step; longer prompts are cut
CONTEXT = 8192
Ids = list[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One line of the table."""

    name: str
    tokens: int
    differing: int
    largest: float

    def __str__(self) -> str:
        return f"| {self.name} | {self.tokens:,} | {self.differing:,} | {self.largest:.3g} |"


class Check:
    """A live engine, the learner, and the weights of every version that the engine has served."""

    def __init__(self, engine: Engine, learner: Learner, store: WeightStore, vocabulary: int) -> None:
        self.engine, self.learner, self.store = engine, learner, store
        self._vocabulary, self._drawn = vocabulary, np.random.default_rng(0)

    def prompt(self, length: int) -> Ids:
        return [int(i) for i in self._drawn.integers(0, self._vocabulary, length)]

    async def sample(self, prompts: Sequence[Ids], tokens: int, temperature: float = 1.0) -> list[Segment]:
        """What the engine samples after each prompt, all at once."""
        sampling = Sampling(temperature=temperature)
        requests = [
            self.engine.generate(p, sampling, max_tokens=tokens, stop_token_ids=(), seed=i)
            for i, p in enumerate(prompts)
        ]
        found = await asyncio.gather(*requests)
        return [segment(p, done, sampling) for p, done in zip(prompts, found, strict=True)]

    async def scored(self, segments: Sequence[Segment], temperature: float, *, cold: bool) -> list[Segment]:
        """The same ids with what a prefill of the engine gives for all but the first."""
        ids = [s.token_ids.tolist() for s in segments]
        scores = await asyncio.gather(
            *(self.engine.score(i, temperature=temperature, cold=cold) for i in ids)
        )
        return [
            recorded(
                i,
                1,
                np.asarray(s[1:]),
                np.full(len(i) - 1, self.engine.version),
                Sampling(temperature=temperature),
            )
            for i, s in zip(ids, scores, strict=True)
        ]

    def compare(self, name: str, segments: Sequence[Segment]) -> Row:
        """Every recorded token against the learner, each at its own version."""
        tokens = differing = 0
        largest = 0.0
        for version in sorted({int(v) for s in segments for v in s.policy_version if v >= 0}):
            for s, again in zip(
                segments, self.learner.score(segments, self.store.load(version)), strict=True
            ):
                at_version = s.policy_version == version
                wrong = at_version & different_bits(s.behaviour_logprobs, again)
                tokens, differing = tokens + int(at_version.sum()), differing + int(wrong.sum())
                largest = max(largest, float(np.abs(s.behaviour_logprobs - again)[at_version].max(initial=0)))
        row = Row(name=name, tokens=tokens, differing=differing, largest=largest)
        print(row, flush=True)
        return row


def segment(prompt: Ids, done: Completion, sampling: Sampling) -> Segment:
    ids = prompt + done.token_ids.tolist()
    return recorded(ids, len(prompt), done.logprobs, done.versions, sampling)


def recorded(ids: Ids, first: int, logprobs: Float32, versions: Int32, sampling: Sampling) -> Segment:
    """ids whose actions begin at `first`."""
    mask = np.arange(len(ids)) >= first
    columns = np.full(len(ids), np.nan, np.float32), np.full(len(ids), -1, np.int32)
    columns[0][first:], columns[1][first:] = logprobs, versions
    return Segment(
        token_ids=np.asarray(ids), action_mask=mask, behaviour_logprobs=columns[0], policy_version=columns[1],
        sampling=sampling,
    )  # fmt: skip


async def run(check: Check, next_weights: dict[str, torch.Tensor]) -> list[Row]:
    """The whole table, line by line."""
    first = await check.sample([check.prompt(100 + 7 * i) for i in range(64)], 512)
    rows = [check.compare("decoded, 64 requests", first)]
    many = [check.prompt(1 + 7 * i) for i in range(256)]
    rows.append(check.compare("256 requests, prompts of 1 to 1,786", await check.sample(many, 256)))
    longest = [check.prompt(n) for n in (1, 4000, 8000)]
    rows.append(check.compare("prompts of 1, 4,000 and 8,000", await check.sample(longest, 64)))
    second = [s.token_ids.tolist() + check.prompt(21) for s in first]
    rows.append(check.compare("second turn on a warm prefix", await check.sample(second, 64)))
    few = [await check.sample([check.prompt(50 + 31 * i) for i in range(n)], 64) for n in (1, 3, 17)]
    rows.append(check.compare("batches of 1, 3 and 17", [s for batch in few for s in batch]))
    warm = await check.sample([check.prompt(200) for _ in range(16)], 64, 0.7)
    rows.append(check.compare("decoded at temperature 0.7", warm))
    chunked = await check.sample([check.prompt(3000 + 100 * i) for i in range(6)], 64)
    rows.append(check.compare("after prompts cut into chunks", chunked))
    for name, segments, temperature, cold in (
        ("scored, nothing cached", first[:16], 1.0, True),
        ("scored beside a warm prefix", first[16:32], 1.0, False),
        ("scored at temperature 0.7", warm, 0.7, True),
        ("scored in chunks", chunked, 1.0, True),
    ):
        rows.append(check.compare(name, await check.scored(segments, temperature, cold=cold)))
    began = time.perf_counter()
    manifest = check.store.put(1, next_weights)
    written = time.perf_counter() - began
    going = asyncio.create_task(check.sample([check.prompt(120 + i) for i in range(64)], 1536))
    await asyncio.sleep(0.5)
    began = time.perf_counter()
    await check.engine.update(manifest)
    taken = time.perf_counter() - began
    crossed = await going
    both = sum(len(set(s.policy_version.tolist()) - {-1}) == 2 for s in crossed)
    size = sum(tensor.nbytes for tensor in next_weights.values()) / 1e9
    print(f"| {size:.1f} GB of weights written in {written:.2f} s, taken over in {taken:.2f} s | | | |")
    rows.append(check.compare(f"weights changed during {both} of 64 requests", crossed))
    return rows


def check_kernels() -> None:
    """What does not need an engine: every tile of the product, and the attention's gradient."""
    generator = torch.Generator("cuda").manual_seed(1)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device="cuda").to(torch.bfloat16)

    cuda_linear.require_whole_sums()
    elements = differing = 0
    for outputs, inputs in PRODUCTS:
        weight, most = drawn(outputs, inputs), drawn(max(ROWS), inputs)
        many = cuda_linear.product(most, weight, cuda_linear.MANY_ROWS)
        for rows in ROWS:
            tiled = [cuda_linear.product(most[:rows], weight, tile) for tile in cuda_linear.TILES]
            for one in (*tiled, torch.nn.functional.linear(most[:rows], weight)):
                elements, differing = elements + one.numel(), differing + int((one != many[:rows]).sum())
    print(f"| products: every tile, cuBLASLt | {elements:,} | {differing:,} | |", flush=True)
    for width in (64, 128):
        q, grad, k, v = drawn(700, 8, width), drawn(700, 8, width), drawn(700, 2, width), drawn(700, 2, width)
        bounds, scale = (0, 1, 300, 700), width**-0.5
        out, log_sums = cuda_attention.forward(q, k, v, bounds, scale)
        found = cuda_attention.gradients(q, k, v, out, log_sums, grad, bounds, scale)
        again = cuda_attention.gradients(q, k, v, out, log_sums, grad, bounds, scale)
        q, k, v, out, grad = (t.double() for t in (q, k, v, out, grad))
        wanted = attention_gradients(q, k, v, out, grad, bounds, scale)
        error = max(float((a.double() - b).norm() / b.norm()) for a, b in zip(found, wanted, strict=True))
        same = all(torch.equal(a, b) for a, b in zip(found, again, strict=True))
        print(
            f"| attention gradient, head of {width}: relative error | {error:.2g} | repeats: {same} | |",
            flush=True,
        )


async def main(arguments: argparse.Namespace) -> int:
    facts = cuda_library.describe()
    print(", ".join(f"{name} {value}" for name, value in facts.items()), time.strftime("%Y-%m-%d"))
    print("| check | tokens | differing | largest difference |\n| --- | --- | --- | --- |")
    check_kernels()
    with tempfile.TemporaryDirectory() as scratch:
        sizes = shape(arguments.shape, CONTEXT + 1)
        folder = write_model(Path(scratch) / "model", sizes)
        model = Architecture.read(folder)
        engine = make_engine(
            EngineConfig(
                model=folder,
                dtype="bfloat16",
                max_model_len=CONTEXT,
                max_num_seqs=256,
                max_num_batched_tokens=CHUNK,
                kv_cache_gb=arguments.kv_cache_gb,
                mode=arguments.mode,
            )
        )
        start = time.perf_counter()
        await engine.start()
        print(f"| engine started in | {time.perf_counter() - start:.0f} s | | |", flush=True)
        try:
            learner = Learner(folder, LearnerConfig(dtype="bfloat16", micro_batch_tokens=8192))
            store = WeightStore(Path(scratch) / "weights")
            await engine.update(store.put(0, learner.weights()))
            check = Check(engine, learner, store, model.vocabulary)
            rows = await run(check, random_weights(model, seed=1))
        finally:
            await engine.close()
    print(f"{sum(r.differing for r in rows)} of {sum(r.tokens for r in rows):,} tokens differ")
    return int(any(row.differing for row in rows))


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=sorted(SHAPES), default="0.6b")
    parser.add_argument("--kv-cache-gb", type=float, default=40.0)
    parser.add_argument("--mode", choices=("async", "inprocess"), default="async")
    return parser.parse_args()


if __name__ == "__main__":
    raise SystemExit(asyncio.run(main(parsed())))
