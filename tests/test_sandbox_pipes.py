"""A sandbox that only stdin and stdout reach: the shortest provider's start, and its end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from pathlib import Path

import pytest
from rz_agent.sandboxes.agent.boot import BOOT, settings, sources
from rz_agent.sandboxes.agent.sandbox import AgentSandbox
from rz_agent.sandboxes.errors import DeathCause
from rz_agent.sandboxes.spec import SandboxSpec

pytestmark = pytest.mark.anyio


class PipedSandbox(AgentSandbox):
    """A plain Python process in a folder."""

    def __init__(self, spec: SandboxSpec, box: Path) -> None:
        super().__init__(
            "piped",
            provider="piped",
            limits=spec.limits,
            folders=[str(box)],
            environment={"PATH": os.defpath},
            bounded=False,
            own_uid=False,
            lifetime_s=spec.lifetime_s,
        )
        self.process: asyncio.subprocess.Process

    async def boot(self, spec: SandboxSpec) -> None:
        command = [sys.executable, "-I", "-S", "-c", BOOT, "0,1"]
        pipe = asyncio.subprocess.PIPE
        self.process = await asyncio.create_subprocess_exec(
            *command, stdin=pipe, stdout=pipe, env={}, cwd=self.box, start_new_session=True
        )
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(sources())
        first = {**settings(spec, ()), "isolation": "none", "writable": list(self.folders)}
        await self.channel.open(self.process.stdout, self.process.stdin, first, 60.0)

    async def _why_dead(self) -> tuple[DeathCause, str]:
        return "killed", "its agent ended"

    async def _release(self, steps: contextlib.AsyncExitStack) -> None:
        steps.push_async_callback(self.process.wait)


async def test_it_runs_programs_and_ends_with_its_pipes(tmp_path: Path) -> None:
    sandbox = PipedSandbox(SandboxSpec(), tmp_path)
    await sandbox.boot(SandboxSpec())
    async with asyncio.timeout(60):
        assert (await sandbox.exec(["cat"], stdin=b"through a pipe")).stdout == b"through a pipe"
        assert (await sandbox.python("6 * 7", session="a")).stdout == b"42\n"
        await sandbox.close()
    assert sandbox.process.returncode is not None
