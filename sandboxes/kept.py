"""A sandbox as its keeper hands it out: the provider's own, plus what has to be given back at its end.

`close` also gives back the slot and the ledger's entry, and `keepalive` writes the new end of its life into
the ledger. A kept desktop is a `KeptDesktop` (`desktop/kept.py`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from .forwarding import ForwardingSandbox
from .sandbox import Sandbox


class KeptSandbox(ForwardingSandbox):
    """See `sandbox.Sandbox`. `end` and `renewed` are the keeper's."""

    def __init__(
        self,
        inner: Sandbox,
        *,
        end: Callable[[], Coroutine[Any, Any, None]],
        renewed: Callable[[float], None],
    ) -> None:
        super().__init__(inner)
        self._end, self._renewed = end, renewed
        self._closing: asyncio.Task[None] | None = None

    async def keepalive(self, ttl_s: float) -> None:
        """It lives for at least that long from now; Died when it does not live."""
        await self._inner.keepalive(ttl_s)
        self._renewed(ttl_s)

    async def close(self) -> None:
        """Stop everything and give back what was held; a second call waits for the first."""
        if self._closing is None:
            self._closing = asyncio.create_task(self._end(), name=f"close {self.id}")
        await asyncio.shield(self._closing)
