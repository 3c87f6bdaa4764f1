"""A bash that stays: folder, variables, functions and background jobs last from one command to the next.

    shell = Shell(sandbox, cwd="/box/app", env={})
    await shell.run("cd src && ls", timeout_s=60, chars=10_000) -> what the policy reads

Invariants: a command ends by its deadline; one that does not is killed with its shell, and the next command
gets a new one in the same folder, which is said. Output is bounded while it comes, head and tail are shown.
Waits: the policy for its command. One command at a time.
"""

from __future__ import annotations

import asyncio
import re
import secrets
import shlex
from collections.abc import Mapping
from dataclasses import dataclass

from ...sandboxes.errors import CreateError
from ...sandboxes.sandbox import Process, Sandbox
from ..tool import ToolError

_HELD = 1 << 20  # bytes of output kept while a command runs: the first and the last half
_FLOOD = 64 << 20
_OUT = 19  # where the end of a command is told, whatever it did to its own output
_AGAIN = "The next command starts in a new shell, in the same folder: variables and background jobs are gone."


@dataclass(frozen=True, slots=True, kw_only=True)
class _Done:
    output: str
    exit_code: int = 0
    note: str = ""


class Shell:
    """`cwd` is where the first command starts; `env` what it sees besides PATH, HOME and LANG."""

    def __init__(self, sandbox: Sandbox, *, cwd: str, env: Mapping[str, str]) -> None:
        self._sandbox, self._cwd, self._env = sandbox, cwd, env
        self._process: Process | None = None
        self._left = b""  # what came after the end of the last command: of background jobs

    async def run(self, command: str, *, timeout_s: float, chars: int) -> str:
        """Run one command, of any number of lines; ToolError where it cannot be one."""
        if "\0" in command:
            raise ToolError("a command has no NUL character in it")
        done = await self._guarded(command, timeout_s)
        code = f"(exit code {done.exit_code})" if done.exit_code else ""
        parts = (cut(done.output.strip("\n"), chars), code, done.note)
        return "\n".join(part for part in parts if part) or "(no output)"

    async def close(self) -> None:
        """End it with all that it started; the next command gets a new one."""
        process, self._process, self._left = self._process, None, b""
        if process is not None:
            await process.kill()

    async def _guarded(self, command: str, timeout_s: float) -> _Done:
        if self._process is None:
            argv = ["bash", "--noprofile", "--norc"]
            # Not `cwd=`: the policy may have removed that folder, which is no failure of the sandbox.
            try:
                self._process = await self._sandbox.start(argv, env=self._env)
            except CreateError as error:  # in a sandbox that lives: what the policy started leaves no room
                raise ToolError(f"no shell can be started: {error}") from error
            await self._process.write(
                f"exec 2>&1 {_OUT}>&1\ncd -- {shlex.quote(self._cwd)}\n".encode("utf-8", "surrogateescape")
            )
        mark = secrets.token_hex(16)
        await self._process.write(_wrapped(command, mark))
        try:
            async with asyncio.timeout(timeout_s):
                return await self._read(self._process, mark)
        except TimeoutError:
            output = self._shown()
            await self.close()
            return _Done(output=output, note=f"The command was stopped after {timeout_s:g} s. {_AGAIN}")
        except BaseException:
            await self.close()  # else the next command would read this one's output
            raise

    async def _read(self, process: Process, mark: str) -> _Done:
        end = re.compile(rb"\n%s (\d+) ([^\n]*)\n" % mark.encode())
        total = 0
        while True:
            found = end.search(self._left, max(0, len(self._left) - _HELD // 4))
            if found:
                output, self._left = self._left[: found.start()], self._left[found.end() :]
                self._cwd = found[2].decode("utf-8", "surrogateescape")
                return _Done(output=_text(output), exit_code=int(found[1]))
            if total > _FLOOD:
                output = self._left
                await self.close()
                return _Done(output=_text(output), note=f"The command was stopped: too much output. {_AGAIN}")
            came = await process.read(timeout_s=3600.0)
            total += len(came.stdout)
            self._left = _bounded(self._left + came.stdout + came.stderr)
            if came.ended and not end.search(self._left):
                code = (await process.wait()).exit_code
                output = self._left
                await self.close()
                return _Done(output=_text(output), exit_code=code, note=f"The shell ended. {_AGAIN}")

    def _shown(self) -> str:
        return _text(self._left)


def _wrapped(command: str, mark: str) -> bytes:
    """The lines that run it in this very shell, without its input, and then tell its end and the folder."""
    text = (
        f"eval \"$(cat <<'{mark}'\n{command}\n{mark}\n)\" </dev/null\n"
        f'printf \'\\n%s %s %s\\n\' {mark} "$?" "$PWD" >&{_OUT}\n'
    )
    return text.encode("utf-8", "surrogateescape")


def _bounded(data: bytes) -> bytes:
    if len(data) <= _HELD:
        return data
    return data[: _HELD // 2] + b"\n[... output cut ...]\n" + data[-_HELD // 2 + 64 :]


def _text(data: bytes) -> str:
    return data.decode("utf-8", "backslashreplace")


def cut(text: str, chars: int) -> str:
    """At most `chars` characters of text, head and tail, and a notice where some are missing.

    >>> cut("abcdefgh", 4)
    'ab\\n[... 4 characters cut ...]\\ngh'
    """
    if len(text) <= chars:
        return text
    head, tail = text[: chars // 2], text[len(text) - (chars - chars // 2) :]
    return f"{head}\n[... {len(text) - chars} characters cut ...]\n{tail}"
