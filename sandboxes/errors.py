"""Why a call on a sandbox has no answer. `blame` says whose doing that is, and so what the episode becomes.

SandboxError
  blame "config"    Misconfigured, Unavailable, Unsupported          a person must change something
  blame "infra"     CreateError, RateLimited, QuotaExceeded, Died, CallTimeout     the episode is masked
  blame "program"   FileError, Hindered, Died with that blame         the episode ends and is scored

Who runs the programs answers for the last kind: the file that was to be there is not, they are in the way
of the next one, or they ended what was to be talked with (the X server of their desktop, say). Masking such
an episode would let a policy choose which of its episodes count. Where episodes share a sandbox, what
programs did to it is nobody's doing but the place's (`shared.py`).
"""

from __future__ import annotations

from typing import Literal

from ..errors import RzError

Blame = Literal["infra", "config", "program"]
DeathCause = Literal["killed", "oom", "expired", "closed", "lost", "ended"]


class SandboxError(RzError):
    """The call has no answer.

    blame        "infra": the place failed, the episode is masked; "config": a person must change something;
                 "program": what runs in the sandbox did it
    retryable    whether the same call on a new sandbox may succeed
    retry_after  seconds to wait first, if the provider said so
    """

    blame: Blame = "infra"
    retryable: bool = False

    def __init__(
        self, message: str, *, provider: str, sandbox_id: str = "", retry_after: float | None = None
    ) -> None:
        self.message, self.provider, self.sandbox_id = message, provider, sandbox_id
        self.retry_after = retry_after
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


class Hindered(SandboxError):
    """The sandbox's programs are in the way: they hold what the next one needs, or closed its folder."""

    blame: Blame = "program"


class RateLimited(SandboxError):
    """The provider asks for fewer calls."""

    retryable = True


class QuotaExceeded(SandboxError):
    """The provider has no room for one more until another ends."""

    retryable = True


class Died(SandboxError):
    """The sandbox is gone, or its desktop. Raised to every waiter; a new one can be made.

    cause   "ended": the programs on a desktop ended it, or it answers nonsense; the sandbox around it lives
            "oom": files and programs had filled its memory, which is their doing
    """

    retryable = True

    def __init__(
        self, message: str, *, provider: str, sandbox_id: str, cause: DeathCause, blame: Blame = "infra"
    ) -> None:
        self.cause, self.blame = cause, blame
        super().__init__(message, provider=provider, sandbox_id=sandbox_id)

    def again(self, *, blame: Blame | None = None) -> Died:
        """One for another waiter, who may be told of another blame: a raised exception must not be shared."""
        copy = Died(
            self.message,
            provider=self.provider,
            sandbox_id=self.sandbox_id,
            cause=self.cause,
            blame=blame or self.blame,
        )
        copy.__cause__ = self.__cause__
        return copy


class CallTimeout(SandboxError):
    """The sandbox, not the program, did not answer in time."""

    retryable = True


class FileError(SandboxError):
    """A path in the sandbox cannot be read or written. An answer about the program's files: not retryable."""

    blame: Blame = "program"
