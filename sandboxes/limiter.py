"""How many sandboxes all processes of this user hold, start and ask for, together, of one provider.

    live.take()      one of `max_live`, held until its sandbox is closed
    starting.take()  one of `max_starting`, held while one starts
    rate.wait()      at most `creates_per_s`, a second's worth of them at once

Invariant: a slot is a locked file (flock), so the kernel frees it when its process ends, however it ends.
A process that takes the lowest free slot sees its own bound kept even beside one with a higher bound. A
forked child keeps its parent's slots until it ends.
Waits: in one process first come, first served; between processes by looking again, since a lock that is
freed elsewhere wakes nobody. A cancelled wait holds nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import random
import time
from collections.abc import AsyncIterator
from pathlib import Path
from urllib.parse import quote

from .state_folder import state_folder

FOLDER = "limits"
LOOK_AGAIN_S = 0.1


class Slot:
    """One held slot; `release` may be called more than once."""

    def __init__(self, slots: Slots, handle: int) -> None:
        self._slots, self._handle = slots, handle

    def release(self) -> None:
        """Give it to the next who waits."""
        handle, self._handle = self._handle, -1
        if handle >= 0:
            os.close(handle)
            self._slots.one_was_freed()


class Slots:
    """`size` slots in a folder; every process of this user that opens the folder shares them."""

    def __init__(self, folder: Path, size: int) -> None:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._folder, self.size = folder, size
        self._turn = asyncio.Lock()
        self._freed = asyncio.Event()
        self._patience: dict[asyncio.Timeout, float] = {}  # s, of those who wait

    @property
    def wanted(self) -> bool:
        """Whether somebody in this process waits for one: who comes later must not overtake them."""
        return self._turn.locked()

    def take_free(self) -> Slot | None:
        """A slot if one is free now."""
        for number in range(self.size):
            handle = os.open(self._folder / str(number), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            if _lock(handle):
                return Slot(self, handle)
            os.close(handle)
        return None

    async def take(self, patience_s: float | None = None) -> Slot:
        """A slot, after those who asked before in this process.

        TimeoutError when none was freed for `patience_s`, be it one's turn or not.
        """
        async with asyncio.timeout(patience_s) as clock:
            if patience_s is not None:
                self._patience[clock] = patience_s
            try:
                async with self._turn:
                    slot = await self._next()
            finally:
                self._patience.pop(clock, None)
        self.one_was_freed()  # perhaps by another process, which cannot say so
        return slot

    async def _next(self) -> Slot:
        while (slot := self.take_free()) is None:
            self._freed.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LOOK_AGAIN_S * random.uniform(0.5, 1.0)):
                    await self._freed.wait()
        return slot

    def one_was_freed(self) -> None:
        """Look for it, and whoever waits goes on waiting as long as at first."""
        self._freed.set()
        for clock, patience_s in self._patience.items():
            if not clock.expired():
                clock.reschedule(asyncio.get_running_loop().time() + patience_s)

    @contextlib.asynccontextmanager
    async def held(self) -> AsyncIterator[None]:
        """One slot for the length of a block."""
        slot = await self.take()
        try:
            yield
        finally:
            slot.release()


class Rate:
    """At most `per_s` a second between all processes; None is any number.

    The file holds one time, on the clock since boot: when the bucket will be full again. Each event moves it
    `1 / per_s` onward, and none may move it more than a second's worth beyond now.
    """

    def __init__(self, path: Path, per_s: float | None) -> None:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._path, self._per_s = path, per_s

    async def wait(self) -> None:
        """Until one more may begin."""
        while (seconds := self._try()) > 0:  # noqa: ASYNC110  what other processes do sets no event
            await asyncio.sleep(seconds)

    def _try(self) -> float:
        """Count one event and return 0, or the seconds after which to try again."""
        if self._per_s is None:
            return 0.0
        handle = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            if not _lock(handle):
                return 0.001  # held for some microseconds
            now, one, burst = (
                time.clock_gettime(time.CLOCK_BOOTTIME),
                1 / self._per_s,
                max(1.0, 1 / self._per_s),
            )
            full = _time_in(handle)
            full = now if full > now + burst + one else max(now, full)  # a time from before the last boot
            if full + one > now + burst + 1e-9:
                return full + one - now - burst
            os.pwrite(handle, f"{full + one:<32.6f}".encode(), 0)
            return 0.0
        finally:
            os.close(handle)


class Limiter:
    """The three bounds of one provider."""

    def __init__(
        self, provider: str, *, max_live: int, max_starting: int, creates_per_s: float | None,
        folder: Path | None = None,
    ) -> None:  # fmt: skip
        place = (folder or state_folder() / FOLDER) / quote(provider, safe="")
        self.live = Slots(place / "live", max_live)
        self.starting = Slots(place / "starting", max_starting)
        self.rate = Rate(place / "rate", creates_per_s)


def _lock(handle: int) -> bool:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _time_in(handle: int) -> float:
    try:
        return float(os.pread(handle, 32, 0))
    except ValueError:  # a new file
        return 0.0
