"""The smallest thing that shows that the learner works: a one-layer model scores a few tokens."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from safetensors.torch import save_file

from ..learner.learner import Learner
from ..learner.learner_config import LearnerConfig
from ..trajectory import Segment
from .models.qwen3_torch import Qwen3, Qwen3Shape


def one_layer_logprobs(folder: Path) -> tuple[int, float]:
    """Make a random one-layer model in `folder`, score 16 tokens; returns (how many, the lowest logprob)."""
    shape = Qwen3Shape(layers=1)
    model = Qwen3(shape, seed=0)
    (folder / "config.json").write_text(json.dumps(shape.hf_config(end=1, pad=0)))
    save_file(model.state_dict(), folder / "model.safetensors", metadata={"format": "pt"})
    actions = np.arange(16) > 0
    segment = Segment(
        token_ids=np.arange(16, dtype=np.int32),
        action_mask=actions,
        behaviour_logprobs=np.where(actions, -1.0, np.nan).astype(np.float32),
        policy_version=np.where(actions, 0, -1).astype(np.int32),
    )
    (scores,) = Learner(folder, LearnerConfig(threads=1)).score([segment])
    found = scores[actions]
    if not np.isfinite(found).all():
        raise ArithmeticError(f"the learner's log-probabilities are not finite: {found.tolist()}")
    return len(found), float(found.min())
