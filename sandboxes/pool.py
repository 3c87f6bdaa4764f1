"""The sandboxes of one run, shared by all its episodes; a dead one is replaced by the next who asks.

    acquire() -> Sandbox     the living one with the fewest episodes on it
    release(sandbox)         that episode is over

Invariant: at most `size` sandboxes; one that died gets no new episode, and is closed with its last one.
Waits: a caller for the sandbox that is being made for it; nobody for an episode.
"""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Self

from ..errors import RunStopped
from .config import SandboxConfig
from .provider import Provider, Sandbox, SandboxSpec
from .registry import make_provider


class SandboxPool:
    """`size` sandboxes, made when they are first needed."""

    def __init__(self, provider: Provider, spec: SandboxSpec, size: int) -> None:
        self.provider = provider
        self._spec, self._size = spec, size
        self._live: list[Sandbox] = []
        self._users: dict[str, int] = {}
        self._making = asyncio.Lock()
        self.replaced = 0  # sandboxes that died under the run

    @classmethod
    def of(cls, config: SandboxConfig, *, run_id: str = "") -> Self:
        """The pool that a recipe describes."""
        labels = {"rz.run": run_id} if run_id else {}
        return cls(make_provider(config), config.spec(labels), config.shared)

    async def acquire(self) -> Sandbox:
        """A living sandbox, made now if need be. SandboxError when none can be."""
        async with self._making:
            await self._drop_dead()
            idle = [sandbox for sandbox in self._live if not self._users[sandbox.id]]
            if not idle and len(self._live) < self._size:
                sandbox = await self.provider.create(self._spec)
                self._live.append(sandbox)
                self._users[sandbox.id] = 0
            chosen = min(self._live, key=lambda sandbox: self._users[sandbox.id])
            self._users[chosen.id] += 1
            return chosen

    async def release(self, sandbox: Sandbox) -> None:
        """One episode less on it; a dead one is closed when nobody is left."""
        if sandbox.id in self._users:
            self._users[sandbox.id] -= 1
            if not self._users[sandbox.id] and sandbox not in self._live:
                del self._users[sandbox.id]
                await sandbox.close()

    async def _drop_dead(self) -> None:
        answers = await asyncio.gather(*(sandbox.alive() for sandbox in self._live))
        for sandbox, alive in zip(list(self._live), answers, strict=True):
            if not alive:
                self._live.remove(sandbox)
                self.replaced += 1
                if not self._users[sandbox.id]:
                    del self._users[sandbox.id]
                    await sandbox.close()

    async def aclose(self) -> None:
        """Close every sandbox and the provider."""
        self._live.clear()
        self._users.clear()
        await self.provider.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()


class InfraBreaker:
    """Stops a run whose sandboxes fail too often: such a run would train on what is left over.

    share    of the last `window` episodes that may fail; judged once `window` have ended

    >>> breaker = InfraBreaker(share=0.5, window=4)
    >>> [breaker.record(failed=f) for f in (True, False, True, False)]
    [None, None, None, None]
    >>> breaker.rate
    0.5
    """

    def __init__(self, *, share: float, window: int = 32) -> None:
        self._share, self._window = share, window
        self._last: list[bool] = []

    @property
    def rate(self) -> float:
        """Failed share of the last episodes (the figure `sandbox/infra_failed_rate`); 0 before the first."""
        return sum(self._last) / len(self._last) if self._last else 0.0

    def record(self, *, failed: bool) -> None:
        """One episode ended. RunStopped when too many of the last ones failed for the place's sake."""
        self._last = [*self._last, failed][-self._window :]
        if len(self._last) == self._window and self.rate > self._share:
            raise RunStopped(
                f"{self.rate:.0%} of the last {self._window} episodes lost their sandbox; "
                f"sandbox.infra_failed_share = {self._share:g}\n"
                "  Run `rz-agent doctor`, look for memory or disk running out, then resume the run."
            )
