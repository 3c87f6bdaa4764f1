"""Ready sandboxes for whoever asks next for one of an equal spec.

Invariant: at most `size` of them, none of which anybody has used: what was taken never comes back. One that
died while it waited is closed and not handed out.
Waits: nobody for a sandbox that is being made here; who finds none makes its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
from collections.abc import Awaitable, Callable

from .errors import SandboxError
from .kept import KeptSandbox
from .spec import SandboxSpec

Make = Callable[[SandboxSpec], Awaitable[KeptSandbox | None]]


class WarmPool:
    """`make` makes one without waiting for room; None when there is none."""

    def __init__(self, size: int, make: Make) -> None:
        self._size, self._make = size, make
        self._ready: list[tuple[str, KeptSandbox]] = []  # the oldest first
        self._filling: dict[str, asyncio.Task[None]] = {}

    @property
    def ready(self) -> int:
        """How many wait now."""
        return len(self._ready)

    async def take(self, spec: SandboxSpec) -> KeptSandbox | None:
        """One of this spec with its whole life before it, or None."""
        while (sandbox := self._pop(lambda key: key == spec.key)) is not None:
            try:
                await sandbox.keepalive(spec.lifetime_s)
                return sandbox
            except SandboxError:
                await _close(sandbox)
            except BaseException:
                await _close(sandbox)
                raise
        return None

    def refill(self, spec: SandboxSpec) -> None:
        """See to it that some of this spec are ready, in the background."""
        if self._size and spec.key not in self._filling:
            # Of an empty context: the deadlines around who sets it off do not stand still for it.
            task = asyncio.create_task(
                self._fill(spec), name=f"warm {spec.key}", context=contextvars.Context()
            )
            self._filling[spec.key] = task
            task.add_done_callback(lambda _: self._filling.pop(spec.key, None))

    async def give_way(self, spec: SandboxSpec) -> bool:
        """Close one of another spec, so that one of this can be made; False when there is none."""
        sandbox = self._pop(lambda key: key != spec.key)
        if sandbox is not None:
            await _close(sandbox)
        return sandbox is not None

    async def aclose(self) -> None:
        """Close them all."""
        filling = list(self._filling.values())
        for task in filling:
            task.cancel()
        await asyncio.gather(*filling, return_exceptions=True)
        waiting, self._ready = self._ready, []
        await asyncio.gather(*(_close(sandbox) for _, sandbox in waiting))

    async def _fill(self, spec: SandboxSpec) -> None:
        # Whoever asks next makes the sandbox itself, and hears then what is wrong.
        with contextlib.suppress(SandboxError):
            while sum(key == spec.key for key, _ in self._ready) < self._size:
                if len(self._ready) >= self._size and not await self.give_way(spec):
                    return
                sandbox = await self._make(spec)
                if sandbox is None:
                    return
                self._ready.append((spec.key, sandbox))

    def _pop(self, wanted: Callable[[str], bool]) -> KeptSandbox | None:
        for place, (key, sandbox) in enumerate(self._ready):
            if wanted(key):
                del self._ready[place]
                return sandbox
        return None


async def _close(sandbox: KeptSandbox) -> None:
    """Close one that nobody has used; what cannot be closed stays in the ledger for `reap`."""
    with contextlib.suppress(SandboxError):
        await sandbox.close()
