"""One local sandbox: an agent in bubblewrap, a cgroup for each of its programs, and nothing that stays.

What it does is `agent.sandbox`; here is what it is made of, and how that is undone.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable
from itertools import count
from pathlib import Path

from ..agent.sandbox import EXPIRED, OUT_OF_MEMORY, AgentSandbox
from ..errors import CreateError, DeathCause
from ..spec import SandboxSpec
from .bubblewrap import ENVIRONMENT, WRITABLE
from .cgroups import SandboxGroups
from .process import Process

PROVIDER = "local"
MAX_ERROR = 4000


class LocalSandbox(AgentSandbox):
    """See `sandbox.Sandbox`. Made by `LocalProvider.create`; `scratch` is its folder without isolation."""

    def __init__(
        self, name: str, spec: SandboxSpec, *, groups: SandboxGroups | None, scratch: Path | None,
        on_close: Callable[[LocalSandbox], None],
    ) -> None:  # fmt: skip
        folders = WRITABLE if scratch is None else (os.path.realpath(scratch / "box"),)
        super().__init__(
            name, provider=PROVIDER, limits=spec.limits, folders=folders,
            environment={**ENVIRONMENT, **spec.env},
            bounded=groups is not None and groups.has("memory"), own_uid=scratch is None,
            lifetime_s=spec.lifetime_s,
        )  # fmt: skip
        self._groups, self._scratch, self._on_close = groups, scratch, on_close
        self.labels = spec.labels
        self._process: Process | None = None
        self._errors = os.memfd_create("rz-agent-errors", os.MFD_CLOEXEC)
        self._numbers = count()

    @property
    def errors_fd(self) -> int:
        """Where bubblewrap and the agent write what went wrong."""
        return self._errors

    @property
    def pid(self) -> int | None:
        """The harness's child that holds everything: bubblewrap, or the bare agent."""
        return None if self._process is None else self._process.pid

    def started(self, process: Process) -> None:
        """The provider has started its process."""
        self._process = process

    def error_text(self) -> str:
        """What bubblewrap or the agent said."""
        return os.pread(self._errors, MAX_ERROR, 0).decode("utf-8", "replace").strip()

    def _new_group(self) -> str:
        if self._groups is None:
            return ""
        name = f"p{next(self._numbers)}"
        try:
            self._groups.add(name, self._limits)
        except OSError as error:  # whoever ended the sandbox has removed the one above it, say
            message = f"a program's cgroup was not made: {error}"
            raise CreateError(message, provider=PROVIDER, sandbox_id=self.id) from error
        return name

    def _remove_group(self, group: str) -> None:
        if group and self._groups is not None:
            self._groups.remove(group)

    def _oom_kills(self, group: str) -> int:
        return self._groups.oom_kills(group) if self._groups is not None and group else 0

    async def _why_dead(self) -> tuple[DeathCause, str]:
        if self._closing is not None:
            return "closed", "it was closed"
        if self._expired:
            return EXPIRED
        if self._groups is not None and self._groups.oom_kills():
            return OUT_OF_MEMORY
        return "killed", f"its agent ended {self.error_text()}".strip()

    async def _release(self, steps: contextlib.AsyncExitStack) -> None:
        steps.callback(self._on_close, self)
        steps.callback(os.close, self._errors)
        if self._scratch is not None:
            steps.callback(shutil.rmtree, self._scratch, ignore_errors=True)
        if self._groups is not None:
            steps.push_async_callback(self._groups.close)
        if self._process is not None:
            steps.push_async_callback(self._end_process, self._process)

    async def _end_process(self, process: Process) -> None:
        if not await process.wait(2.0):
            process.kill()
            await process.wait(5.0)
        process.release()
