"""What a desktop in a local sandbox costs, and whether what is typed arrives: one table.

    python benchmarks/desktop.py [--rounds 20] [--saves 20] [--at-once 20]

Figures depend on what else runs: the load average is printed with them.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import statistics
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rz_agent.sandboxes.desktop import answers
from rz_agent.sandboxes.desktop.actions import Click, Hotkey, Press, Type
from rz_agent.sandboxes.desktop.archive import build
from rz_agent.sandboxes.desktop.desktop import Desktop
from rz_agent.sandboxes.desktop.hand import Hand
from rz_agent.sandboxes.desktop.provider import ROOM, DesktopProvider
from rz_agent.sandboxes.desktop.screen import Screen
from rz_agent.sandboxes.errors import FileError
from rz_agent.sandboxes.local.hierarchy import find_hierarchies
from rz_agent.sandboxes.local.provider import LocalProvider
from rz_agent.sandboxes.spec import SandboxSpec, roomier
from rz_agent.sandboxes.tables import DesktopTable, LocalTable

TEXT = "Größe: 42 €, (a+b)*c != d; é你好ß ~|{}\n\tsecond line: ÅΩя “quoted”\n"
Rows = list[tuple[str, list[float]]]


async def timed(rounds: int, action: Callable[[], Awaitable[object]]) -> list[float]:
    """Milliseconds of each of `rounds` calls, one after the other; the first call is not counted."""
    await action()
    times = []
    for _ in range(rounds):
        begun = time.perf_counter()
        await action()
        times.append(1000 * (time.perf_counter() - begun))
    return times


async def until(found: Callable[[], Awaitable[bool]]) -> None:
    """Look every 20 ms for 30 s at most."""
    async with asyncio.timeout(30):
        while True:
            if await found():
                return
            await asyncio.sleep(0.02)


async def shown(desktop: Desktop, title: str) -> None:
    """Wait for a window."""

    async def there() -> bool:
        return any(title in window.title for window in await desktop.windows())

    await until(there)


async def saved(desktop: Desktop, path: str) -> bool:
    """Type the text into a new editor, save it through the dialog; whether the file equals the text."""
    await desktop.reset()
    await desktop.launch(["mousepad"])
    await shown(desktop, "Untitled")
    await desktop.act(Type(TEXT))
    await desktop.act(Hotkey(("ctrl", "s")))
    await shown(desktop, "Save As")
    await desktop.act(Hotkey(("ctrl", "a")))
    await desktop.act(Type(path))
    await desktop.act(Press("enter"))

    async def there() -> bool:
        with contextlib.suppress(FileError):
            return bool(await desktop.read(path))
        return False

    try:
        await until(there)
    except TimeoutError:
        return False
    return (await desktop.read(path)).decode() == TEXT


async def whole_screens(size: tuple[int, int], rounds: int) -> list[float]:
    """Screenshots of which nothing is known before, with an editor on the screen."""
    provider = LocalProvider(LocalTable())
    async with await provider.create(roomier(SandboxSpec(), ROOM)) as sandbox:
        hand = await Hand.start(sandbox, build(), python="python3", size=size, a11y=False)
        await hand.ask("launch", {"argv": ["mousepad"], "env": {}, "cwd": None}, answers.started)
        await asyncio.sleep(2)

        async def look() -> None:
            await hand.ask("screenshot", {"since": 0}, Screen(size).update)

        times = await timed(rounds, look)
        await hand.end()
    await provider.aclose()
    return times


async def one_desktop(provider: DesktopProvider, rounds: int) -> Rows:
    """The rows about one desktop."""

    async def fresh() -> None:
        async with await provider.create(SandboxSpec()) as made:
            await made.screenshot()

    rows: Rows = [("new sandbox, desktop, screenshot, close", await timed(rounds, fresh))]
    async with await provider.create(SandboxSpec()) as desktop:

        async def again() -> None:
            await desktop.reset()
            await desktop.screenshot()

        async def editor() -> None:
            await again()
            await desktop.launch(["mousepad"])
            await shown(desktop, "Untitled")

        rows += [
            ("reset: old one gone, new one's screenshot", await timed(rounds, again)),
            ("reset, until an editor's window is there", await timed(rounds, editor)),
            ("screenshot 1280x800, nothing changed", await timed(5 * rounds, desktop.screenshot)),
            ("screenshot 1280x800, whole", await whole_screens((1280, 800), 5 * rounds)),
            ("screenshot 1920x1080, whole", await whole_screens((1920, 1080), 5 * rounds)),
            ("click", await timed(5 * rounds, lambda: desktop.act(Click(640, 400)))),
            (f"type {len(TEXT)} characters", await timed(rounds, lambda: desktop.act(Type(TEXT)))),
        ]
    return rows


def used_mb(owner: str, names: Sequence[str]) -> float | None:
    """What the sandboxes' memory cgroups hold in all; None without a memory controller."""
    for hierarchy in find_hierarchies():
        if "memory" in hierarchy.controllers:
            file = "memory.current" if hierarchy.version == 2 else "memory.usage_in_bytes"
            return sum(int(Path(hierarchy.path, owner, name, file).read_text()) for name in names) / 1e6
    return None


async def side_by_side(table: DesktopTable, count: int) -> list[str]:
    """So many desktops at once: how long until all answer, and their memory, bare and with an editor."""
    under = LocalProvider(LocalTable())
    provider = DesktopProvider(table, under)
    begun = time.perf_counter()
    desktops = await asyncio.gather(*(provider.create(SandboxSpec()) for _ in range(count)))
    await asyncio.gather(*(desktop.screenshot() for desktop in desktops))
    said = [f"{count} desktops at once: all answer after {time.perf_counter() - begun:.1f} s"]
    names = [desktop.id for desktop in desktops]
    for state in ("bare", "each with an editor"):
        if state != "bare":
            await asyncio.gather(*(desktop.launch(["mousepad"]) for desktop in desktops))
            await asyncio.gather(*(shown(desktop, "Untitled") for desktop in desktops))
        megabytes = used_mb(under.owner, names)
        amount = "unknown, no memory cgroup" if megabytes is None else f"{megabytes:.0f} MB"
        said.append(f"{count} desktops, {state}: {amount} in all")
    await provider.aclose()
    return said


async def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--saves", type=int, default=20)
    parser.add_argument("--at-once", type=int, default=20)
    arguments = parser.parse_args()
    build()  # once for a process
    provider = DesktopProvider(DesktopTable(settle_s=0.0), LocalProvider(LocalTable()))
    rows = await one_desktop(provider, arguments.rounds)
    await provider.aclose()
    provider = DesktopProvider(DesktopTable(settle_s=0.2), LocalProvider(LocalTable()))
    async with await provider.create(SandboxSpec()) as desktop:
        right = sum([await saved(desktop, f"/box/é{number} 你.txt") for number in range(arguments.saves)])
    await provider.aclose()
    table = Table("", "p50 ms", "p90 ms", "n", title="desktop over local")
    for name, times in rows:
        ordered = sorted(times)
        ninetieth = ordered[int(0.9 * len(ordered))]
        table.add_row(name, f"{statistics.median(ordered):.1f}", f"{ninetieth:.1f}", str(len(ordered)))
    console = Console(width=90)
    console.print(table)
    console.print(f"typed, saved through the dialog, file equals the text: {right} of {arguments.saves}")
    for line in await side_by_side(DesktopTable(settle_s=0.0), arguments.at_once):
        console.print(line)
    load = " ".join(f"{value:.1f}" for value in os.getloadavg())
    console.print(f"cores {os.cpu_count()}, load average {load}")


if __name__ == "__main__":
    asyncio.run(main())
