"""Several engines as one, and another one for each that dies.

    generate, score --> the engine that fits best      prepare, update --> all at once, back when all have it

Routing: a turn of a conversation goes where the turn before it was computed, because the cache of that
engine holds its prefix (`prefix_affinity.py`); a prompt that no engine knows, or whose engine is busier than
the idlest by more than `SLACK` requests, goes to the idlest. A hash of the prompt's beginning would need no
memory, but all conversations of an environment begin with the same words: it would send them to one engine.

Invariants. `version` is the lowest that any engine serves and never falls. A replacement serves only after
it has loaded the newest weights that all others have: to the scheduler the pool is one engine, and e of the
lag certificate is the version that `update` last returned with. A request whose engine died is sampled again
from its first token, by another engine: no token of a dead engine is returned.
One replacement starts at a time. `MAX_DEATHS` deaths between two updates, or a death with nothing to
replace it, end the pool: everyone who waits and everyone who comes later gets `EngineDead`.
Waits: requests for an engine when there is none; an update for every engine, replacements included.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from ..errors import RunStopped
from ..kernels.transfer.sources import Offer
from ..trajectory import Float32, Sampling
from ..weight_store import WeightManifest
from .engine import Completion, Engine, EngineDead, Prepared, Takeover
from .prefix_affinity import PrefixAffinity

T = TypeVar("T")
SLACK = 4
MAX_DEATHS = 3


@dataclass(slots=True, eq=False)
class _Seat:
    """An engine that serves; `load` counts the requests that it works on."""

    engine: Engine
    number: int
    load: int = 0


class EnginePool:
    """`Engine` over n engines.

    engines     not yet started
    another     makes one more, not yet started, to replace a dead one; None: a death ends the pool
    block_size  tokens of a cache page of the engines
    """

    def __init__(
        self, engines: Sequence[Engine], *, block_size: int, another: Callable[[], Engine] | None = None
    ) -> None:
        self._numbers = itertools.count()
        self._seats = [_Seat(engine, next(self._numbers)) for engine in engines]
        self._another = another
        self._affinity = PrefixAffinity(block_size)
        self._version = min(engine.version for engine in engines)
        self._manifest: WeightManifest | None = None
        self._weights = asyncio.Lock()  # held while engines load, and while a replacement takes its seat
        self._contract = ""
        self._missing = 0
        self._deaths = 0
        self._dead: EngineDead | None = None
        self._changed = asyncio.Event()
        self._replacing: asyncio.Task[None] | None = None
        self._closing: set[asyncio.Task[None]] = set()

    @property
    def version(self) -> int:
        return min((seat.engine.version for seat in self._seats), default=self._version)

    @property
    def contract(self) -> str:
        return self._contract

    @property
    def engines(self) -> list[Engine]:
        """Those that serve now."""
        return [seat.engine for seat in self._seats]

    async def start(self) -> None:
        await asyncio.gather(*(engine.start() for engine in self.engines))
        self._contract = self.engines[0].contract
        for engine in self.engines:
            self._check_contract(engine)

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling: Sampling,
        *,
        max_tokens: int,
        stop_token_ids: tuple[int, ...],
        seed: int | None,
        images: Sequence[bytes] = (),
    ) -> Completion:
        while True:
            seat = await self._seat(prompt_ids)
            try:
                with _busy(seat):
                    completion = await seat.engine.generate(
                        prompt_ids,
                        sampling,
                        max_tokens=max_tokens,
                        stop_token_ids=stop_token_ids,
                        seed=seed,
                        images=images,
                    )
            except EngineDead as death:
                self._lost(seat, death)
                continue
            self._affinity.learn([*prompt_ids, *completion.token_ids.tolist()], seat.number)
            return completion

    async def score(self, ids: Sequence[int], *, temperature: float = 1.0, cold: bool = True) -> Float32:
        while True:
            seat = await self._seat(ids)
            try:
                with _busy(seat):
                    return await seat.engine.score(ids, temperature=temperature, cold=cold)
            except EngineDead as death:
                self._lost(seat, death)

    async def prepare(self, offer: Offer) -> Prepared:
        """The slowest engine's time, the first fault. An engine that comes later will read the file."""
        found = await self._from_all(lambda engine: engine.prepare(offer))
        return Prepared(
            seconds=max((each.seconds for each in found), default=0.0),
            size=sum(each.size for each in found),
            fault=next((each.fault for each in found if each.fault), None),
        )

    async def update(self, manifest: WeightManifest) -> Takeover:
        """Returns when every engine, replacements included, serves the manifest; what the slowest one did."""
        if self._dead is not None:
            raise self._dead
        async with self._weights:
            found = await self._from_all(lambda engine: engine.update(manifest))
            self._manifest = manifest
            self._affinity.clear()  # an update empties every cache
        await self._until(lambda: not self._missing)
        self._version, self._deaths = manifest.version, 0
        return max(found, key=lambda each: each.paused_s, default=Takeover(paused_s=0.0, source="file"))

    async def checksums(self) -> dict[str, str]:
        """What every engine holds. Raises RunStopped where two of them differ."""
        await self._until(lambda: bool(self._seats))
        held = await asyncio.gather(*(engine.checksums() for engine in self.engines))
        for other in held[1:]:
            if other != held[0]:
                names = sorted(n for n in {*other, *held[0]} if other.get(n) != held[0].get(n))
                raise RunStopped(f"two engines of the pool hold different weights, the first: {names[0]}")
        return held[0]

    async def close(self) -> None:
        if self._dead is None:
            self._die("the pool was closed")
        if self._replacing is not None:
            self._replacing.cancel()
            await asyncio.gather(self._replacing, return_exceptions=True)
        await asyncio.gather(*(_close(engine) for engine in self.engines), *self._closing)

    async def _from_all(self, ask: Callable[[Engine], Awaitable[T]]) -> list[T]:
        """Every engine's answer but those of engines that die over it."""
        seats = list(self._seats)
        answers = await asyncio.gather(*(ask(seat.engine) for seat in seats), return_exceptions=True)
        found: list[T] = []
        for seat, answer in zip(seats, answers, strict=True):
            if isinstance(answer, EngineDead):
                self._lost(seat, answer)
            elif isinstance(answer, BaseException):
                raise answer
            else:
                found.append(answer)
        return found

    # --- routing --------------------------------------------------------------------------------------

    async def _seat(self, ids: Sequence[int]) -> _Seat:
        await self._until(lambda: bool(self._seats))
        idlest = min(self._seats, key=lambda seat: (seat.load, seat.number))
        known = self._affinity.find(ids)
        for seat in self._seats:
            if seat.number == known and seat.load <= idlest.load + SLACK:
                return seat
        return idlest

    async def _until(self, ready: Callable[[], bool]) -> None:
        """Wait for the pool's engines; raises EngineDead once the pool is."""
        while True:
            if self._dead is not None:
                raise self._dead
            if ready():
                return
            self._changed.clear()
            await self._changed.wait()

    # --- death and replacement ------------------------------------------------------------------------

    def _lost(self, seat: _Seat, death: EngineDead) -> None:
        """Take a dead engine out and have another one started; the first of its requests to say so counts."""
        if seat not in self._seats:
            return
        self._seats.remove(seat)
        self._missing += 1
        closing = asyncio.create_task(_close(seat.engine))
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)
        self._count(death)
        if self._dead is None and (self._replacing is None or self._replacing.done()):
            self._replacing = asyncio.create_task(self._replace(), name="replace engine")

    async def _replace(self) -> None:
        while self._missing and self._dead is None and self._another is not None:
            engine = self._another()
            try:
                await engine.start()
                self._check_contract(engine)
                async with self._weights:
                    if self._manifest is not None:
                        await engine.update(self._manifest)
                    self._seats.append(_Seat(engine, next(self._numbers)))
                    self._missing -= 1
                    self._changed.set()
            except BaseException as error:
                await _close(engine)
                if not isinstance(error, Exception):
                    raise
                self._count(error)

    def _count(self, death: Exception) -> None:
        self._deaths += 1
        if self._another is None:
            self._die(f"an engine died and nothing replaces it: {death}")
        elif self._deaths >= MAX_DEATHS:
            self._die(f"{self._deaths} engines died since the last update of the weights, the last: {death}")

    def _die(self, reason: str) -> None:
        self._dead = EngineDead(reason)
        self._changed.set()

    def _check_contract(self, engine: Engine) -> None:
        if engine.contract != self._contract:
            raise EngineDead(
                f"an engine computes with kernels {engine.contract}, the first one with {self._contract}: "
                "use one machine type and one version of vLLM and torch for all engines"
            )


@contextlib.contextmanager
def _busy(seat: _Seat) -> Iterator[None]:
    seat.load += 1
    try:
        yield
    finally:
        seat.load -= 1


async def _close(engine: Engine) -> None:
    # What a dead engine says on closing adds nothing to how it died.
    with contextlib.suppress(Exception):
        await engine.close()
