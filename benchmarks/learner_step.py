"""What the alignment costs the learner: time of an update with aligned over one with standard kernels.

    python benchmarks/learner_step.py --model models/smollm2
    python benchmarks/learner_step.py --model .cache/tiny-... --episodes 128 --tokens 64
    python benchmarks/learner_step.py --shape 4b --dtype bfloat16 --episodes 16 --tokens 4096 \\
        --pack 16384 --recompute --apart --against "hugging face"              # on a GPU

Both sides hold the same weights and train on the same batches in one process, in turn. Scoring (what the
audit does) is timed beside it. Episodes are of random tokens: a turn of observation, then a turn of action.
"hugging face" is transformers' model with SDPA, gradient checkpointing with --recompute, and torch's fused
AdamW on the model's own dtype: less work and memory than the float32 masters and moments of the learner.
"hugging face, float32 masters" has those too: its weights are float32, and autocast computes in --dtype.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from random_qwen3 import SHAPES, shape, write_model
from rich.console import Console
from rich.table import Table
from rz_agent.learner.learner import Learner
from rz_agent.learner.learner_config import LearnerConfig
from rz_agent.learner.megatron.architecture import Architecture
from rz_agent.learner.megatron.device import device
from rz_agent.trajectory import Group, Segment, Trajectory

GIB = 1 << 30
PEAK = 989e12  # dense operations a second, by the data sheet of H100 and H200
HUGGING_FACE, WITH_MASTERS = "hugging face", "hugging face, float32 masters"
GROUP_SIZE, OBSERVED, SAMPLED = 8, 12, 20


def segment(rng: np.random.Generator, tokens: int, vocabulary: int) -> Segment:
    mask = np.arange(tokens) % (OBSERVED + SAMPLED) >= OBSERVED
    return Segment(
        token_ids=rng.integers(0, vocabulary, tokens).astype(np.int32),
        action_mask=mask,
        behaviour_logprobs=np.where(mask, -1.0, np.nan).astype(np.float32),
        policy_version=np.where(mask, 0, -1),
    )


def groups(segments: Sequence[Segment]) -> list[Group]:
    """Groups in which every second episode is right, so that every episode has a gradient."""
    episodes = [
        Trajectory(
            episode_id=f"{number // GROUP_SIZE}.{number % GROUP_SIZE}",
            group_id=str(number // GROUP_SIZE),
            task_id=str(number // GROUP_SIZE),
            segments=(part,),
            reward=float(number % 2),
        )
        for number, part in enumerate(segments)
    ]
    return [
        Group(
            group_id=str(first // GROUP_SIZE),
            task_id=str(first // GROUP_SIZE),
            trajectories=tuple(episodes[first : first + GROUP_SIZE]),
        )
        for first in range(0, len(episodes), GROUP_SIZE)
    ]


def on_policy(learner: Learner, segments: Sequence[Segment]) -> list[Segment]:
    """The segments as this learner would have sampled them: all ratios are 1."""
    return [
        replace(part, behaviour_logprobs=logprobs)
        for part, logprobs in zip(segments, learner.score(segments), strict=True)
    ]


def timed(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


class HuggingFace:
    """The same update by transformers: what a trainer without Megatron runs."""

    def __init__(self, folder: Path, dtype: str, *, masters: bool, pack: int, recompute: bool) -> None:
        from transformers import AutoModelForCausalLM

        computed: torch.dtype = getattr(torch, dtype)
        self._model: Any = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32 if masters else computed, attn_implementation="sdpa"
        ).to(device())
        self._computing = torch.autocast(device().type, computed, enabled=masters)
        if recompute:
            self._model.gradient_checkpointing_enable({"use_reentrant": False})
        self._model.train()
        self._adam = torch.optim.AdamW(self._model.parameters(), lr=1e-6, fused=torch.cuda.is_available())
        self._pack = pack

    def train(self, batch: Sequence[Group]) -> None:
        held = [trajectory for group in batch for trajectory in group.trajectories]
        self._adam.zero_grad()
        for part, logprobs in self._logprobs([t.segments[0] for t in held]):
            advantages = [t.reward - 0.5 for t in held if any(t.segments[0] is s for s in part)]
            behaviour = [torch.from_numpy(s.behaviour_logprobs[1:]) for s in part]
            mu = torch.stack(behaviour).to(logprobs.device)
            mask = ~mu.isnan()
            ratios = (logprobs - mu.nan_to_num()).exp() * mask
            weights = torch.tensor(advantages, device=logprobs.device) / (mask.sum(1) * len(held))
            loss: torch.Tensor = -(weights[:, None] * ratios).sum()
            loss.backward()  # type: ignore[no-untyped-call]
        self._adam.step()
        synchronize()

    @torch.no_grad()
    def score(self, segments: Sequence[Segment]) -> None:
        for _ in self._logprobs(segments):
            pass
        synchronize()

    def _logprobs(self, segments: Sequence[Segment]) -> Iterator[tuple[Sequence[Segment], torch.Tensor]]:
        """Segments of one length, so many at a time as fit: log-probabilities [B, T - 1]."""
        together = max(self._pack // len(segments[0]), 1)
        for first in range(0, len(segments), together):
            part = segments[first : first + together]
            ids = torch.stack([torch.from_numpy(s.token_ids).long() for s in part]).to(device())
            with self._computing:
                logits = self._model(ids[:, :-1]).logits.float()
            chosen = logits.gather(-1, ids[:, 1:, None])[..., 0]
            yield part, chosen - logits.logsumexp(-1)


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


@dataclass(slots=True)
class Figures:
    """Of one side: seconds of each pass but the first by step, bytes that it holds, and more in an update."""

    seconds: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    held: int = 0
    more: int = 0


def run_once(side: Learner | HuggingFace, batch: Sequence[Group], into: Figures, *, count: bool) -> None:
    """One update and one scoring."""
    segments = [trajectory.segments[0] for group in batch for trajectory in group.trajectories]
    before = reset_peak()
    update = timed(lambda: side.train(batch))
    more = peak() - before
    scoring = timed(lambda: side.score(segments))
    if count:  # the first update makes what the optimizer keeps
        into.held, into.more = before, max(into.more, more)
        into.seconds["update"].append(update)
        into.seconds["scoring"].append(scoring)


def measure(
    sides: Mapping[str, Callable[[], Learner | HuggingFace]], segments: Sequence[Segment], passes: int, *,
    apart: bool,
) -> dict[str, Figures]:  # fmt: skip
    """Each side on the same batch, as the first one samples it: in turn, or where memory holds one, apart."""
    found = {name: Figures() for name in sides}
    batch: list[Group] = []
    living: dict[str, Learner | HuggingFace] = {}
    for name, make in sides.items():
        living[name] = side = make()
        if isinstance(side, Learner) and not batch:
            batch = groups(on_policy(side, segments))
        if apart:
            for number in range(passes + 1):
                run_once(side, batch, found[name], count=number > 0)
            del side, living[name]
            gc.collect()
    for number in range(0 if apart else passes + 1):
        for name, side in living.items():
            run_once(side, batch, found[name], count=number > 0)
    return found


def reset_peak() -> int:
    """Bytes that are held now, from which a peak is counted; 0 without a GPU."""
    if not torch.cuda.is_available():
        return 0
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_allocated()


def peak() -> int:
    return torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0


def needed(folder: Path, tokens: int) -> float:
    """Operations of an update per token of episodes of that length, without any that are repeated.

    Six per token and weight: of the layers, and for action tokens of the head. Causal attention: two products
    forward and four backward, each over half of the keys.
    """
    model = Architecture.read(folder)
    width = model.heads * model.head_dim
    projections = model.hidden * (2 * width + 2 * model.kv_heads * model.head_dim)
    layer = projections + 3 * model.hidden * model.feed_forward
    head = model.vocabulary * model.hidden * SAMPLED / (OBSERVED + SAMPLED)
    return 6 * (model.layers * layer + head) + 6 * model.layers * width * tokens


def show(found: Mapping[str, Figures], tokens: int, operations: float) -> None:
    (name, mine), (other, theirs) = found.items()
    table = Table("step", f"{name}, tokens/s", f"{other}, tokens/s", f"time {name} / {other}")
    for step in ("update", "scoring"):
        pairs = zip(mine.seconds[step], theirs.seconds[step], strict=True)
        ratio = statistics.median(a / b for a, b in pairs)
        speeds = [f"{tokens / statistics.median(side.seconds[step]):.0f}" for side in (mine, theirs)]
        table.add_row(step, *speeds, f"{ratio:.2f}")
    Console(width=110).print(table)
    for side, figures in found.items():
        if figures.held:
            share = operations * tokens / statistics.median(figures.seconds["update"]) / PEAK
            print(
                f"{side}: an update uses {share:.2f} of a Hopper GPU's {PEAK / 1e12:.0f} TFLOP/s in bfloat16"
            )
            print(f"{side}: holds {figures.held / GIB:.1f} GiB, an update {figures.more / GIB:.1f} GiB more")


def main() -> None:
    given = parsed()
    with tempfile.TemporaryDirectory() as scratch:
        folder = given.model or write_model(Path(scratch) / "model", shape(given.shape, given.tokens + 1))
        vocabulary = json.loads((folder / "config.json").read_text())["vocab_size"]
        rng = np.random.default_rng(0)
        segments = [segment(rng, given.tokens, vocabulary) for _ in range(given.episodes)]

        def learner(kernels: str) -> Learner:
            options = {"dtype": given.dtype, "micro_batch_tokens": given.pack, "recompute": given.recompute}
            return Learner(folder, LearnerConfig.model_validate({"kernels": kernels, **options}))

        def against() -> Learner | HuggingFace:
            if given.against == "standard":
                return learner("standard")
            masters = given.against == WITH_MASTERS
            options = {"masters": masters, "pack": given.pack, "recompute": given.recompute}
            return HuggingFace(folder, given.dtype, **options)

        sides = {"aligned": lambda: learner("aligned"), given.against: against}
        found = measure(sides, segments, given.passes, apart=given.apart)
        show(found, given.episodes * given.tokens, needed(folder, given.tokens))


def parsed() -> argparse.Namespace:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    which = arguments.add_mutually_exclusive_group(required=True)
    which.add_argument("--model", type=Path, help="a Hugging Face folder")
    which.add_argument("--shape", choices=sorted(SHAPES), help="random weights of a published shape")
    arguments.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    arguments.add_argument("--against", default="standard", choices=["standard", HUGGING_FACE, WITH_MASTERS])
    arguments.add_argument("--episodes", type=int, default=16)
    arguments.add_argument("--tokens", type=int, default=256, help="of an episode")
    arguments.add_argument("--pack", type=int, default=4096, help="tokens that run through a model at once")
    arguments.add_argument("--recompute", action="store_true", help="of activations, on both sides")
    arguments.add_argument("--passes", type=int, default=5)
    arguments.add_argument("--apart", action="store_true", help="one side after the other: memory holds one")
    return arguments.parse_args()


if __name__ == "__main__":
    main()
