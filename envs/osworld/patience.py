"""How long a machine may take, and who answers for it when it takes longer.

    async with patience(900, machine, "the evaluation"):    everything that is asked of the machine

A machine that is late and still shows its screen is alive: what makes it slow is what runs on it, and that is
the policy's (`Hindered`: worth 0). One that does not show it is lost (`InfraFailure`: masked). Were every
machine that is late masked, a policy could choose which of its episodes count by slowing its machine down.
Invariant: the block ends by its deadline and one look. Waits: the caller, so long.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from ...sandboxes.deadline import deadline
from ..failure import InfraFailure
from .machine import Hindered, Machine

LOOK_S = 60.0


@asynccontextmanager
async def patience(seconds: float, machine: Machine, what: str) -> AsyncIterator[None]:
    """`what` is a noun for messages."""
    try:
        async with deadline(seconds) as clock:
            yield
    except TimeoutError as error:
        if not clock.expired():
            raise
        late = f"{what} did not end in {seconds:g} s"
        if await shows_its_screen(machine):
            raise Hindered(f"{late}, and the machine answers", provider="machine") from error
        raise InfraFailure(f"{late}, and the machine does not answer") from error


async def shows_its_screen(machine: Machine) -> bool:
    """A look, which the policy's programs cannot answer. Where it fails, its error says whose doing it is."""
    try:
        async with asyncio.timeout(LOOK_S):
            await machine.screenshot()
    except TimeoutError:
        return False
    return True
