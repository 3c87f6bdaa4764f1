"""Keeping a sandbox alive in the background, from its making until it is let go of.

    Keeper      the lifetime of each sandbox that it holds
    E2bSandbox  the short time to live that the service is told

Invariant: a life is renewed at a third of what each renewal gives, so two may fail before it ends. Nothing is
renewed after `stop`, or after the end of this process: that is how a sandbox ends with its owner.
Waits: nobody.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from .errors import Died, SandboxError


class Heartbeat:
    """Calls `renew(ttl_s)` until it is stopped, or the sandbox has died."""

    def __init__(self, renew: Callable[[float], Awaitable[None]], ttl_s: float, *, name: str) -> None:
        self._task = asyncio.create_task(_beat(renew, ttl_s), name=f"keep {name} alive")

    def stop(self) -> None:
        """Its end may come."""
        self._task.cancel()


async def _beat(renew: Callable[[float], Awaitable[None]], ttl_s: float) -> None:
    while True:
        await asyncio.sleep(ttl_s / 3)
        try:
            await renew(ttl_s)
        except Died:
            return
        except SandboxError:
            continue  # the next beat comes before its time is over
