"""Failures that are nobody's answer: the machinery broke, so the episode counts for nothing.

Invariant: such an episode is masked with the reason; it never becomes a reward of 0.
"""

from __future__ import annotations

from ..errors import RzError
from ..sandboxes.errors import SandboxError


class InfraFailure(RzError):
    """Something the policy has no part in failed: a grader died, a deadline of ours passed."""


def mask_reason(error: BaseException) -> str | None:
    """Why an episode is masked by this error, or None where the error is not the infrastructure's.

    >>> mask_reason(InfraFailure("the grader died twice"))
    'InfraFailure: the grader died twice'
    """
    infra = isinstance(error, InfraFailure) or (isinstance(error, SandboxError) and error.blame == "infra")
    return f"{type(error).__name__}: {error}" if infra else None
