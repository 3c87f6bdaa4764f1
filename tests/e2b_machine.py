"""One sandbox of the stand-in for E2B: real processes in a namespace, served by the SDK's generated stubs."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import os
import secrets
import shutil
import signal
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

from connectrpc.code import Code
from connectrpc.errors import ConnectError
from e2b.envd.process import process_pb
from e2b.envd.process.process_connect import Process, ProcessASGIApplication
from protobuf import Oneof

USER = "1000"
ENVD = "0.6.4"
_SHOWN = ("/usr", "/etc/alternatives", "/etc/ld.so.cache", "/etc/fonts", "/etc/xdg", "/etc/X11")
_LINKS = ("bin", "sbin", "lib", "lib64")
_IN = 'cd "$1" && shift && exec "$@"'
# A kernel: requests as lines on its input, events as lines on its output, SIGINT ends a cell.
_KERNEL = r"""
import ast, io, json, os, signal, sys, traceback
channel = os.fdopen(os.dup(1), "w", buffering=1)
os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
def say(kind, **rest): channel.write(json.dumps({"type": kind, **rest}) + "\n")
class Stream(io.TextIOBase):
    def __init__(self, kind): self.kind = kind
    def write(self, text): say(self.kind, text=text, timestamp=0); return len(text)
sys.stdout, sys.stderr = Stream("stdout"), Stream("stderr")
names = {"__name__": "__main__"}
signal.signal(signal.SIGINT, signal.SIG_IGN)
for count, line in enumerate(sys.stdin, 1):
    asked = json.loads(line)
    os.environ.update(asked["env_vars"] or {})
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        tree, last = ast.parse(asked["code"]), None
        if tree.body and isinstance(tree.body[-1], ast.Expr):
            last = ast.Expression(tree.body.pop().value)
        exec(compile(tree, "<cell>", "exec"), names)
        value = eval(compile(last, "<cell>", "eval"), names) if last else None
        if value is not None:
            say("result", text=repr(value), is_main_result=True)
    except BaseException as error:
        shown = "\x1b[31m" + traceback.format_exc() + "\x1b[0m"
        say("error", name=type(error).__name__, value=str(error), traceback=shown)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    say("number_of_executions", execution_count=count)
"""


class Machine:
    """Begun by `start`, ended by `end` or when the server ends."""

    def __init__(self, asked: dict[str, Any], folder: Path) -> None:
        self.id, self.token = "i" + secrets.token_hex(9), secrets.token_hex(16)
        self.template: str = asked["templateID"]
        self.labels: dict[str, str] = asked.get("metadata") or {}
        self.env: dict[str, str] = asked.get("envVars") or {}
        self.internet: bool = asked.get("allow_internet_access", True)
        self.started = time.time()
        self.ends = self.started + asked.get("timeout", 300)
        self.folder = folder
        self.connections: list[Any] = []
        self.programs: dict[int, asyncio.subprocess.Process] = {}
        self.kernels: dict[str, asyncio.subprocess.Process] = {}
        self.init: asyncio.subprocess.Process
        self.root = 0  # pid of its first process, as this machine sees it

    @classmethod
    async def start(cls, asked: dict[str, Any]) -> Machine:
        machine = cls(asked, Path(tempfile.mkdtemp(prefix="rz-e2b-")))
        for name in ("home", "tmp"):
            (machine.folder / name).mkdir()
            os.chown(machine.folder / name, int(USER), int(USER))
        machine.folder.chmod(0o755)
        (machine.folder / "passwd").write_text(
            f"root:x:0:0::/root:/bin/sh\nuser:x:{USER}:{USER}::/home/user:\n"
        )
        (machine.folder / "group").write_text(f"root:x:0:\nuser:x:{USER}:\n")
        read, write = os.pipe()
        machine.init = await asyncio.create_subprocess_exec(
            *machine._namespace(write), pass_fds=[write], env={}, stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
        )  # fmt: skip
        os.close(write)
        assert machine.init.stdout is not None
        assert await machine.init.stdout.readline() == b"up\n"
        with os.fdopen(read) as info:
            machine.root = json.loads(await asyncio.to_thread(info.read))["child-pid"]
        return machine

    def _namespace(self, info: int) -> list[str]:
        command = [
            "bwrap",
            "--unshare-pid",
            "--unshare-net",
            "--unshare-ipc",
            "--unshare-uts",
            "--info-fd",
            str(info),
        ]
        command += ["--perms", "0755", "--dir", "/etc", "--perms", "0755", "--dir", "/home"]
        for path in _SHOWN:
            command += ["--ro-bind-try", path, path]
        for name in _LINKS:
            command += ["--symlink", f"usr/{name}", f"/{name}"]
        for name in ("passwd", "group"):
            command += ["--ro-bind", str(self.folder / name), f"/etc/{name}"]
        command += ["--proc", "/proc", "--dev", "/dev", "--tmpfs", "/root"]
        command += [
            "--bind",
            str(self.folder / "home"),
            "/home/user",
            "--bind",
            str(self.folder / "tmp"),
            "/tmp",
        ]
        return [*command, "--die-with-parent", "/bin/sh", "-c", "echo up; exec sleep infinity"]

    def end(self) -> None:
        """The end of its first process is the end of all."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.root, signal.SIGKILL)
        shutil.rmtree(self.folder, ignore_errors=True)

    def facts(self) -> dict[str, Any]:
        def moment(at: float) -> str:
            return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(at))

        return {
            "sandboxID": self.id, "templateID": self.template, "clientID": "c", "state": "running",
            "startedAt": moment(self.started), "endAt": moment(self.ends), "metadata": self.labels,
            "envdVersion": ENVD, "envdAccessToken": self.token, "cpuCount": 2, "memoryMB": 512,
            "diskSizeMB": 512,
        }  # fmt: skip

    # -- its processes ----------------------------------------------------------------------------------

    async def spawn(
        self, argv: list[str], *, user: str = "user", env: dict[str, str] | None = None, cwd: str = "",
        stdin: bool = False,
    ) -> asyncio.subprocess.Process:  # fmt: skip
        pipe = asyncio.subprocess.PIPE
        drop = () if user == "root" else ("setpriv", "--reuid", USER, "--regid", USER, "--clear-groups", "--")
        base = {"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": "/root" if user == "root" else "/home/user"}
        return await asyncio.create_subprocess_exec(
            "nsenter", "-t", str(self.root), "-p", "-m", "-n", "-i", "-u", "--",
            *drop, "/bin/sh", "-c", _IN, "sh", cwd or "/home/user", *argv,
            stdin=pipe if stdin else asyncio.subprocess.DEVNULL, stdout=pipe, stderr=pipe,
            env={**base, **self.env, **(env or {})}, start_new_session=True,
        )  # fmt: skip

    async def new_kernel(self, cwd: str) -> str:
        name = secrets.token_hex(8)
        self.kernels[name] = await self.spawn(["setsid", "python3", "-u", "-c", _KERNEL], cwd=cwd, stdin=True)
        return name

    def end_kernel(self, name: str) -> None:
        kill(self.kernels.pop(name))


def kill(program: asyncio.subprocess.Process) -> None:
    """SIGKILL to a process of the namespace: the only child of its nsenter, which ends with it."""
    with contextlib.suppress(OSError):
        for child in Path(f"/proc/{program.pid}/task/{program.pid}/children").read_text().split():
            os.kill(int(child), signal.SIGKILL)


class Processes(Process):  # type: ignore[misc] # the SDK is not typed here
    """The daemon's process service."""

    def __init__(self, machine: Callable[[Any], Machine]) -> None:
        self._machine = machine

    def application(self) -> Any:
        return ProcessASGIApplication(self)

    async def start(self, request: Any, ctx: Any) -> AsyncIterator[Any]:
        machine, asked = self._machine(ctx.request_headers), request.process
        given = base64.b64decode(ctx.request_headers.get("authorization", "").removeprefix("Basic "))
        try:
            program = await machine.spawn(
                [asked.cmd, *asked.args], user=given.decode().rstrip(":") or "user", env=dict(asked.envs),
                cwd=asked.cwd, stdin=request.stdin,
            )  # fmt: skip
        except OSError as error:
            raise ConnectError(Code.INVALID_ARGUMENT, str(error)) from error
        machine.programs[program.pid] = program
        yield _event("start", process_pb.ProcessEvent.StartEvent(pid=program.pid))
        pieces: asyncio.Queue[tuple[str, bytes]] = asyncio.Queue(2)  # a slow reader holds the program back

        async def pump(name: str, stream: asyncio.StreamReader) -> None:
            while piece := await stream.read(32768):
                await pieces.put((name, piece))
            await pieces.put((name, b""))

        assert program.stdout is not None
        assert program.stderr is not None
        pumps = [
            asyncio.create_task(pump("stdout", program.stdout)),
            asyncio.create_task(pump("stderr", program.stderr)),
        ]
        try:
            left = 2
            while left:
                name, piece = await pieces.get()
                left -= not piece
                if piece:
                    yield _event("data", process_pb.ProcessEvent.DataEvent(output=Oneof(name, piece)))
        finally:
            for task in pumps:
                task.cancel()
        code = await program.wait()
        status = f"exit status {code}" if code >= 0 else f"signal: {-code}"
        yield _event(
            "end", process_pb.ProcessEvent.EndEvent(exit_code=max(code, -1), exited=code >= 0, status=status)
        )

    async def send_input(self, request: Any, ctx: Any) -> Any:
        program = self._program(request, ctx)
        assert program.stdin is not None
        try:
            program.stdin.write(request.input.input.value)
            await program.stdin.drain()
        except OSError as error:
            raise ConnectError(Code.INTERNAL, f"error writing to stdin: {error}") from error
        return process_pb.SendInputResponse()

    async def close_stdin(self, request: Any, ctx: Any) -> Any:
        program = self._program(request, ctx)
        assert program.stdin is not None
        program.stdin.close()
        return process_pb.CloseStdinResponse()

    async def send_signal(self, request: Any, ctx: Any) -> Any:
        kill(self._program(request, ctx))
        return process_pb.SendSignalResponse()

    def _program(self, request: Any, ctx: Any) -> asyncio.subprocess.Process:
        machine, pid = self._machine(ctx.request_headers), request.process.selector.value
        program = machine.programs.get(pid)
        if program is None or program.returncode is not None:
            raise ConnectError(Code.NOT_FOUND, f"process with pid {pid} not found")
        return program


def _event(kind: Any, value: Any) -> Any:
    return process_pb.StartResponse(event=process_pb.ProcessEvent(event=Oneof(kind, value)))
