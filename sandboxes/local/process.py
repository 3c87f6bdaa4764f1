"""Waiting for processes without a thread: a pidfd is readable once its process has ended."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess


class Process:
    """A child of the harness, and for bubblewrap the PID 1 that it made (not our child)."""

    def __init__(self, child: subprocess.Popen[bytes]) -> None:
        self._child = child
        self._watched = os.pidfd_open(child.pid)
        self._inner = -1

    @property
    def pid(self) -> int:
        """The child's pid."""
        return self._child.pid

    def adopt(self, pid: int) -> None:
        """Also kill this one: the sandbox's PID 1, whose end is the end of everything inside."""
        self._inner = os.pidfd_open(pid)

    def status(self) -> int | None:
        """Exit status as subprocess gives it, None while it runs."""
        return self._child.poll()

    async def wait(self, timeout_s: float) -> bool:
        """True when it has ended."""
        if self._child.poll() is not None:
            return True
        loop = asyncio.get_running_loop()
        ended = loop.create_future()
        loop.add_reader(self._watched, lambda: None if ended.done() else ended.set_result(None))
        try:
            async with asyncio.timeout(timeout_s):
                await ended
        except TimeoutError:
            return False
        finally:
            loop.remove_reader(self._watched)
        self._child.wait()
        return True

    def kill(self) -> None:
        """SIGKILL to the inner PID 1 and to the child."""
        for fd in (self._inner, self._watched):
            if fd >= 0:
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(fd, signal.SIGKILL)

    def release(self) -> None:
        """Close the descriptors; only after its end."""
        for fd in (self._inner, self._watched):
            if fd >= 0:
                os.close(fd)
        self._inner = self._watched = -1
