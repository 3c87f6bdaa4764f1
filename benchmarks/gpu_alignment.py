"""Whether engine and learner compute the same bits on a GPU: every token of a live engine, scored again.

Prints one table: tokens checked and differing, for decoding, second turns on a warm prefix, batches of few
requests, another temperature, prompts cut into chunks, scores of a prefill, and requests during which the
weights change. The model has random weights, so that log-probabilities are spread and disagreement shows.

    python benchmarks/gpu_alignment.py                  # 0.75 B parameters, Qwen3's shape
    python benchmarks/gpu_alignment.py --layers 4 --hidden 512 --head-dim 64
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from rz_agent.kernels import cuda_attention, cuda_library, cuda_linear
from rz_agent.kernels.attention_backward import attention_gradients
from rz_agent.learner.audit import different_bits
from rz_agent.learner.learner import Learner
from rz_agent.learner.learner_config import LearnerConfig
from rz_agent.learner.megatron.architecture import Architecture
from rz_agent.learner.megatron.weight_map import tensor_names
from rz_agent.rollout.engine import Completion, Engine, make_engine
from rz_agent.rollout.engine_config import EngineConfig
from rz_agent.trajectory import Float32, Int32, Sampling, Segment
from rz_agent.weight_store import WeightStore
from safetensors.torch import save_file

CHUNK = 1024  # tokens of one engine step; longer prompts are cut
CONTEXT = 4096
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


def write_model(folder: Path, arguments: argparse.Namespace) -> Path:
    """A Qwen3 folder with random weights; untied, because tied random ones repeat one token for ever."""
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": arguments.vocabulary,
        "hidden_size": arguments.hidden,
        "intermediate_size": 3 * arguments.hidden,
        "num_hidden_layers": arguments.layers,
        "num_attention_heads": 2 * arguments.hidden // arguments.head_dim,
        "num_key_value_heads": arguments.hidden // arguments.head_dim,
        "head_dim": arguments.head_dim,
        "max_position_embeddings": CONTEXT + 1,
        "rope_theta": 1e6,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(
        random_weights(Architecture.read(folder), seed=0), folder / "model.safetensors", {"format": "pt"}
    )
    return folder


def random_weights(model: Architecture, seed: int) -> dict[str, torch.Tensor]:
    """Every tensor in bfloat16 on the CPU; norms near 1, matrices wide enough that tokens compete."""
    generator = torch.Generator("cuda").manual_seed(seed)
    heads, kv_heads = model.heads * model.head_dim, model.kv_heads * model.head_dim
    shapes = {
        "q_proj": (heads, model.hidden),
        "k_proj": (kv_heads, model.hidden),
        "v_proj": (kv_heads, model.hidden),
        "o_proj": (model.hidden, heads),
        "gate_proj": (model.feed_forward, model.hidden),
        "up_proj": (model.feed_forward, model.hidden),
        "down_proj": (model.hidden, model.feed_forward),
        "embed_tokens": (model.vocabulary, model.hidden),
        "lm_head": (model.vocabulary, model.hidden),
        "q_norm": (model.head_dim,),
        "k_norm": (model.head_dim,),
    }
    found = {}
    for name in tensor_names(model):
        kind = name.split(".")[-2]
        shape = shapes.get(kind, (model.hidden,))
        drawn = torch.randn(shape, generator=generator, device="cuda")
        width = {"lm_head": 0.08, "embed_tokens": 1.0}.get(kind, 0.04)
        found[name] = (drawn * width if len(shape) > 1 else 1 + 0.1 * drawn).to(torch.bfloat16).cpu()
    return found


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
    first = await check.sample([check.prompt(100 + 7 * i) for i in range(64)], 256)
    rows = [check.compare("decoded, 64 requests", first)]
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
    manifest = check.store.put(1, next_weights)
    going = asyncio.create_task(check.sample([check.prompt(120 + i) for i in range(64)], 1024))
    await asyncio.sleep(0.5)
    await check.engine.update(manifest)
    crossed = await going
    both = sum(len(set(s.policy_version.tolist()) - {-1}) == 2 for s in crossed)
    rows.append(check.compare(f"weights changed during {both} of 64 requests", crossed))
    return rows


async def throughput(check: Check, requests: int, tokens: int = 512) -> None:
    prompts = [check.prompt(64) for _ in range(requests)]
    await check.sample(prompts, 8)
    start = time.perf_counter()
    await check.sample(prompts, tokens)
    rate = requests * tokens / (time.perf_counter() - start)
    print(f"| decoding, {requests} requests | {rate:,.0f} tokens/s | | |", flush=True)


def check_kernels() -> None:
    """What does not need an engine: both tiles of the product, and the attention's gradient."""
    generator = torch.Generator("cuda").manual_seed(1)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device="cuda").to(torch.bfloat16)

    x, weight = drawn(300, 1024), drawn(3072, 1024)
    few, many = (
        cuda_linear.product(x, weight, tile) for tile in (cuda_linear.FEW_ROWS, cuda_linear.MANY_ROWS)
    )
    print(f"| both tiles of the product | {few.numel():,} | {int((few != many).sum()):,} | |", flush=True)
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
        folder = write_model(Path(scratch) / "model", arguments)
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
            for requests in arguments.speed:
                await throughput(check, requests)
        finally:
            await engine.close()
    print(f"{sum(r.differing for r in rows)} of {sum(r.tokens for r in rows):,} tokens differ")
    return int(any(row.differing for row in rows))


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, default in (("layers", 28), ("hidden", 1024), ("head-dim", 128), ("vocabulary", 151936)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--kv-cache-gb", type=float, default=16.0)
    parser.add_argument("--mode", choices=("async", "inprocess"), default="async")
    parser.add_argument("--speed", type=int, nargs="*", default=[16, 64, 256], help="batches to time")
    return parser.parse_args()


if __name__ == "__main__":
    raise SystemExit(asyncio.run(main(parsed())))
