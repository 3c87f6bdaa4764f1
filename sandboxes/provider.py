"""Whoever makes sandboxes: create, list, kill, reap, check. Named by `sandbox.provider`; see `registry.py`.

Invariant: nothing outlives its owner. A provider marks what it makes with its owner (`owner.py`), ends it
when the owner's process ends (a closed socket, a short time to live), and `reap` removes what is left.
Waits: `create` for one sandbox to answer, bounded by the provider; nobody for another caller's sandbox.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol

from .sandbox import Sandbox
from .spec import SandboxSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """What a provider really enforces, and which of the optional operations it has.

    isolates_sessions   sessions of one sandbox see neither each other's files nor processes
    bounds_disk         writable folders hold `Limits.disk_mb` each and no more
    images              `SandboxSpec.image` is honoured
    snapshots           `Sandbox.snapshot` and `reset(to=...)` work
    desktop             its sandboxes are `Desktop`s
    open_network        `network = "open"` can be had
    not_bounded         in words, what is not enforced
    """

    isolates_files: bool
    isolates_network: bool
    isolates_processes: bool
    isolates_sessions: bool
    bounds_total_memory: bool
    bounds_session_memory: bool
    bounds_pids: bool
    filters_syscalls: bool
    bounds_disk: bool = False
    images: bool = False
    snapshots: bool = False
    desktop: bool = False
    open_network: bool = False
    not_bounded: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckResult:
    """One line of `rz-agent doctor`: a thing that was looked at, and what to do if it is not right."""

    name: str
    status: Literal["ok", "warning", "failed"]
    detail: str
    remedy: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxInfo:
    """One sandbox as its provider lists it. `owner` is an `owner.Owner` as text, "" when unknown."""

    id: str
    provider: str
    state: Literal["starting", "running", "paused", "ended"]
    owner: str = ""
    run_id: str = ""
    age_s: float = 0.0
    labels: Mapping[str, str] = field(default_factory=dict)


class Provider(Protocol):
    """Makes sandboxes, and knows which there are."""

    @property
    def name(self) -> str: ...

    @property
    def place(self) -> str:
        """Which daemon or account it is of, for a person to recognise: who is of another one sees none of its
        sandboxes. No secret, and "" where the owner's machine says it all.
        """
        ...

    async def create(self, spec: SandboxSpec) -> Sandbox:
        """A new sandbox that answers. What was made before a failure, or a cancellation, is unmade first.

        CreateError, RateLimited, QuotaExceeded; Unavailable or Misconfigured with the remedy.
        """
        ...

    async def live(self, *, run_id: str | None = None) -> list[SandboxInfo]:
        """Those of this provider that exist now, whoever made them; of one run when given."""
        ...

    async def kill(self, sandbox_id: str) -> bool:
        """End one, whoever made it; False when there is none of this name."""
        ...

    async def reap(self, *, run_id: str | None = None, dead_owners: bool = True) -> list[str]:
        """Remove what owners left behind (of one run when given); what was removed, by name.

        With `dead_owners` false also what living owners hold: only for a person who says so.
        """
        ...

    async def check(self) -> list[CheckResult]:
        """Look at everything it needs, by doing it where that is cheap. Never raises for a missing part."""
        ...

    def capabilities(self) -> Capabilities: ...

    async def aclose(self) -> None:
        """Close every sandbox it made."""
        ...
