"""Where promises are tried: a provider, a spec with small limits, one shared sandbox, a planted secret.

The shared sandbox is made when it is first asked for, and again when a promise ended it. What a promise wants
to end, it makes for itself with `fresh`.
"""

from __future__ import annotations

import os
import secrets
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from ..exec_result import ExecResult
from ..owner import EXPIRES_LABEL, LABEL, RUN_LABEL, Owner
from ..provider import Provider
from ..sandbox import Sandbox
from ..spec import Limits, SandboxSpec

SMALL = Limits(
    memory_mb=192, pids=32, disk_mb=16, cpu_s=20, timeout_s=10, output_bytes=4096, flood_bytes=1 << 20
)
VARIABLE = "RZ_CONFORMANCE_SECRET"  # of this process, while promises are tried; it must not get inside


class Place:
    """An asynchronous context: leaving it closes the shared sandbox, not the provider."""

    def __init__(self, provider: Provider, spec: SandboxSpec) -> None:
        self.provider, self.can = provider, provider.capabilities()
        self.run_id = f"conformance-{secrets.token_hex(4)}"
        self.owner = str(Owner.here())
        labels = {RUN_LABEL: self.run_id, LABEL: self.owner, EXPIRES_LABEL: "4000000000"}
        self.spec = replace(spec, limits=SMALL, labels=labels)
        self.secret = f"planted-{secrets.token_hex(16)}"
        self._folder = tempfile.TemporaryDirectory(prefix="rz-agent-conformance-")
        self._shared: Sandbox | None = None
        self._count = 0

    @property
    def planted(self) -> Path:
        """A file of this machine with the secret in it."""
        return Path(self._folder.name) / "secret"

    async def __aenter__(self) -> Self:
        self.planted.write_text(self.secret)
        os.environ[VARIABLE] = self.secret
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.environ.pop(VARIABLE, None)  # one place may be left while another of this process is open
        self._folder.cleanup()
        if self._shared is not None:
            await self._shared.close()

    async def sandbox(self) -> Sandbox:
        """The shared one, alive."""
        if self._shared is not None and not await self._shared.alive():
            await self._shared.close()
            self._shared = None
        if self._shared is None:
            self._shared = await self.provider.create(self.spec)
        return self._shared

    @asynccontextmanager
    async def fresh(self, **changes: Any) -> AsyncIterator[Sandbox]:
        """One of its own, with changes to the spec."""
        sandbox = await self.provider.create(replace(self.spec, **changes))
        try:
            yield sandbox
        finally:
            await sandbox.close()

    async def sh(self, script: str, **options: Any) -> ExecResult:
        """A shell script in the shared sandbox."""
        return await (await self.sandbox()).exec(["sh", "-c", script], **options)

    async def command(self, code: str, **options: Any) -> ExecResult:
        """Python code as a command in the shared sandbox."""
        return await (await self.sandbox()).exec(["python3", "-I", "-c", code], **options)

    async def cell(
        self, code: str, *, session: str | None = None, timeout_s: float | None = None
    ) -> ExecResult:
        """Python code as a cell in the shared sandbox; in a session of its own unless one is named."""
        sandbox = await self.sandbox()
        if session is not None:
            return await sandbox.python(code, session=session, timeout_s=timeout_s)
        self._count += 1
        name = f"once {self._count}"
        try:
            return await sandbox.python(code, session=name, timeout_s=timeout_s)
        finally:
            await sandbox.end_session(name)

    async def both_ways(self, code: str, **options: Any) -> list[ExecResult]:
        """The same code as a command and as a cell."""
        return [await self.command(code, **options), await self.cell(code, **options)]

    async def mine(self) -> set[str]:
        """Ids of this run's sandboxes, as the provider lists them."""
        return {info.id for info in await self.provider.live(run_id=self.run_id) if info.state != "ended"}
