"""What one program did, as a value: exit code, output, and how the limits met it."""

from __future__ import annotations

from dataclasses import dataclass


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
