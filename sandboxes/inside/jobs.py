"""What supervisor and spawner say to each other, over one socket.

    Jobs(channel).send(job, fds)     supervisor --4 bytes of length, job; descriptors--> spawner: receive_job
    Reports(channel).add(report)     spawner --a line of JSON--> supervisor: Jobs(channel).reports

A job is written by `marshal`, as both are one Python: the spawner touches few of its pages so, each of which
the kernel copies after every fork.

Waits: the supervisor for a spawner that is behind. The spawner for nobody: the supervisor may be sending
jobs, and two that send to each other with full buffers would both stand still.
"""

from __future__ import annotations

import contextlib
import json
import marshal
import socket
import struct
from collections.abc import Sequence
from typing import Any

Job = dict[str, Any]
DESCRIPTORS = 5  # input, stdout, stderr, its end as the init tells it, a session's marks
_ROOM = socket.CMSG_SPACE(DESCRIPTORS * struct.calcsize("i"))


class Jobs:
    """Supervisor's side."""

    def __init__(self, channel: socket.socket) -> None:
        self.channel, self._received = channel, b""

    def send(self, job: Job, fds: Sequence[int] = ()) -> None:
        """One job and the program's ends of its pipes."""
        text = marshal.dumps(job)
        data = struct.pack(">I", len(text)) + text
        sent = socket.send_fds(self.channel, [data], fds)
        if sent < len(data):
            self.channel.sendall(data[sent:])

    def reports(self) -> list[Job]:
        """Those that have come, at least a part of one. EOFError when the spawner is gone."""
        data = self.channel.recv(65536)
        if not data:
            raise EOFError
        *lines, self._received = (self._received + data).split(b"\n")
        return [json.loads(line) for line in lines]


def receive_job(channel: socket.socket) -> tuple[Job, list[int]]:
    """Spawner's side. EOFError when the supervisor is gone."""
    head, messages, _, _ = channel.recvmsg(4, _ROOM)
    if not head:
        raise EOFError
    fds = [fd for _, _, data in messages for (fd,) in struct.iter_unpack("i", data)]
    head += _read(channel, 4 - len(head))
    job: Job = marshal.loads(_read(channel, struct.unpack(">I", head)[0]))
    return job, fds


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
