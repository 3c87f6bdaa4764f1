"""Whose a sandbox is: a process, told apart from every other one that had or will have its pid.

A sandbox carries its owner as the label `rz.owner`; whoever finds it can ask whether that process still runs.
A process of another machine, or of this one before its last start, is judged by the machine's boot: the same
host name with another boot id is dead; another host is unknown, and only the sandbox's own expiry ends it.
"""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from pathlib import Path

LABEL = "rz.owner"
RUN_LABEL = "rz.run"
EXPIRES_LABEL = "rz.expires"  # s since the epoch


def start_time(pid: int) -> str | None:
    """Start of a process in clock ticks since boot; None when there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return None


@dataclass(frozen=True, slots=True)
class Owner:
    """A process of a machine: host name, boot id (8 digits), pid, start time.

    >>> str(Owner("box", "0a1b2c3d", 17, "4242"))
    'box/0a1b2c3d/17/4242'
    """

    host: str
    boot: str
    pid: int
    started: str

    @classmethod
    def here(cls) -> Owner:
        """This process."""
        return cls.on_this_machine(os.getpid(), start_time(os.getpid()) or "")

    @classmethod
    def on_this_machine(cls, pid: int, started: str) -> Owner:
        """A process of this machine since its last start."""
        return cls(socket.gethostname(), _boot(), pid, started)

    @classmethod
    def parse(cls, text: str) -> Owner | None:
        """From its text; None for any other text."""
        parts = text.split("/")
        if len(parts) != 4 or not parts[2].isdigit():
            return None
        return cls(parts[0], parts[1], int(parts[2]), parts[3])

    @property
    def is_elsewhere(self) -> bool:
        """Of another machine, so nothing is known of its life."""
        return self.host != socket.gethostname()

    @property
    def is_dead(self) -> bool:
        """Known to run no more. A process of another host is not known to be dead."""
        return not self.is_elsewhere and (self.boot != _boot() or start_time(self.pid) != self.started)

    def __str__(self) -> str:
        return f"{self.host}/{self.boot}/{self.pid}/{self.started}"


def _boot() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text()[:8]
