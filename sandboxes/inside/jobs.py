"""What supervisor and spawner say to each other, over one socket.

    send_job(channel, job, fds)      supervisor --4 bytes of length, JSON; descriptors--> spawner: receive_job
    Reports(channel).add(report)     spawner --a line of JSON--> supervisor

Waits: the supervisor for a spawner that is behind. The spawner for nobody: the supervisor may be sending
jobs, and two that send to each other with full buffers would both stand still.
"""

from __future__ import annotations

import contextlib
import json
import socket
import struct
from typing import Any

Job = dict[str, Any]
DESCRIPTORS = 5  # input, stdout, stderr, its end as the init tells it, a session's marks


def send_job(channel: socket.socket, job: Job, fds: list[int]) -> None:
    """Supervisor's side: one job and the program's ends of its pipes."""
    text = json.dumps(job).encode()
    data = struct.pack(">I", len(text)) + text
    sent = socket.send_fds(channel, [data], fds)
    if sent < len(data):
        channel.sendall(data[sent:])


def receive_job(channel: socket.socket) -> tuple[Job, list[int]]:
    """Spawner's side. EOFError when the supervisor is gone."""
    head, fds, _, _ = socket.recv_fds(channel, 4, DESCRIPTORS)
    if not head:
        raise EOFError
    head += _read(channel, 4 - len(head))
    job: Job = json.loads(_read(channel, struct.unpack(">I", head)[0]))
    return job, list(fds)


def _read(channel: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        more = channel.recv(count - len(data))
        if not more:
            raise EOFError
        data += more
    return data


class Reports:
    """Spawner's side: reports that are kept until the supervisor has room for them."""

    def __init__(self, channel: socket.socket) -> None:
        self._channel, self._unsent = channel, b""

    @property
    def waiting(self) -> list[int]:
        """The socket's descriptor, while there is something left to be sent through it."""
        return [self._channel.fileno()] if self._unsent else []

    def add(self, report: Job) -> None:
        """Send it after those before it, now or in a later `send`."""
        self._unsent += json.dumps(report).encode() + b"\n"
        self.send()

    def send(self) -> None:
        """As many as there is room for."""
        with contextlib.suppress(BlockingIOError):
            while self._unsent:
                self._unsent = self._unsent[self._channel.send(self._unsent, socket.MSG_DONTWAIT) :]
