"""What an action costs in a local sandbox, in a container with an agent, and by `docker exec`, side by side.

    python benchmarks/sandbox_side_by_side.py [--host unix:///var/run/docker.sock --image python:3.11-slim]

Without a host, root starts a daemon of its own, as the tests do. Figures depend on what else runs: the load
average is printed with them.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import statistics
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rz_agent.sandboxes.docker.daemon import connect
from rz_agent.sandboxes.docker.provider import DockerProvider
from rz_agent.sandboxes.local.provider import LocalProvider
from rz_agent.sandboxes.provider import Provider
from rz_agent.sandboxes.spec import SandboxSpec
from rz_agent.sandboxes.tables import DockerTable, LocalTable

PYTHON = ["python3", "-I", "-c", "pass"]
ROWS = ("exec python3 -I -c pass", "stateful cell", "create + close")


async def p50(rounds: int, action: Callable[[], Awaitable[object]]) -> float:
    """Median milliseconds of a call; the first is not counted."""
    await action()
    times = []
    for _ in range(rounds):
        begun = time.perf_counter()
        await action()
        times.append(1000 * (time.perf_counter() - begun))
    return statistics.median(times)


async def with_agent(provider: Provider, rounds: int) -> list[float | None]:
    """The rows of a provider whose sandboxes have an agent."""

    async def create_and_close() -> None:
        await (await provider.create(SandboxSpec())).close()

    async with await provider.create(SandboxSpec()) as sandbox:
        command = await p50(rounds, lambda: sandbox.exec(PYTHON))
        cell = await p50(10 * rounds, lambda: sandbox.python("1 + 1", session="a"))
    made = await p50(max(5, rounds // 3), create_and_close)
    await provider.aclose()
    return [command, cell, made]


async def by_exec(table: DockerTable, rounds: int) -> list[float | None]:
    """The same with the SDK alone: one exec for each action. It keeps no state, so it has no cell."""
    client = connect(table.host, 60.0)

    def make() -> str:
        binds = [f"{there}:{inside}:ro" for there, inside in table.volumes.items()]
        host = client.create_host_config(network_mode="none", binds=binds)
        made = client.create_container(table.image, ["sleep", "infinity"], host_config=host)
        client.start(made["Id"])
        return str(made["Id"])

    def run(container: str) -> Any:
        return client.exec_start(client.exec_create(container, PYTHON)["Id"])

    def make_and_remove() -> None:
        client.remove_container(make(), force=True)

    container = make()
    command = await p50(rounds, lambda: asyncio.to_thread(run, container))
    client.remove_container(container, force=True)
    made = await p50(max(5, rounds // 3), lambda: asyncio.to_thread(make_and_remove))
    client.close()
    return [command, None, made]


@contextlib.contextmanager
def daemon(host: str | None, image: str) -> Iterator[DockerTable]:
    """The one that was named, or one of our own."""
    if host is not None:
        yield DockerTable(host=host, image=image)
        return
    sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
    from dockerd import started

    with started() as running:
        yield running.table()


async def measure(table: DockerTable, rounds: int) -> dict[str, list[float | None]]:
    """The columns of the table."""
    return {
        "local": await with_agent(LocalProvider(LocalTable()), rounds),
        "docker, channel": await with_agent(DockerProvider(table), rounds),
        "docker, exec": await by_exec(table, rounds),
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--host")
    parser.add_argument("--image", default="python:3.11-slim")
    parser.add_argument("--rounds", type=int, default=30)
    arguments = parser.parse_args()
    with daemon(arguments.host, arguments.image) as table:
        columns = asyncio.run(measure(table, arguments.rounds))
    shown = Table("p50, wall ms", *columns)
    for number, row in enumerate(ROWS):
        values = [column[number] for column in columns.values()]
        shown.add_row(row, *("-" if value is None else f"{value:.2f}" for value in values))
    console = Console(width=80)
    console.print(shown)
    load = " ".join(f"{value:.1f}" for value in os.getloadavg())
    console.print(f"cores {os.cpu_count()}, load average {load}")


if __name__ == "__main__":
    main()
