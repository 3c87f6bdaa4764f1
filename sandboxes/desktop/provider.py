"""Desktops in the sandboxes of another provider, which isolates and bounds them; this one adds the screen.

    create(): a sandbox with room for a desktop -> its helper program -> X server, window manager, bus

Invariant: a sandbox whose desktop did not start is closed before the error leaves `create`.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace

from ..errors import Misconfigured, SandboxError
from ..provider import Capabilities, CheckResult, Provider, SandboxInfo
from ..spec import SandboxSpec, roomier
from ..tables import DesktopTable
from .archive import build
from .hand import PROVIDER
from .sandbox import DesktopSandbox

# In place of what is the default for a command: all programs of a desktop are one program to the sandbox.
ROOM = {"memory_mb": 2048, "pids": 1024, "disk_mb": 512, "cpu_s": 86400, "open_files": 4096}
SMALLEST, LARGEST = 64, 8192  # pixels


class DesktopProvider:
    """See `provider.Provider`. `under` makes the sandboxes."""

    name = PROVIDER

    def __init__(self, config: DesktopTable, under: Provider) -> None:
        self._config, self._under = config, under

    @property
    def place(self) -> str:
        """That of the provider under it."""
        return self._under.place

    async def create(self, spec: SandboxSpec) -> DesktopSandbox:
        """A new desktop that answers. Unavailable when the sandbox lacks its programs."""
        size = spec.screen or self._config.size
        if not all(SMALLEST <= side <= LARGEST for side in size):
            raise Misconfigured(
                f"a screen of {size[0]} x {size[1]} pixels\n  Give sides from {SMALLEST} to {LARGEST} "
                "(sandbox.desktop.size, or the screen that the environment asks for).",
                provider=PROVIDER,
            )
        if not self._under.capabilities().isolates_files:
            raise Misconfigured(
                f"a desktop needs a sandbox with files of its own; {self._under.name} has none\n"
                '  Set sandbox.local.isolation = "namespaces".',
                provider=PROVIDER,
            )
        archive = await asyncio.to_thread(build)
        sandbox = await self._under.create(replace(roomier(spec, ROOM), screen=None))
        desktop = DesktopSandbox(sandbox, self._config, size, archive)
        try:
            await desktop.open()
        except BaseException:
            await sandbox.close()
            raise
        return desktop

    async def live(self, *, run_id: str | None = None) -> list[SandboxInfo]:
        """The sandboxes of the provider under it."""
        return await self._under.live(run_id=run_id)

    async def kill(self, sandbox_id: str) -> bool:
        """End one."""
        return await self._under.kill(sandbox_id)

    async def reap(self, *, run_id: str | None = None, dead_owners: bool = True) -> list[str]:
        """Remove what owners left behind."""
        return await self._under.reap(run_id=run_id, dead_owners=dead_owners)

    async def check(self) -> list[CheckResult]:
        """What the provider under it says, then a trial desktop."""
        found = await self._under.check()
        return [*found, await self._trial()]

    async def _trial(self) -> CheckResult:
        begun = time.monotonic()
        try:
            async with await self.create(SandboxSpec()) as desktop:
                shot = await desktop.screenshot()
        except SandboxError as error:
            detail, _, remedy = str(error).partition("\n")
            return CheckResult(name="desktop", status="failed", detail=detail, remedy=remedy.strip())
        seconds = time.monotonic() - begun
        detail = f"{shot.width} x {shot.height} pixels over {self._under.name}, made in {seconds:.1f} s"
        return CheckResult(name="desktop", status="ok", detail=detail)

    def capabilities(self) -> Capabilities:
        """Those of the provider under it, and a screen."""
        return replace(self._under.capabilities(), desktop=True)

    async def aclose(self) -> None:
        """Close every sandbox it made."""
        await self._under.aclose()
