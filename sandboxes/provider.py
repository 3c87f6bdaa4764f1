"""Where untrusted code runs: the protocol between environments and whatever holds the code.

    Provider.create(spec) -> Sandbox       one isolated place; many sessions and commands side by side in it
    Sandbox.python(code, session=...)      one cell of a stateful interpreter; a new name starts one
    Sandbox.exec(argv)                     one command, from a clean process

Invariant: what the *program* did (exit code, timeout, out of memory, flood of output) is an `ExecResult`;
what the *place* did (could not start, died, does not answer) is a `SandboxError`. An error with
blame="infra" makes the episode invalid: masked from the loss, never reward 0.
Waits: a caller for its own program, at most `timeout_s` and a fixed grace; no caller for another one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Literal, Protocol, Self

from ..errors import RzError

Blame = Literal["infra", "config"]
DeathCause = Literal["killed", "oom", "expired", "closed", "lost"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Bounds of one program: a command, or a session with everything it starts.

    memory_mb      MiB   all its processes together with a memory cgroup, else the address space of each
    pids           1     processes and threads
    disk_mb        MiB   files in its /box, /tmp and /dev/shm (held in memory, counted there too)
    cpu_s          s     CPU time of each of its processes over their life
    open_files     1     file descriptors of each process
    timeout_s      s     wall time of a call that names none
    output_bytes   B     kept of stdout, and as many of stderr: the first and the last half
    flood_bytes    B     output after which the program is stopped
    """

    memory_mb: int = 512
    pids: int = 64
    disk_mb: int = 64
    cpu_s: int = 300
    open_files: int = 256
    timeout_s: float = 10.0
    output_bytes: int = 65536
    flood_bytes: int = 16 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Total:
    """Bounds of a whole sandbox, enforced where there are cgroups: MiB, processes and threads, cores."""

    memory_mb: int = 4096
    pids: int = 4096
    cpus: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxSpec:
    """What a caller wants of one sandbox. `labels` travel to providers that can list by them."""

    limits: Limits = field(default_factory=Limits)
    total: Total = field(default_factory=Total)
    network: Literal["none"] = "none"
    labels: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecResult:
    """What one command or cell did. A value, never an exception.

    exit_code      of the process, 128 + signal when killed; a cell: 0, 1 after an exception, 130 interrupted
    stdout/stderr  bytes as written, head and tail around a cut mark when longer than the limit
    stdout_bytes/stderr_bytes   how many were written in all
    timed_out      the deadline passed: command killed, cell interrupted (or killed, see state_lost)
    oom            the kernel killed one of its processes for memory (known only with a memory cgroup)
    truncated      stdout or stderr was cut; flooded: it passed `flood_bytes` and was stopped
    signal         number of the signal that ended it, or None
    state_lost     cells: the interpreter is gone; the next call of this session starts a fresh one
    fresh          cells: this call started the interpreter

    >>> ExecResult(exit_code=0, stdout=b"3\\n", stderr=b"", duration_s=0.001).text
    '3\\n'
    """

    exit_code: int
    stdout: bytes
    stderr: bytes
    duration_s: float
    stdout_bytes: int = 0
    stderr_bytes: int = 0
    timed_out: bool = False
    oom: bool = False
    truncated: bool = False
    flooded: bool = False
    signal: int | None = None
    state_lost: bool = False
    fresh: bool = False

    @property
    def text(self) -> str:
        """stdout then stderr, undecodable bytes shown as backslash escapes."""
        return (self.stdout + self.stderr).decode("utf-8", "backslashreplace")


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """What a provider really enforces. `not_bounded` says in words what it does not."""

    isolates_files: bool
    isolates_network: bool
    isolates_processes: bool
    bounds_total_memory: bool
    bounds_session_memory: bool
    bounds_pids: bool
    filters_syscalls: bool
    not_bounded: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckResult:
    """One line of `rz-agent doctor`: a thing that was looked at, and what to do if it is not right."""

    name: str
    status: Literal["ok", "warning", "failed"]
    detail: str
    remedy: str = ""


class Sandbox(Protocol):
    """One isolated place. Every method may be called by many coroutines at once.

    Each raises `Died` when the sandbox is gone, to every waiter, and never waits for ever.
    A cancelled call stops its program (a cancelled cell loses the session's state).
    """

    @property
    def id(self) -> str: ...

    async def exec(
        self,
        argv: Sequence[str],
        *,
        stdin: bytes = b"",
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        timeout_s: float | None = None,
        output_limit: int | None = None,
    ) -> ExecResult:
        """Run a command. `env` is all it sees besides PATH, HOME and LANG; stdin ends after the bytes."""
        ...

    async def python(self, code: str, *, session: str, timeout_s: float | None = None) -> ExecResult:
        """Run one cell in the interpreter named `session`; a last expression is echoed like a prompt does.

        At the deadline it is interrupted (state kept), a second later killed (`state_lost`).
        """
        ...

    async def end_session(self, session: str) -> None:
        """Stop the interpreter and all it started, and drop its files. Unknown names are fine."""
        ...

    async def read(self, path: str, *, max_bytes: int = 8 << 20) -> bytes:
        """A regular file of the sandbox's own writable folders; `FileError` for anything else."""
        ...

    async def write(self, path: str, data: bytes, *, mode: int = 0o644) -> None:
        """Replace a file atomically, making its folders."""
        ...

    async def reset(self) -> None:
        """As new: every program stopped, every session forgotten, every file dropped."""
        ...

    async def alive(self) -> bool:
        """Whether it answers now."""
        ...

    async def close(self) -> None:
        """Stop everything and leave nothing. Idempotent; runs to its end even if the caller is cancelled."""
        ...

    async def __aenter__(self) -> Self: ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class Provider(Protocol):
    """Makes sandboxes. Named in a recipe by `sandbox.provider`; see `registry.py` for how it is found."""

    @property
    def name(self) -> str: ...

    async def create(self, spec: SandboxSpec) -> Sandbox: ...

    async def reap(self) -> list[str]:
        """Remove what owners that died left behind; returns the names of what was removed."""
        ...

    async def check(self) -> list[CheckResult]:
        """Look at everything it needs, by doing it where that is cheap. Never raises for a missing part."""
        ...

    def capabilities(self) -> Capabilities: ...

    async def aclose(self) -> None:
        """Close every sandbox it made."""
        ...


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
