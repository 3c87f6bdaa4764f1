"""Tries promises one after the other and says of each how it went.

Invariant: after each promise the sandbox that all share is usable, and a neighbour's session has its state;
a promise that breaks either is broken. One that does not end in `DEADLINE_S` is broken too.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Literal

from ..provider import Provider
from ..spec import SandboxSpec
from .place import Place
from .promise import Promise, same

DEADLINE_S = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Of one promise. `detail` says what came instead, or what the provider lacks."""

    promise: Promise
    status: Literal["kept", "broken", "not tried"]
    detail: str = ""
    seconds: float = 0.0


async def attempt(promise: Promise, place: Place) -> None:
    """Try one; raises what went wrong."""
    async with asyncio.timeout(DEADLINE_S):
        await place.cell("kept = 'mine'", session="neighbour")
        before = await place.sandbox()
        await promise.body(place)
        if await place.sandbox() is not before:
            raise AssertionError("the shared sandbox did not survive it")
        kept = await place.cell("kept", session="neighbour")
        same(kept.stdout, b"'mine'\n", "a neighbour's session afterwards")
        same((await place.sh("echo usable")).stdout, b"usable\n", "a command afterwards")


async def try_all(
    provider: Provider, promises: Sequence[Promise], spec: SandboxSpec | None = None
) -> AsyncIterator[Outcome]:
    """Each promise's outcome as it is known."""
    async with Place(provider, spec or SandboxSpec()) as place:
        for promise in promises:
            if lacks := promise.lacks(place.can):
                yield Outcome(promise=promise, status="not tried", detail=f"not {', '.join(lacks)}")
                continue
            begun = time.monotonic()
            try:
                await attempt(promise, place)
            except Exception as error:
                detail = str(error) or type(error).__name__
                if not isinstance(error, AssertionError):
                    detail = f"{type(error).__name__}: {detail}"
                status: Literal["kept", "broken"] = "broken"
            else:
                status, detail = "kept", ""
            yield Outcome(promise=promise, status=status, detail=detail, seconds=time.monotonic() - begun)
