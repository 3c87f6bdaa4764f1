"""The tiny model's warm start: imitation of the noisy teacher on fresh traces.

A trace passes through the conversation code of the rollouts, so the policy is trained on exactly
the ids that it will meet: `encode_trace` is first prompt, turn, observation, turn, ...

The same seed, step count and thread count give the same weights, bit for bit, on the same machine
and torch. Nothing global changes: threads are restored, torch's generator is not used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from random import Random

import torch
from torch import Tensor
from torch.nn import functional as F

from ...rollout.conversation import Conversation
from ...rollout.renderer import Renderer
from .qwen3_torch import Qwen3
from .tokenizer import END_ID, PAD_ID
from .traces import Trace, draw_problem, teach

Progress = Callable[[int, int, float], None]
"""Called after a step with (steps done, steps in all, loss)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """ids: a whole episode; learned: True where the policy speaks, its stop token included."""

    ids: list[int]
    learned: list[bool]


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmStart:
    """How to imitate: steps of `batch` fresh traces, AdamW, linear warm-up then linear decay."""

    steps: int = 800
    batch: int = 32
    lr: float = 3e-3
    warmup: int = 30
    floor: float = 0.05
    threads: int = 2

    def lr_at(self, step: int) -> float:
        return self.lr * min(1.0, (step + 1) / self.warmup) * max(self.floor, 1 - step / self.steps)


def encode_trace(renderer: Renderer, trace: Trace) -> Example:
    """The ids that a rollout would have produced had the policy said what the teacher says."""
    talk = Conversation(renderer, [{"role": "user", "content": trace.question}])
    ids = talk.prompt.tolist()
    learned = [False] * len(ids)
    for step in trace.steps:
        said = [*renderer.encode(step.said).tolist(), END_ID]
        ids += said
        learned += [True] * len(said)
        if step.heard is None:
            continue
        turn = talk.turn(said, [{"role": "tool", "content": step.heard}])
        if not turn.extends:
            raise ValueError(f"the template rewrote history in the trace of {trace.question!r}")
        ids += turn.token_ids.tolist()
        learned += [False] * len(turn.token_ids)
    return Example(ids=ids, learned=learned)


def warm_start(
    model: Qwen3, renderer: Renderer, plan: WarmStart, *, seed: int, progress: Progress | None = None
) -> list[float]:
    """Train `model` in place; returns the loss of each step (mean over the learned tokens)."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=plan.lr, betas=(0.9, 0.98), weight_decay=0.0)
    rng, losses = Random(seed), []
    with torch_threads(plan.threads):
        for step in range(plan.steps):
            for group in optimizer.param_groups:
                group["lr"] = plan.lr_at(step)
            traces = [teach(draw_problem(rng), rng) for _ in range(plan.batch)]
            optimizer.zero_grad()
            losses.append(_backward(model, [encode_trace(renderer, trace) for trace in traces]))
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            if progress:
                progress(step + 1, plan.steps, losses[-1])
    return losses


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """Run torch with `count` threads; sums are grouped by thread, so the count is part of the bits."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _backward(model: Qwen3, examples: list[Example]) -> float:
    """Add the gradient of the mean loss over all learned tokens; returns that loss, nats a token."""
    by_length = sorted(examples, key=lambda example: len(example.ids))
    count, total = sum(sum(example.learned) for example in examples), 0.0
    half = (len(by_length) + 1) // 2  # short and long traces apart: two thirds of the padding is saved
    for part in filter(None, (by_length[:half], by_length[half:])):
        loss = _summed_loss(model, part) / count
        loss.backward()  # type: ignore[no-untyped-call]
        total += loss.item()
    return total


def _summed_loss(model: Qwen3, examples: list[Example]) -> Tensor:
    longest = max(len(example.ids) for example in examples)
    ids = torch.full((len(examples), longest), PAD_ID)
    learned = torch.zeros(len(examples), longest)
    for row, example in enumerate(examples):
        ids[row, : len(example.ids)] = torch.tensor(example.ids)
        learned[row, : len(example.ids)] = torch.tensor(example.learned, dtype=torch.float32)
    logits = model(ids[:, :-1])
    losses = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
    return (losses * learned[:, 1:].flatten()).sum()
