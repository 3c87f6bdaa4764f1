"""A sandbox that only stdin and stdout reach: the shortest provider's start and end, an agent's mistakes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from pathlib import Path

import pytest
from rz_agent.sandboxes.agent.boot import BOOT, settings, sources
from rz_agent.sandboxes.agent.sandbox import AgentSandbox
from rz_agent.sandboxes.errors import CreateError, DeathCause, FileError
from rz_agent.sandboxes.inside.wire import LENGTH
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

    async def boot(self, spec: SandboxSpec, agent: bytes | None = None) -> None:
        command = [sys.executable, "-I", "-S", "-c", BOOT, "0,1"]
        pipe = asyncio.subprocess.PIPE
        self.process = await asyncio.create_subprocess_exec(
            *command, stdin=pipe, stdout=pipe, env={}, cwd=self.box, start_new_session=True
        )
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(agent or sources())
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


# What stands for a mistake nobody has found yet: of a program's output, of its end, of a request.
MISTAKES = {
    "programs": """
def absorb(self, fd, take=Program.absorb):
    if self.key == 2:
        raise RecursionError("while its output came")
    return take(self, fd)
def drain(self, take=Program.drain):
    if self.key == 3:
        raise RecursionError("after its end")
    take(self)
Program.absorb, Program.drain = absorb, drain
""",
    "files": """
def list_folder(path, folders):
    raise RecursionError("of a listing")
def empty(folder, mode):
    raise RecursionError("of a reset")
""",
}


def with_mistakes() -> bytes:
    modules = json.loads(sources()[LENGTH.size :])
    text = json.dumps([[name, source + MISTAKES.get(name, "")] for name, source in modules]).encode()
    return LENGTH.pack(len(text)) + text


async def test_a_mistake_of_the_agent_about_one_program_or_request_reaches_no_other(tmp_path: Path) -> None:
    sandbox = PipedSandbox(SandboxSpec(), tmp_path)
    await sandbox.boot(SandboxSpec(), with_mistakes())
    async with asyncio.timeout(60):
        bystander = await sandbox.start(["cat"])
        assert (await sandbox.exec(["sh", "-c", "echo out; sleep 60"], timeout_s=60)).signal == 9
        assert (await sandbox.exec(["echo", "out"])).exit_code == 0
        await bystander.write(b"x")
        assert (await bystander.read(timeout_s=20)).stdout == b"x"
        with pytest.raises(FileError, match="of a listing"):
            await sandbox.list_dir(".")
        with pytest.raises(CreateError, match="could not be reset: of a reset"):
            await sandbox.reset()
        assert (await bystander.wait()).signal == 9  # which the reset ended before it failed
        assert (await sandbox.exec(["echo", "still here"])).stdout == b"still here\n"
        await sandbox.close()
