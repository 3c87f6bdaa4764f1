"""The sandboxes of one run: shared by its episodes where sessions are apart, else one for each episode.

    acquire() -> Sandbox     for one episode: the living one with the fewest episodes on it, or one of its own
    release(sandbox)         that episode is over
    lease(spec) -> Sandbox   one of one's own, whatever the provider; its holder closes it

Invariant: at most `size` shared sandboxes; one that died gets no new episode, and is closed with its last
one. Episodes never share a sandbox whose sessions see each other's files or processes, and never a screen.
Waits: a caller for the sandbox that is being made for it, and with one for each episode for a free place
among `max_live`; nobody for an episode on a shared one.
"""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Self

from ..errors import RunStopped
from .config import SandboxConfig
from .deadline import waiting
from .errors import Died
from .keeper import Keeper
from .kept import KeptSandbox
from .sandbox import Sandbox
from .shared import SharedSandbox
from .spec import SandboxSpec


class SandboxPool:
    """Up to `size` shared sandboxes, made when they are first needed."""

    def __init__(self, keeper: Keeper, spec: SandboxSpec, size: int) -> None:
        self._keeper, self._spec, self._size = keeper, spec, size
        self._live: list[SharedSandbox] = []
        self._users: dict[str, int] = {}
        self._own: set[str] = set()
        self._making = asyncio.Lock()
        self.replaced = 0  # shared sandboxes that died under the run

    @classmethod
    def of(cls, config: SandboxConfig, *, run_id: str = "") -> Self:
        """The pool that a recipe describes."""
        return cls(Keeper.of(config, run_id=run_id), config.spec(), config.shared)

    @property
    def spec(self) -> SandboxSpec:
        """What the recipe asks for; a `lease` may ask for more."""
        return self._spec

    async def lease(self, spec: SandboxSpec | None = None) -> KeptSandbox:
        """A sandbox that nobody else has, of the recipe's spec or of another. Its holder closes it."""
        return await self._keeper.create(spec or self._spec)

    async def acquire(self) -> Sandbox:
        """A living sandbox for one episode, made now if need be. SandboxError when none can be."""
        if self._keeper.can.desktop or not self._keeper.can.isolates_sessions:
            own = await self.lease()
            self._own.add(own.id)
            return own
        with waiting():  # for one that is being made for somebody else
            await self._making.acquire()
        try:
            await self._drop_dead()
            for _ in range(self._size + 1):  # each may have died just now, and then there is a new one
                chosen = await self._least_used()
                try:
                    await chosen.keepalive(self._spec.lifetime_s)
                except Died as error:
                    died = error
                    await self._drop(chosen)
                else:
                    self._users[chosen.id] += 1
                    return chosen
            raise died
        finally:
            self._making.release()

    async def release(self, sandbox: Sandbox) -> None:
        """One episode less on it; its own, or a dead one that nobody is left on, is closed."""
        if sandbox.id in self._own:
            self._own.discard(sandbox.id)
            await sandbox.close()
        elif sandbox.id in self._users:
            self._users[sandbox.id] -= 1
            if not self._users[sandbox.id] and sandbox not in self._live:
                del self._users[sandbox.id]
                await sandbox.close()

    async def _least_used(self) -> SharedSandbox:
        idle = [sandbox for sandbox in self._live if not self._users[sandbox.id]]
        if not idle and len(self._live) < self._size:
            made = SharedSandbox(await self._keeper.create(self._spec))
            self._live.append(made)
            self._users[made.id] = 0
        return min(self._live, key=lambda sandbox: self._users[sandbox.id])

    async def _drop_dead(self) -> None:
        answers = await asyncio.gather(*(sandbox.alive() for sandbox in self._live))
        for sandbox, alive in zip(list(self._live), answers, strict=True):
            if not alive:
                await self._drop(sandbox)

    async def _drop(self, sandbox: SharedSandbox) -> None:
        """It gets no new episode; it is closed now when nobody is on it, else with the last one."""
        self._live.remove(sandbox)
        self.replaced += 1
        if not self._users[sandbox.id]:
            del self._users[sandbox.id]
            await sandbox.close()

    async def aclose(self) -> None:
        """Close every sandbox and the provider."""
        self._live.clear()
        self._users.clear()
        self._own.clear()
        await self._keeper.aclose()

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
