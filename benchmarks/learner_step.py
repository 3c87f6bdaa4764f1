"""What the alignment costs the learner: time of an update with aligned over one with standard kernels.

    python benchmarks/learner_step.py --model models/smollm2
    python benchmarks/learner_step.py --model .cache/tiny-... --episodes 128 --tokens 64

Both learners hold the same weights and train on the same batches in one process, in turn. Scoring (what the
audit does) is timed beside it. Episodes are of random tokens: a turn of observation, then a turn of action.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table
from rz_agent.learner.learner import Learner
from rz_agent.learner.learner_config import LearnerConfig
from rz_agent.trajectory import Group, Segment, Trajectory

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


def measure(learners: dict[str, Learner], segments: Sequence[Segment], passes: int) -> dict[str, list[float]]:
    """Seconds of each pass but the first by "kernels, step"; the kernels take turns."""
    seconds: dict[str, list[float]] = defaultdict(list)
    for number in range(passes + 1):
        for name, learner in learners.items():
            batch = groups(on_policy(learner, segments))
            found = {
                "update": timed(lambda held=learner, on=batch: held.train(on)),  # type: ignore[misc]
                "scoring": timed(lambda held=learner: held.score(segments)),  # type: ignore[misc]
            }
            for step, taken in found.items():
                if number:
                    seconds[f"{name}, {step}"].append(taken)
    return seconds


def show(seconds: dict[str, list[float]], tokens: int) -> None:
    table = Table("step", "aligned, tokens/s", "standard, tokens/s", "time aligned / standard")
    for step in ("update", "scoring"):
        aligned, standard = seconds[f"aligned, {step}"], seconds[f"standard, {step}"]
        ratio = statistics.median(a / s for a, s in zip(aligned, standard, strict=True))
        speeds = [f"{tokens / statistics.median(part):.0f}" for part in (aligned, standard)]
        table.add_row(step, *speeds, f"{ratio:.2f}")
    Console().print(table)


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    arguments.add_argument("--model", type=Path, required=True, help="a Hugging Face folder")
    arguments.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    arguments.add_argument("--episodes", type=int, default=16)
    arguments.add_argument("--tokens", type=int, default=256, help="of an episode")
    arguments.add_argument("--passes", type=int, default=5)
    given = arguments.parse_args()
    vocabulary = json.loads((given.model / "config.json").read_text())["vocab_size"]
    rng = np.random.default_rng(0)
    segments = [segment(rng, given.tokens, vocabulary) for _ in range(given.episodes)]
    learners = {
        name: Learner(given.model, LearnerConfig.model_validate({"kernels": name, "dtype": given.dtype}))
        for name in ("aligned", "standard")
    }
    show(measure(learners, segments, given.passes), given.episodes * given.tokens)


if __name__ == "__main__":
    main()
