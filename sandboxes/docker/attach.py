"""The channel to the agent: stdin and stdout of the container's first process over one hijacked connection.

    harness ==raw bytes==> stdin                        the agent's frames, as they are
    harness <==8 bytes: stream, length; payload== stdout and stderr, one after the other

Invariant: the connection is this process's alone. The daemon closes the container's stdin when it ends, and
that ends the agent; so a forked child must not hold a copy of it (`Connections`).
"""

from __future__ import annotations

import asyncio
import os
import socket
import struct
import weakref
from typing import Any

_HEAD = struct.Struct(">BxxxI")
_STDERR = 2
_MAX_ERROR = 4000


class Connections:
    """Closes this process's connections in each child that is forked without exec."""

    def __init__(self) -> None:
        self._open: weakref.WeakSet[socket.socket] = weakref.WeakSet()
        mine = weakref.ref(self)
        os.register_at_fork(after_in_child=lambda: _close_all(mine()))

    def add(self, connection: socket.socket) -> None:
        """One more."""
        self._open.add(connection)

    def close(self) -> None:
        """In the child."""
        for connection in list(self._open):
            connection.close()


def _close_all(connections: Connections | None) -> None:
    if connections is not None:
        connections.close()


def attach(client: Any, container: str) -> socket.socket:
    """Hijack a connection; before the container starts, so that nothing of it is missed."""
    wanted = {"stdin": 1, "stdout": 1, "stderr": 1, "stream": 1}
    hijacked = client.attach_socket(container, params=wanted)
    connection = socket.socket(fileno=hijacked._sock.detach())  # the SDK keeps no copy of it
    connection.setblocking(False)
    return connection


class Demultiplexer:
    """The agent's stdout as bytes; what it wrote to stderr is kept aside for an error message."""

    def __init__(self, reader: asyncio.StreamReader) -> None:
        self._reader = reader
        self._stdout = bytearray()
        self._stderr = bytearray()

    @property
    def error_text(self) -> str:
        """The end of what it wrote to stderr."""
        return self._stderr.decode("utf-8", "replace").strip()

    async def readexactly(self, n: int) -> bytes:
        """See `asyncio.StreamReader.readexactly`."""
        while len(self._stdout) < n:
            stream, length = _HEAD.unpack(await self._reader.readexactly(_HEAD.size))
            data = await self._reader.readexactly(length)
            if stream == _STDERR:
                self._stderr += data
                del self._stderr[:-_MAX_ERROR]
            else:
                self._stdout += data
        taken = bytes(self._stdout[:n])
        del self._stdout[:n]
        return taken
