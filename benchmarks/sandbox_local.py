"""What a local sandbox costs on this machine: one table, wall milliseconds.

    python benchmarks/sandbox_local.py [--isolation none] [--rounds 50]

Figures depend on what else runs: the load average is printed with them.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import time
from collections.abc import Awaitable, Callable

from rich.console import Console
from rich.table import Table
from rz_agent.sandboxes.config import SandboxConfig
from rz_agent.sandboxes.local.provider import LocalProvider
from rz_agent.sandboxes.local.sandbox import LocalSandbox

SIDE_BY_SIDE = 60


async def timed(rounds: int, action: Callable[[int], Awaitable[object]]) -> list[float]:
    """Milliseconds of each of `rounds` calls, one after the other; the first call is not counted."""
    await action(-1)
    times = []
    for number in range(rounds):
        begun = time.perf_counter()
        await action(number)
        times.append(1000 * (time.perf_counter() - begun))
    return times


async def measure(provider: LocalProvider, config: SandboxConfig, rounds: int) -> dict[str, list[float]]:
    """The rows of the table."""

    async def create_and_close(_: int) -> None:
        await (await provider.create(config.spec())).close()

    sandbox = await provider.create(config.spec())

    async def new_session(number: int) -> None:
        await sandbox.python("1 + 1", session=f"new {number}")

    async def end_session(number: int) -> None:
        await sandbox.end_session(f"new {number}")

    rows = {
        "create + close": await timed(max(3, rounds // 5), create_and_close),
        "exec true": await timed(rounds, lambda _: sandbox.exec(["true"])),
        "exec python3 -I -c pass": await timed(
            rounds, lambda _: sandbox.exec(["python3", "-I", "-c", "pass"])
        ),
        "new session, first cell": await timed(rounds, new_session),
        "end session": await timed(rounds, end_session),
        "cell of a live session": await timed(5 * rounds, lambda _: sandbox.python("1 + 1", session="live")),
        "write 4 kB": await timed(rounds, lambda _: sandbox.write("data", b"x" * 4096)),
        "read 4 kB": await timed(rounds, lambda _: sandbox.read("data")),
    }
    await sandbox.close()
    return rows


async def side_by_side(sandbox: LocalSandbox, cells: int) -> tuple[float, list[float]]:
    """(seconds in all, milliseconds of each cell) of 60 sessions at once, each of `cells` cells."""
    times: list[float] = []

    async def episode(number: int) -> None:
        for _ in range(cells):
            begun = time.perf_counter()
            result = await sandbox.python("sum(range(1000))", session=f"side {number}")
            assert result.stdout == b"499500\n", result
            times.append(1000 * (time.perf_counter() - begun))
        await sandbox.end_session(f"side {number}")

    begun = time.perf_counter()
    await asyncio.gather(*(episode(number) for number in range(SIDE_BY_SIDE)))
    return time.perf_counter() - begun, times


def _row(name: str, times: list[float]) -> tuple[str, str, str, str]:
    ordered = sorted(times)
    ninetieth = ordered[int(0.9 * (len(ordered) - 1))]
    return name, f"{statistics.median(ordered):.2f}", f"{ninetieth:.2f}", str(len(ordered))


async def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--isolation", choices=("namespaces", "none"), default="namespaces")
    parser.add_argument("--rounds", type=int, default=50)
    arguments = parser.parse_args()
    config = SandboxConfig.load({"local": {"isolation": arguments.isolation}}, source="benchmark")
    provider = LocalProvider(config.local)
    rows = await measure(provider, config, arguments.rounds)
    sandbox = await provider.create(config.spec())
    seconds, times = await side_by_side(sandbox, cells=5)
    await provider.aclose()
    table = Table("", "p50 ms", "p90 ms", "n", title=f"local sandbox, isolation = {arguments.isolation}")
    for name, values in rows.items():
        table.add_row(*_row(name, values))
    table.add_row(*_row(f"{SIDE_BY_SIDE} sessions at once, a cell", times))
    console = Console(width=80)
    console.print(table)
    episodes = SIDE_BY_SIDE / seconds
    console.print(
        f"{SIDE_BY_SIDE} sessions of 5 cells, begun and ended: {seconds:.2f} s, {episodes:.0f} sessions/s"
    )
    load = " ".join(f"{value:.1f}" for value in os.getloadavg())
    console.print(f"cores {os.cpu_count()}, load average {load}")


if __name__ == "__main__":
    asyncio.run(main())
