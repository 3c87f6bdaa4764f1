"""What the SDK raised, in our words. None of its errors leaves this package, and nothing of the key does.

An error of ours is raised after the SDK's own was dropped, not from it: frames of the SDK hold the key.
"""

from __future__ import annotations

import re
from traceback import walk_tb

from ..errors import (
    CallTimeout,
    CreateError,
    Died,
    Misconfigured,
    QuotaExceeded,
    RateLimited,
    SandboxError,
)
from . import sdk
from .sdk import PROVIDER

# The service refuses a sandbox too many with the status of a request too many; the words differ.
_FULL = re.compile(r"maximum number|concurrent|quota", re.IGNORECASE)
_REFUSED = (400, 403, 404)  # answers to `create` that no other try will change


def explain(error: BaseException, *, key: str, sandbox_id: str = "", making: bool = False) -> SandboxError:
    """The error of ours. `making` while there is no sandbox yet; `key` is cut out of what was said."""
    text = words(error, key)
    if isinstance(error, sdk.AuthenticationException):
        return Misconfigured(
            f"the key at sandbox.e2b.api_key was refused ({text})\n"
            "  Put a valid one there; keys are made in the dashboard of the service.",
            provider=PROVIDER, sandbox_id=sandbox_id,
        )  # fmt: skip
    if isinstance(error, sdk.RateLimitException):
        kind = QuotaExceeded if _FULL.search(text) else RateLimited
        return kind(text, provider=PROVIDER, sandbox_id=sandbox_id, retry_after=_retry_after(error))
    if making:
        return _not_made(error, text)
    if isinstance(error, sdk.SandboxNotFoundException | sdk.SandboxNotRunningException):
        return Died(text, provider=PROVIDER, sandbox_id=sandbox_id, cause="killed")
    if isinstance(error, sdk.SandboxUnreachableException):
        return Died(text, provider=PROVIDER, sandbox_id=sandbox_id, cause="lost")
    return CallTimeout(f"no answer to a call: {text}", provider=PROVIDER, sandbox_id=sandbox_id)


def _not_made(error: BaseException, text: str) -> SandboxError:
    status = error.status_code if isinstance(error, sdk.SandboxException) else None
    if status in _REFUSED or isinstance(error, sdk.InvalidArgumentException):
        return Misconfigured(
            f"the service will not make this sandbox ({text})\n"
            "  Correct sandbox.e2b.template or sandbox.e2b.ttl_s, or what the account may do.",
            provider=PROVIDER,
        )
    return CreateError(f"was not made: {text}", provider=PROVIDER)


def words(error: BaseException, key: str) -> str:
    """What it says, without the key."""
    text = f"{type(error).__name__}: {error}"
    return text.replace(key, "***") if key else text


def _retry_after(error: BaseException) -> float | None:
    """Seconds. The SDK keeps nothing of the header, but the frame that raised still has the answer."""
    for frame, _ in walk_tb(error.__traceback__):
        headers = getattr(frame.f_locals.get("res"), "headers", None)
        value = headers.get("Retry-After", "") if headers is not None else ""
        if value.isdecimal():
            return float(value)
    return None
