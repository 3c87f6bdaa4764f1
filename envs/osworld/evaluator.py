"""How an episode's end is judged: the task's checks on what the machine now holds.

    verdict = await evaluate(task, place, last_action="DONE", run_steps=run_steps)
    verdict.score                         the reward; verdict.as_info() goes into `info` and the recorder

    FAIL said?       -> right on an infeasible task, wrong on any other
    postconfig       save the document, close the program, wait
    each check       result getter, expected getter, metric(result, expected, **options)
    and: the mean, ended by a 0                or: the best, ended by a 1

Invariants: what the agent left behind (no file, a damaged one) scores 0 with the reason; what the machine or
the network did wrong raises and masks the episode; what the task's author wrote wrongly is a `ConfigError`.
Waits: the episode's end for this; this for one check after the other.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ...errors import EnvironmentBug
from ..failure import InfraFailure
from .getters import GETTERS, Place
from .judge import NotJudged
from .metrics import METRICS, metric_score
from .metrics.reading import Unreadable
from .placeholders import fill
from .task_file import Check, Conjunction, Get, OsworldTask, Step

RunSteps = Callable[[Sequence[Step], Place], Awaitable[None]]
FAIL = "FAIL"


@dataclass(frozen=True, slots=True)
class Scored:
    """One check's score, and why it is not 1 where that is known."""

    metric: str
    score: float
    why: str = ""


@dataclass(frozen=True, slots=True)
class Verdict:
    """The reward with its parts; a check that no longer mattered is not among them."""

    score: float
    checks: tuple[Scored, ...] = ()
    why: str = ""

    def as_info(self) -> dict[str, Any]:
        """As JSON values."""
        return {"score": self.score, "why": self.why, "checks": [asdict(check) for check in self.checks]}


async def evaluate(
    task: OsworldTask, place: Place, *, last_action: str | None, run_steps: RunSteps
) -> Verdict:
    """Judge the machine as the agent left it.

    last_action   DONE, FAIL or WAIT as OSWorld calls them, or whatever else the agent did last
    run_steps     `setup.run_steps`: does a task's steps on the machine

    Raises `SandboxError` or `InfraFailure` where the episode must be masked.
    """
    failed = last_action == FAIL
    if task.evaluator.infeasible:
        return Verdict(float(failed), why="" if failed else "the task is infeasible, and FAIL was not said")
    if failed:
        return Verdict(0.0, why="FAIL was said, and the task is feasible")
    await run_steps(task.evaluator.postconfig, place)
    scores: list[Scored] = []
    for check in task.evaluator.checks:
        scores.append(await _scored(check, place))
        if ends(task.evaluator.conjunction, scores[-1].score):
            break
    return Verdict(conjoined(task.evaluator.conjunction, [check.score for check in scores]), tuple(scores))


def ends(conjunction: Conjunction, score: float) -> bool:
    """Whether this check settles the matter."""
    return score == (0.0 if conjunction == "and" else 1.0)


def conjoined(conjunction: Conjunction, scores: Sequence[float]) -> float:
    """The reward of the checks made, as OSWorld counts it.

    >>> conjoined("and", [1.0, 0.5]), conjoined("and", [1.0, 0.0]), conjoined("or", [0.2, 0.5])
    (0.75, 0.0, 0.5)
    """
    if conjunction == "or":
        return max(scores)
    return 0.0 if 0.0 in scores else sum(scores) / len(scores)


async def _scored(check: Check, place: Place) -> Scored:
    module, values = METRICS[check.metric].__module__, list[Any]()
    try:
        values.append(await _got(check.result, place))
        if check.expected is not None:
            values.append(await _got(check.expected, place))
        options = fill(check.options, place.machine)
        score: float = await place.judge.call(metric_score, module, check.metric, values, dict(options))
    except FileNotFoundError as error:
        return Scored(check.metric, 0.0, f"there is no such file: {error}")
    except Unreadable as error:
        ours = check.expected is not None and check.expected.type == "cloud_file"
        if ours and len(values) == 2 and error.path in _paths(values[1]):
            raise InfraFailure(f"the expected file cannot be read: {error}") from error
        return Scored(check.metric, 0.0, f"cannot be read: {error}")
    except NotJudged as error:  # the agent chose what was met: no file may end a run, or mask an episode
        return Scored(check.metric, 0.0, f"cannot be compared: {error}")
    if math.isnan(score):  # of what the agent made; no metric means to say so
        return Scored(check.metric, 0.0, "cannot be compared: the metric gave nan")
    if not 0.0 <= score <= 1.0:
        remedy = f"Mend {check.metric} in {module}, or scale what it gives."
        raise EnvironmentBug(f"metric {check.metric} gave {score}, which is no score from 0 to 1\n  {remedy}")
    return Scored(check.metric, score)


async def _got(get: Get, place: Place) -> Any:
    config: Mapping[str, Any] = fill(get.config, place.machine)
    return await GETTERS[get.type](place, config)


def _paths(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]
