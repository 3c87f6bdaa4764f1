"""What a local sandbox costs on this machine: one table, wall and CPU milliseconds.

    python benchmarks/sandbox_local.py [--isolation none] [--rounds 50]

CPU is that of this process and of all below it, with what the sandbox has reaped; of "close" it is not known,
since what ends with a namespace is reaped by nobody here. The first row is the same interpreter started on
the host, so that machines of other speeds can be compared. Figures depend on what else runs: the load average
is printed with them.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import resource
import shutil
import statistics
import subprocess
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rz_agent.sandboxes.config import SandboxConfig
from rz_agent.sandboxes.local.provider import LocalProvider
from rz_agent.sandboxes.local.sandbox import LocalSandbox

SIDE_BY_SIDE = 60
TICK_MS = 1000 / os.sysconf("SC_CLK_TCK")
CLOSE = "close"
PYTHON = ["python3", "-I", "-c", "pass"]
COMMAND = f"exec {' '.join(PYTHON)}"


@dataclass
class Row:
    """Milliseconds of wall time of each call, and of CPU time per call."""

    wall: list[float] = field(default_factory=list)
    cpu: float = 0.0


def cpu_below() -> float:
    """Milliseconds of CPU of the living processes below this one and of the children they have reaped."""
    children: dict[int, list[int]] = {}
    spent = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                words = (folder / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            children.setdefault(int(words[1]), []).append(int(folder.name))
            spent[int(folder.name)] = sum(map(int, words[11:15]))
    waiting, total = list(children.get(os.getpid(), [])), 0
    while waiting:
        pid = waiting.pop()
        total += spent[pid]
        waiting += children.get(pid, [])
    return total * TICK_MS


def cpu_here() -> float:
    """Milliseconds of CPU of this process, of all below it and of its ended children."""
    own = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return cpu_below() + 1000 * sum(usage.ru_utime + usage.ru_stime for usage in own)


async def timed(rounds: int, action: Callable[[int], Awaitable[object]]) -> Row:
    """`rounds` calls, one after the other; the first call is not counted."""
    await action(-1)
    row, before = Row(), cpu_here()
    for number in range(rounds):
        begun = time.perf_counter()
        await action(number)
        row.wall.append(1000 * (time.perf_counter() - begun))
    row.cpu = (cpu_here() - before) / rounds
    return row


async def measure(provider: LocalProvider, config: SandboxConfig, rounds: int) -> dict[str, Row]:
    """The rows of one call at a time."""
    python = [shutil.which("python3", path="/usr/local/bin:/usr/bin:/bin") or "python3", *PYTHON[1:]]

    async def on_the_host(_: int) -> None:
        await asyncio.to_thread(subprocess.run, python, check=True)

    boxes: list[LocalSandbox] = []

    async def create(_: int) -> None:
        boxes.append(await provider.create(config.spec()))

    async def close(_: int) -> None:
        await boxes.pop().close()

    async with await provider.create(config.spec()) as sandbox:

        async def new_session(number: int) -> None:
            await sandbox.python("1 + 1", session=f"new {number}")

        async def end_session(number: int) -> None:
            await sandbox.end_session(f"new {number}")

        return {
            f"on the host: {' '.join(python)}": await timed(rounds, on_the_host),
            COMMAND: await timed(rounds, lambda _: sandbox.exec(PYTHON)),
            "exec true": await timed(rounds, lambda _: sandbox.exec(["true"])),
            "new session, first cell": await timed(rounds, new_session),
            "end session": await timed(rounds, end_session),
            "cell of a live session": await timed(
                5 * rounds, lambda _: sandbox.python("1 + 1", session="live")
            ),
            "write 4 kB": await timed(rounds, lambda _: sandbox.write("data", b"x" * 4096)),
            "read 4 kB": await timed(rounds, lambda _: sandbox.read("data")),
            "create": await timed(max(3, rounds // 5), create),
            CLOSE: await timed(max(3, rounds // 5), close),
        }


async def side_by_side(provider: LocalProvider, config: SandboxConfig, rounds: int) -> dict[str, Row]:
    """The rows of 60 sandboxes, all alive at once."""
    rows = {name: Row() for name in ("made", "a cell", COMMAND)}

    async def clocked(name: str, call: Awaitable[object]) -> None:
        begun = time.perf_counter()
        await call
        rows[name].wall.append(1000 * (time.perf_counter() - begun))

    boxes: list[LocalSandbox] = []

    async def make() -> None:
        boxes.append(await provider.create(config.spec()))

    async def cells(box: LocalSandbox) -> None:
        for _ in range(rounds):
            await clocked("a cell", box.python("1 + 1", session="a"))

    async def commands(box: LocalSandbox) -> None:
        for _ in range(max(1, rounds // 10)):
            await clocked(COMMAND, box.exec(PYTHON))

    async def measured(name: str, calls: Iterable[Awaitable[None]]) -> None:
        before = cpu_here()
        await asyncio.gather(*calls)
        rows[name].cpu = (cpu_here() - before) / len(rows[name].wall)

    await measured("made", (clocked("made", make()) for _ in range(SIDE_BY_SIDE)))
    await measured("a cell", (cells(box) for box in boxes))
    # one that is not counted: the kernel tells what ended processes took in whole ticks, rounded down, and so
    # too little of what begins at zero
    await asyncio.gather(*(box.exec(PYTHON) for box in boxes))
    await measured(COMMAND, (commands(box) for box in boxes))
    return {f"{SIDE_BY_SIDE} sandboxes at once: {name}": row for name, row in rows.items()}


def _cells(name: str, row: Row) -> tuple[str, str, str, str, str]:
    ordered = sorted(row.wall)
    ninetieth = ordered[int(0.9 * (len(ordered) - 1))]
    cpu = "-" if name == CLOSE else f"{row.cpu:.2f}"
    return name, cpu, f"{statistics.median(ordered):.2f}", f"{ninetieth:.2f}", str(len(ordered))


async def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--isolation", choices=("namespaces", "none"), default="namespaces")
    parser.add_argument("--rounds", type=int, default=50)
    arguments = parser.parse_args()
    config = SandboxConfig.load({"local": {"isolation": arguments.isolation}}, source="benchmark")
    provider = LocalProvider(config.local)
    rows = await measure(provider, config, arguments.rounds)
    rows |= await side_by_side(provider, config, arguments.rounds)
    await provider.aclose()
    title = f"local sandbox, isolation = {arguments.isolation}"
    table = Table("", "CPU ms", "p50 ms", "p90 ms", "n", title=title)
    for name, row in rows.items():
        table.add_row(*_cells(name, row))
    Console(width=100).print(table)
    load = " ".join(f"{value:.1f}" for value in os.getloadavg())
    print(f"cores {os.cpu_count()}, load average {load}")


if __name__ == "__main__":
    asyncio.run(main())
