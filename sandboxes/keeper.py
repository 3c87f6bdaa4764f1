"""Keeps the books on every sandbox that this process holds of one provider.

    create(spec)   reap once -> a warm one, or: slot -> intent -> start slot, rate -> provider -> id written
    held           its life is renewed in the background; a spec's `lifetime_s` is for one that nobody renews
    close          provider's close -> entry forgotten; the slot is given back whatever happened
    reap()         what dead owners left: by the provider's own list, and by the ledger

Invariants: a sandbox is in the ledger from before it is made until after it is closed; one that could not be
closed stays there, and so does one of a place that this provider does not see. All processes of this user
together hold at most `max_live` of the provider's sandboxes.
Waits: `create` for a slot, until nobody has given one back for a `lifetime_s`; for the rate; for a provider
that asks for patience, at most `PATIENCE_S`. No deadline of the caller runs meanwhile (`deadline.py`).
At the end of the interpreter nothing is done here: no thread can be started then, and each provider's own
switch (a closed socket, a short time to live) ends what is left.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, Literal, Self, cast

from .config import SandboxConfig
from .deadline import waiting
from .errors import CreateError, Misconfigured, QuotaExceeded, RateLimited, SandboxError
from .heartbeat import Heartbeat
from .kept import KeptSandbox
from .ledger import Entry, Ledger
from .limiter import Limiter, Slot
from .owner import EXPIRES_LABEL, LABEL, RUN_LABEL, Owner
from .provider import Capabilities, Provider
from .registry import make_provider
from .sandbox import Sandbox
from .spec import SandboxSpec
from .warm_pool import WarmPool

log = logging.getLogger(__name__)
PATIENCE_S = 60.0
SAY_S = 30.0  # of waiting for a slot, after which the log says so
FIRST_PAUSE_S = 1.0
End = Callable[[], Coroutine[Any, Any, None]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reaped:
    """One sandbox that its owner left behind. `id` is "" when it was asked for and never seen."""

    id: str
    run_id: str = ""
    what: Literal["removed", "had ended", "was never made"] = "removed"


class Keeper:
    """Of one provider, for one run (`run_id` may be ""); belongs to one event loop."""

    def __init__(
        self, provider: Provider, *, limiter: Limiter, ledger: Ledger, run_id: str = "", warm: int = 0
    ) -> None:
        self.provider, self._limiter, self._ledger = provider, limiter, ledger
        self._run_id, self._owner = run_id, str(Owner.here())
        self._can: Capabilities | None = None
        self._warm = WarmPool(warm, self._make_if_room)
        self._open: dict[str, KeptSandbox] = {}
        self._first = asyncio.Lock()
        self._reaped = False

    @classmethod
    def of(cls, config: SandboxConfig, *, run_id: str = "") -> Self:
        """The keeper that a recipe describes."""
        provider = make_provider(config)
        with _writing(provider.name):
            limiter = Limiter(
                provider.name,
                max_live=config.max_live,
                max_starting=config.max_starting,
                creates_per_s=config.creates_per_s,
            )
        return cls(provider, limiter=limiter, ledger=Ledger(), run_id=run_id, warm=config.warm)

    @property
    def ready(self) -> int:
        """How many warm ones wait."""
        return self._warm.ready

    @property
    def can(self) -> Capabilities:
        """The provider's capabilities, asked once."""
        if self._can is None:
            self._can = self.provider.capabilities()
        return self._can

    # -- making -----------------------------------------------------------------------------------------

    async def create(self, spec: SandboxSpec) -> KeptSandbox:
        """A sandbox of one's own, unused, with `spec.lifetime_s` to live. Whoever gets it closes it."""
        require(self.can, spec, self.provider.name)
        await self._reap_at_first()
        sandbox = await self._warm.take(spec)
        if sandbox is None:
            with waiting():
                slot = await self._slot(spec)
            sandbox = await self._make(spec, slot)
        self._warm.refill(spec)
        return sandbox

    async def _slot(self, spec: SandboxSpec) -> Slot:
        """One of `max_live`; a ready sandbox of another spec gives way before anybody waits."""
        live = self._limiter.live
        while not live.wanted:
            if (slot := self._free_slot()) is not None:
                return slot
            if not await self._warm.give_way(spec):
                break
        words = f"all {live.size} sandboxes of {self.provider.name} that sandbox.max_live allows are held"
        saying = asyncio.get_running_loop().call_later(
            SAY_S, log.warning, "%s; waiting for one. `rz-agent sandbox ps` lists them.", words
        )
        try:
            with _writing(self.provider.name):
                return await live.take(patience_s=spec.lifetime_s)
        except TimeoutError:
            message = (
                f"{words}, and in {spec.lifetime_s:g} s none was given back\n"
                "  Raise sandbox.max_live, or let fewer episodes run at once (rollout.episodes_in_flight)."
            )
            raise QuotaExceeded(message, provider=self.provider.name) from None
        finally:
            saying.cancel()

    async def _make_if_room(self, spec: SandboxSpec) -> KeptSandbox | None:
        slot = None if self._limiter.live.wanted else self._free_slot()
        return None if slot is None else await self._make(spec, slot)

    def _free_slot(self) -> Slot | None:
        with _writing(self.provider.name):
            return self._limiter.live.take_free()

    async def _make(self, spec: SandboxSpec, slot: Slot) -> KeptSandbox:
        with contextlib.ExitStack() as undo:
            undo.callback(slot.release)
            with contextlib.ExitStack() as starting:
                with _writing(self.provider.name):
                    with waiting():
                        starting.callback((await self._limiter.starting.take()).release)
                        await self._limiter.rate.wait()
                    entry = self._intend(spec)
                undo.callback(self._ledger.forget, entry)
                inner = await self._patiently(self._labelled(spec))
            undo.pop_all()
        return await self._keep(inner, entry, slot, spec.lifetime_s)

    def _intend(self, spec: SandboxSpec) -> Entry:
        return self._ledger.intend(
            provider=self.provider.name,
            place=self.provider.place,
            owner=self._owner,
            run_id=self._run_id,
            spec_key=spec.key,
            lifetime_s=spec.lifetime_s,
        )

    def _labelled(self, spec: SandboxSpec) -> SandboxSpec:
        expires = str(int(time.time() + spec.lifetime_s))
        labels = {**spec.labels, LABEL: self._owner, EXPIRES_LABEL: expires}
        if self._run_id:
            labels[RUN_LABEL] = self._run_id
        return replace(spec, labels=labels)

    async def _patiently(self, spec: SandboxSpec) -> Sandbox:
        """Ask again when the provider says later; everything else is the caller's to hear at once."""
        give_up, pause = time.monotonic() + PATIENCE_S, FIRST_PAUSE_S
        while True:
            try:
                return await self.provider.create(spec)
            except RateLimited as error:
                seconds = pause if error.retry_after is None else error.retry_after
                if time.monotonic() + seconds > give_up:
                    raise
                with waiting():
                    await asyncio.sleep(seconds)
                pause *= 2

    # -- keeping ----------------------------------------------------------------------------------------

    async def _keep(self, inner: Sandbox, entry: Entry, slot: Slot, lifetime_s: float) -> KeptSandbox:
        try:
            with _writing(self.provider.name):
                books = self._ledger.complete(entry, inner.id)
        except CreateError:
            await self._let_go(inner, entry, slot)
            raise

        def renewed(ttl_s: float) -> None:
            nonlocal books
            with contextlib.suppress(OSError):  # a full disk ends no episode
                books = self._ledger.renew(books, ttl_s)

        async def end() -> None:
            heartbeat.stop()
            await self._let_go(inner, books, slot)

        kept = self._open[inner.id] = self._wrapped(inner, end, renewed)
        heartbeat = Heartbeat(kept.keepalive, lifetime_s, name=inner.id)
        return kept

    def _wrapped(self, inner: Sandbox, end: End, renewed: Callable[[float], None]) -> KeptSandbox:
        if not self.can.desktop:
            return KeptSandbox(inner, end=end, renewed=renewed)
        # Imported here: a desktop's modules are for those who have one.
        from .desktop.desktop import Desktop
        from .desktop.kept import KeptDesktop

        return KeptDesktop(cast(Desktop, inner), end=end, renewed=renewed)

    async def _let_go(self, inner: Sandbox, entry: Entry, slot: Slot) -> None:
        try:
            await inner.close()
            self._ledger.forget(entry)
        finally:
            slot.release()
            self._open.pop(inner.id, None)

    async def aclose(self) -> None:
        """Close everything that was made here, then the provider; the first failure is raised at the end."""
        await self._warm.aclose()
        try:
            ends = [sandbox.close() for sandbox in list(self._open.values())]
            answers = await asyncio.gather(*ends, return_exceptions=True)
        finally:
            await self.provider.aclose()
        for answer in answers:
            if isinstance(answer, BaseException):
                raise answer

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    # -- what others left -------------------------------------------------------------------------------

    async def _reap_at_first(self) -> None:
        async with self._first:
            if not self._reaped:
                self._reaped = True
                # Somebody else's remains are no reason to refuse one; `rz-agent sandbox reap` says more.
                with contextlib.suppress(SandboxError):
                    await self.reap()

    async def reap(self, *, run_id: str | None = None, dead_owners: bool = True) -> list[Reaped]:
        """Remove what dead owners left, of one run when given; see `Provider.reap` for `dead_owners`."""
        runs = {e.sandbox_id: e.run_id for e in self._ledger.entries(self.provider.name) if e.sandbox_id}
        names = await self.provider.reap(run_id=run_id, dead_owners=dead_owners)
        reaped = {name: Reaped(id=name, run_id=runs.get(name, "")) for name in names}
        unseen, here = [], self.provider.place
        for entry in self._ledger.entries(self.provider.name):
            due = run_id in (None, entry.run_id) and (entry.is_left_behind or not dead_owners)
            if due and entry.is_seen_from(here):
                found = await self._reap_entry(entry)
                if not found.id:
                    unseen.append(found)
                reaped.setdefault(found.id, found)
        reaped.pop("", None)
        return [*reaped.values(), *unseen]

    def out_of_sight(self) -> dict[str, int]:
        """Other places of such a provider, and how many entries of dead owners each has."""
        here, left = self.provider.place, Counter[str]()
        for entry in self._ledger.entries(self.provider.name):
            if entry.is_left_behind and not entry.is_seen_from(here):
                left[entry.place] += 1
        return dict(left)

    async def _reap_entry(self, entry: Entry) -> Reaped:
        """What was asked for and perhaps made; its entry stays when the provider cannot be reached."""
        what: Literal["removed", "had ended", "was never made"] = "was never made"
        if entry.sandbox_id:
            what = "removed" if await self.provider.kill(entry.sandbox_id) else "had ended"
        self._ledger.forget(entry)
        return Reaped(id=entry.sandbox_id, run_id=entry.run_id, what=what)


@contextlib.contextmanager
def _writing(provider: str) -> Iterator[None]:
    """Around what is written to the state folder: CreateError where it cannot be."""
    try:
        yield
    except TimeoutError:  # an OSError by its class alone
        raise
    except OSError as error:
        message = f"it cannot be written down, so it is not made: {error}\n  Make room on that disk."
        raise CreateError(message, provider=provider) from error


def require(can: Capabilities, spec: SandboxSpec, provider: str) -> None:
    """Misconfigured when a spec asks for what the provider has not."""
    asked = (
        (spec.network == "open" and not can.open_network, 'sandbox.network.mode = "open"', 'Use "none"'),
        (spec.image is not None and not can.images, f"the image {spec.image!r}", "Leave it out"),
        (bool(spec.owned) and not can.images, "folders of an image to own", "Leave them out"),
        (spec.screen is not None and not can.desktop, "a screen", "Leave it out"),
    )
    for missing, what, instead in asked:
        if missing:
            message = f"it cannot give {what}\n  {instead}, or name another sandbox.provider."
            raise Misconfigured(message, provider=provider)
