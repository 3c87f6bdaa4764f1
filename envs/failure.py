"""Failures that are nobody's answer, and those that are the policy's own.

    mask_reason(error)       the machinery broke: the episode counts for nothing
    is_the_policys(error)    its programs broke what they were given: the episode ends and is worth 0

Invariant: a masked episode never becomes a reward of 0, and no policy can have an episode of its own masked.
Before the policy has acted every failure of a sandbox is the machinery's.
"""

from __future__ import annotations

from ..errors import RzError
from ..sandboxes.errors import SandboxError


class InfraFailure(RzError):
    """Something the policy has no part in failed: a grader died, a deadline of ours passed."""


def mask_reason(error: BaseException, *, acted: bool = True) -> str | None:
    """Why an episode is masked by this error, or None where the error is not the infrastructure's.

    acted   whether the policy has done anything yet

    >>> mask_reason(InfraFailure("the grader died twice"))
    'InfraFailure: the grader died twice'
    """
    infra = isinstance(error, InfraFailure) or (isinstance(error, SandboxError) and error.blame == "infra")
    if infra or (is_the_policys(error) and not acted):
        return f"{type(error).__name__}: {error}"
    return None


def is_the_policys(error: BaseException) -> bool:
    """Whether programs in the sandbox made the call fail: a file that is not there, a desktop they ended."""
    return isinstance(error, SandboxError) and error.blame == "program"
