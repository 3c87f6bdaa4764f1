"""Failures that are nobody's answer, and those that are the policy's own.

    mask_reason(error)       the machinery broke: the episode counts for nothing
    last_step(error)         the step with which the episode ends: masked, or, where the policy's own programs
                             broke what they were given, worth 0

Invariant: a masked episode never becomes a reward of 0, and no policy can have an episode of its own masked.
Before the policy has acted every failure of a sandbox is the machinery's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..errors import RzError
from ..sandboxes.errors import SandboxError
from .message import NOTHING
from .step_result import Step


class InfraFailure(RzError):
    """Something the policy has no part in failed: a grader died, a deadline of ours passed."""


def mask_reason(error: BaseException, *, acted: bool = True) -> str | None:
    """Why an episode is masked by this error, or None where the error is not the infrastructure's.

    acted   whether the policy has done anything yet

    >>> mask_reason(InfraFailure("the grader died twice"))
    'InfraFailure: the grader died twice'
    """
    infra = isinstance(error, InfraFailure) or (isinstance(error, SandboxError) and error.blame == "infra")
    if infra or (_is_the_policys(error) and not acted):
        return f"{type(error).__name__}: {error}"
    return None


def last_step(
    error: BaseException,
    *,
    acted: bool = True,
    info: Mapping[str, Any] | None = None,
    counts: Mapping[str, float] | None = None,
) -> Step | None:
    """The step that ends the episode after this error; None where it is nobody's failure but a bug.

    info, counts   what is known of the episode: every step's info, and the last one's metrics

    >>> last_step(InfraFailure("the grader died twice"))[4]
    {'mask': 'InfraFailure: the grader died twice'}
    """
    if reason := mask_reason(error, acted=acted):
        return NOTHING, 0.0, False, True, {**(info or {}), "mask": reason}
    if _is_the_policys(error):
        metrics = {**(counts or {}), "broken": 1.0}
        ended = {"ended": "broken", "why": str(error), "rewards": {}, "metrics": metrics}
        return NOTHING, 0.0, True, False, {**(info or {}), **ended}
    return None


def _is_the_policys(error: BaseException) -> bool:
    """Whether programs in the sandbox made the call fail: a file that is not there, a desktop they ended."""
    return isinstance(error, SandboxError) and error.blame == "program"
