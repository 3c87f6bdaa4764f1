"""Waiting for an engine that fetches weights beside its steps."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from .engine import Prepared

PREPARE_S = 300.0
_SHORTEST_S, _LONGEST_S = 0.01, 0.2


async def prepared(ask: Callable[[], Awaitable[Mapping[str, Any]]]) -> Prepared:
    """Ask (`RzWorker.rz_prepared`) until it is done, at most `PREPARE_S`.

    Each answer costs the engine the gap between two steps, so the questions become rarer.
    """
    began, pause = time.monotonic(), _SHORTEST_S
    while True:
        found = await ask()
        seconds = time.monotonic() - began
        if found["done"]:
            return Prepared(seconds=found["seconds"], size=found["size"], fault=found["fault"])
        if seconds > PREPARE_S:
            return Prepared(seconds=seconds, size=0, fault=f"not staged within {PREPARE_S:.0f} s")
        await asyncio.sleep(pause)
        pause = min(2 * pause, _LONGEST_S)
