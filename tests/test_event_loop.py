"""The loop that a run's episodes share."""

from __future__ import annotations

import asyncio
import gc

import pytest
from rz_agent.recipes import event_loop
from rz_agent.sandboxes.local.provider import LocalProvider
from rz_agent.sandboxes.spec import SandboxSpec
from rz_agent.sandboxes.tables import LocalTable


def test_what_main_returns_or_raises_is_the_callers_and_the_collector_is_as_before() -> None:
    before = gc.get_threshold()

    async def threshold() -> int:
        await asyncio.sleep(0)
        return gc.get_threshold()[0]

    async def fails() -> None:
        raise LookupError("gone")

    assert event_loop.run(threshold()) > before[0]
    with pytest.raises(LookupError, match="gone"):
        event_loop.run(fails())
    assert gc.get_threshold() == before


def test_a_sandbox_works_and_closes_on_it() -> None:
    async def used() -> int | None:
        async with await LocalProvider(LocalTable()).create(SandboxSpec()) as sandbox:
            return (await sandbox.exec(["true"])).exit_code

    assert event_loop.run(used()) == 0
