"""What must hold beside equal forward passes before a model may be trained: gradient, optimizer step, update.

    trained(learner, segments) -> Update      one update on the sampled sequences, and what it started from
    gradient_gate(update)                     against float64 autograd of Hugging Face's model
    optimizer_gate(update)                    against torch's AdamW on the same gradient
    await update_gate(update, plan)           engine and learner under the new weights

Each judge is independent of the learner: another model, another optimizer, another process's arithmetic.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...learner.batch import Batch
from ...learner.learner import Learner
from ...trajectory import Group, Segment, Trajectory
from ...weight_store import WeightStore
from ..models.sft import torch_threads
from .conditions import EngineRun, Plan

SLACK = 2  # of the plain model's own distance to float64: from draw to draw the two part by 0.8 to 1.6
FLOOR = 1e-5  # relative: a distance of float32, where both are as near as they can be
ULPS = 4  # two orders of the same float32 arithmetic may part by these in an element of the step


@dataclass(frozen=True, slots=True, kw_only=True)
class Gate:
    """One condition of readiness and what was measured."""

    name: str
    holds: bool
    says: str


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Update:
    """One update of a learner. Tensors by Hugging Face name: weights before and after, float32 gradients.

    again  the same gradients, computed a second time
    """

    learner: Learner
    groups: tuple[Group, ...]
    before: Mapping[str, Tensor]
    after: Mapping[str, Tensor]
    gradients: Mapping[str, Tensor]
    again: Mapping[str, Tensor]


def trained(learner: Learner, segments: Sequence[Segment]) -> Update:
    """One update in which every second sequence was worth 1 and the others 0."""
    episodes = tuple(
        Trajectory(
            episode_id=f"align.{index}", group_id="align", task_id="align", segments=(segment,),
            reward=float(index % 2), status="ok",
        )
        for index, segment in enumerate(segments)
    )  # fmt: skip
    groups = (Group(group_id="align", task_id="align", trajectories=episodes),)
    before, gradients, again = learner.weights(), learner.gradients(groups), learner.gradients(groups)
    learner.train(groups)
    return Update(
        learner=learner, groups=groups, before=_on_cpu(before), after=_on_cpu(learner.weights()),
        gradients=_on_cpu(gradients), again=_on_cpu(again),
    )  # fmt: skip


def _on_cpu(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Where the judges compute: a CPU has float64, and no engine changed what its torch computes."""
    return {name: tensor.cpu() for name, tensor in tensors.items()}


def gradient_gate(update: Update) -> Gate:
    """No further from float64 than the same model in plain torch, in its dtype, and the same each time."""
    # An engine of this process may have told torch's libraries to use one thread.
    with torch_threads(os.cpu_count() or 1):
        exact = _plain_gradients(update, torch.float64)
        plain = _distance(_plain_gradients(update, getattr(torch, update.learner.config.dtype)), exact)
    mine = _distance(update.gradients, exact)
    other = sum(not torch.equal(gradient, update.again[name]) for name, gradient in update.gradients.items())
    return Gate(
        name="gradient",
        holds=mine <= max(SLACK * plain, FLOOR) and not other,
        says=f"relative distance to float64 {mine:.2e}, of the plain model in the same dtype {plain:.2e}; "
        f"computed again, {other} of {len(exact)} tensors have other bits",
    )


def _distance(found: Mapping[str, Tensor], exact: Mapping[str, Tensor]) -> float:
    """Norm of the difference of whole gradients over the norm of the exact one."""
    if found.keys() != exact.keys():
        raise AssertionError(f"gradients of other parameters: {sorted(found.keys() ^ exact.keys())}")
    apart = sum(float((found[name].double() - exact[name].double()).square().sum()) for name in exact)
    return float((apart / sum(float(g.double().square().sum()) for g in exact.values())) ** 0.5)


def _plain_gradients(update: Update, dtype: torch.dtype) -> dict[str, Tensor]:
    """By Hugging Face's own model: of -sum of coefficient x ratio over all action tokens, at a ratio of 1."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(update.learner.model_dir)
    model: Any = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="eager")
    model.load_state_dict({name: tensor.to(dtype) for name, tensor in update.before.items()}, strict=False)
    model.tie_weights()
    batch = Batch.of(update.groups)
    for piece in batch.pieces:
        held, actions = piece.segment, torch.from_numpy(piece.actions)
        ids = torch.tensor(held.token_ids).long()
        logits = model(ids[None]).logits[0].to(max(dtype, torch.float32, key=lambda d: d.itemsize))
        logprobs = (logits / held.sampling.temperature).log_softmax(-1)[actions - 1, ids[actions]]
        ratios = (logprobs - logprobs.detach()).exp()  # 1, as the learner's own are where the forward holds
        (-piece.coefficient * ratios.sum()).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def optimizer_gate(update: Update) -> Gate:
    """The new weights are those of torch's AdamW on float32 copies of the old ones."""
    config = update.learner.config
    masters = {name: tensor.float().clone().requires_grad_() for name, tensor in update.before.items()}
    decay = [
        {"params": [p for p in masters.values() if (p.ndim > 1) is decayed],
         "weight_decay": config.weight_decay if decayed else 0.0}
        for decayed in (True, False)
    ]  # fmt: skip
    adamw = torch.optim.AdamW(decay, lr=update.learner.optimizer.rate(0), betas=config.betas, eps=config.eps)
    for name, master in masters.items():
        master.grad = update.gradients[name].float()
    if config.clip_grad is not None:
        torch.nn.utils.clip_grad_norm_(masters.values(), config.clip_grad)
    adamw.step()
    apart = {name: _ulps(update.after[name], master.detach()) for name, master in masters.items()}
    worst = max(apart, key=lambda name: apart[name])
    moved = sum(not torch.equal(update.before[name], update.after[name]) for name in masters)
    return Gate(
        name="optimizer",
        holds=apart[worst] <= ULPS and moved == len(masters),
        says=f"{moved} of {len(masters)} tensors moved; {worst} is furthest from AdamW, by "
        f"{apart[worst]:.1f} units in the last place",
    )


def _ulps(found: Tensor, expected: Tensor) -> float:
    """Largest distance of two elements in units of the last place of `found`'s dtype; of small elements, of
    what is usual in the tensor."""
    rounded = expected.to(found.dtype).float()
    unit = torch.finfo(found.dtype).eps * rounded.abs().clamp_min(float(rounded.abs().mean()))
    return float(((found.float() - rounded).abs() / unit).max())


async def update_gate(update: Update, plan: Plan) -> Gate:
    """An engine that takes the new weights holds them, and samples what the learner scores to the bit."""
    async with EngineRun.of(plan, plan.step_tokens) as run:
        with tempfile.TemporaryDirectory(prefix="rz-align-") as folder:
            manifest = WeightStore(folder).put(update.learner.version, update.after)
            held = await run.update(manifest)
        _, segments = await run.sampled(len(plan.prompts))
    wrong = [name for name, checksum in manifest.checksums.items() if held.get(name) != checksum]
    scores = update.learner.score(segments)
    differing = sum(
        int((score[s.action_mask] != s.behaviour_logprobs[s.action_mask]).sum())
        for score, s in zip(scores, segments, strict=True)
    )
    tokens = sum(segment.num_actions for segment in segments)
    return Gate(
        name="update",
        holds=not wrong and not differing,
        says=f"{len(wrong)} of {len(manifest.checksums)} tensors differ in the engine; of {tokens} tokens "
        f"sampled under them {differing} differ from the learner's",
    )
