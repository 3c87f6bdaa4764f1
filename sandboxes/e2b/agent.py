"""The channel to the agent in an E2B sandbox: its stdin by requests, its stdout as one stream of events.

    harness --socket pair--> pump --SendInput--> stdin      frames as they are
    harness <--------- stream of Start --------- stdout, stderr

The stream is read with the SDK's generated client (`e2b.envd`), which its own `commands.run` is built on:
`run` decodes output as text with replacement characters, and frames are bytes.

Invariant: when either way breaks, the channel ends; `failure` then says what the SDK said.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncGenerator
from typing import Any

from ..agent.boot import BOOT
from . import sdk

_PIECE = 256 << 10  # of input in one request
_MAX_ERROR = 4000
# $1 is the Python, $2 what it runs. The sandbox is a virtual machine, so its root is ours to use: for
# folders, for a PID namespace whose end is the end of all programs, and for programs' uids.
_BEGIN = """
umask 022
mkdir -p /box /sessions && chmod 711 /sessions && chmod 1777 /tmp /dev/shm || exit 1
printf '%s\\n' "$PATH" >&2
exec env -i PATH="$PATH" unshare --pid --fork --kill-child --mount-proc -- "$1" -I -S -u -c "$2" 0,1
"""


class AgentProcess:
    """The agent as a program of one sandbox, begun by `start`. Its output is an `agent.channel.Incoming`."""

    def __init__(self, made: Any) -> None:
        self._made = made
        self._config = made.connection_config
        self._rpc = sdk.create_rpc_client(sdk.ProcessClient, made.envd_api_url, self._config)
        self._events: AsyncGenerator[Any, None] | None = None
        self._pump: asyncio.Task[None] | None = None
        self._reading: asyncio.Task[Any] | None = None
        self._stdout, self._stderr = bytearray(), bytearray()
        self.failure: BaseException | None = None

    async def start(self, python: str) -> asyncio.StreamWriter:
        """What writes to its stdin; SDK errors."""
        process = sdk.process_pb.ProcessConfig(
            cmd="/bin/sh", args=["-c", _BEGIN, "sh", python, BOOT], cwd="/"
        )
        headers = {
            **sdk.authentication_header(self._made._envd_version, "root"),
            sdk.KEEPALIVE_PING_HEADER: str(sdk.KEEPALIVE_PING_INTERVAL_SEC),
        }
        request = sdk.process_pb.StartRequest(process=process, stdin=True)
        self._events = sdk.as_stream(self._rpc.start(request, headers=headers))
        try:
            begun = await sdk.first_event(self._events, self._config.get_request_timeout())
        except sdk.ConnectError as error:
            known = sdk.handle_rpc_exception(error)
        else:
            return await self._opened(sdk.extract_start_pid(begun, "start process"))
        raise known

    async def _opened(self, pid: int) -> asyncio.StreamWriter:
        ours, theirs = socket.socketpair()
        _, writer = await asyncio.open_unix_connection(sock=ours)
        source, closing = await asyncio.open_unix_connection(sock=theirs)
        self._pump = asyncio.create_task(self._send(pid, source, closing), name=f"input of {pid}")
        return writer

    async def _send(self, pid: int, source: asyncio.StreamReader, closing: asyncio.StreamWriter) -> None:
        try:
            while piece := await source.read(_PIECE):
                await self._made.commands.send_stdin(pid, piece)
        except sdk.SDK_ERRORS as error:
            self._failed(error)
            if self._reading is not None:  # the agent did not hear us: the reader shall know
                self._reading.cancel()
        finally:
            closing.close()

    # -- what it writes ---------------------------------------------------------------------------------

    async def readexactly(self, n: int) -> bytes:
        """See `asyncio.StreamReader.readexactly`."""
        while len(self._stdout) < n:
            self._take(await self._next_event())
        taken = bytes(self._stdout[:n])
        del self._stdout[:n]
        return taken

    async def _next_event(self) -> Any:
        assert self._events is not None, "start() before readexactly()"
        self._reading = asyncio.create_task(_next(self._events))
        try:
            event = await self._reading
            if event is not None:
                return event
        except asyncio.CancelledError:
            if self.failure is None:  # it is the caller who was cancelled
                raise
        except sdk.SDK_ERRORS as error:
            self._failed(error)
        raise EOFError("the agent's output broke off")

    def _failed(self, error: BaseException) -> None:
        """The first one is kept, without the SDK's frames, which hold the key."""
        self.failure = self.failure or error.with_traceback(None)

    def _take(self, event: Any) -> None:
        said = event.event.event if event.event is not None else None
        if said is None or said.field not in ("data", "end"):
            return
        if said.field == "end":
            raise EOFError(f"the agent ended: {said.value.status}")
        output = said.value.output
        if output is not None and output.field == "stdout":
            self._stdout += output.value
        elif output is not None:
            self._stderr += output.value
            del self._stderr[_MAX_ERROR:]

    @property
    def path(self) -> str:
        """Where the template's programs are found."""
        return self._said[0]

    @property
    def error_text(self) -> str:
        """What it, its Python or the shell said."""
        return self._said[1]

    @property
    def _said(self) -> tuple[str, str]:
        first, _, rest = self._stderr.decode("utf-8", "replace").partition("\n")
        return (first, rest.strip()) if first.startswith("/") else ("", f"{first} {rest}".strip())

    async def forget(self) -> None:
        """Let go of both ways."""
        if self._pump is not None:
            self._pump.cancel()
        if self._events is not None:
            with contextlib.suppress(Exception):  # closing a stream that has failed fails again
                await self._events.aclose()


async def _next(events: AsyncGenerator[Any, None]) -> Any:
    """The next event, or None at their end; the SDK's own errors."""
    try:
        return await anext(events, None)
    except sdk.ConnectError as error:
        known = sdk.handle_rpc_exception(error)
    raise known  # CancelledError too, which connectrpc dresses up as an error of its own
