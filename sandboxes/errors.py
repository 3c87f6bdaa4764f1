"""What the place did wrong, never the program in it. `blame` says who acts: the run, or a person.

SandboxError
  blame "config"   Misconfigured, Unavailable, Unsupported
  blame "infra"    CreateError, RateLimited, QuotaExceeded, Died, CallTimeout, FileError
"""

from __future__ import annotations

from typing import Literal

from ..errors import RzError

Blame = Literal["infra", "config"]
DeathCause = Literal["killed", "oom", "expired", "closed", "lost"]


class SandboxError(RzError):
    """The place failed, not the program in it.

    blame        "infra": the episode is masked; "config": a person must change something
    retryable    whether the same call on a new sandbox may succeed
    retry_after  seconds to wait first, if the provider said so
    """

    blame: Blame = "infra"
    retryable: bool = False

    def __init__(
        self, message: str, *, provider: str, sandbox_id: str = "", retry_after: float | None = None
    ) -> None:
        self.provider, self.sandbox_id, self.retry_after = provider, sandbox_id, retry_after
        place = f"sandbox {sandbox_id} ({provider})" if sandbox_id else f"sandbox provider {provider}"
        super().__init__(f"{place}: {message}")


class Misconfigured(SandboxError):
    """The recipe asks for what this machine or provider cannot do."""

    exit_code = 2
    blame: Blame = "config"


class Unavailable(SandboxError):
    """The provider cannot be used on this machine as it is (a missing program, a forbidden system call)."""

    blame: Blame = "config"


class Unsupported(SandboxError):
    """This provider has no such operation."""

    blame: Blame = "config"


class CreateError(SandboxError):
    """A sandbox, or a session in one, did not start."""

    retryable = True


class RateLimited(SandboxError):
    """The provider asks for fewer calls."""

    retryable = True


class QuotaExceeded(SandboxError):
    """The provider has no room for one more until another ends."""

    retryable = True


class Died(SandboxError):
    """The sandbox is gone. Raised to every waiter; a new one can be made."""

    retryable = True

    def __init__(self, message: str, *, provider: str, sandbox_id: str, cause: DeathCause) -> None:
        self.cause, self._message = cause, message
        super().__init__(message, provider=provider, sandbox_id=sandbox_id)

    def again(self) -> Died:
        """An equal error for one more waiter: a raised exception object must not be shared."""
        copy = Died(self._message, provider=self.provider, sandbox_id=self.sandbox_id, cause=self.cause)
        copy.__cause__ = self.__cause__
        return copy


class CallTimeout(SandboxError):
    """The sandbox, not the program, did not answer in time."""

    retryable = True


class FileError(SandboxError):
    """A path in the sandbox cannot be read or written. An answer about the program's files: not retryable."""
