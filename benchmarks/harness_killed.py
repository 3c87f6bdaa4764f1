"""What is left of a sandbox when its harness is killed within the first 20 ms of making it, or of using it.

    python benchmarks/harness_killed.py [--tries 60] [--providers local docker]

In each try a process of its own is told to go and is killed 0 to 20 ms later, by SIGKILL: half of the tries
while it makes a sandbox, half while it starts a program in one. 5 s later everything of it that still runs is
counted: the program, and the sandbox's processes. Root gets a Docker daemon of its own, as the tests do.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rz_agent.sandboxes.tables import DockerTable

GONE_S = 5.0
HARNESS = """
import asyncio, json, sys
from rz_agent.sandboxes.config import SandboxConfig
from rz_agent.sandboxes.keeper import Keeper

async def main():
    settings, phase, program = json.loads(sys.argv[1]), sys.argv[2], sys.argv[3:]
    config = SandboxConfig.load(settings, source="benchmark")
    keeper = Keeper.of(config, run_id="killed")
    sandbox = await keeper.create(config.spec()) if phase == "start" else None
    print("ready", flush=True)
    sys.stdin.readline()
    if sandbox is None:
        sandbox = await keeper.create(config.spec())
    await sandbox.exec(program, timeout_s=600)

asyncio.run(main())
"""


def running(*words: str) -> list[str]:
    """Command lines of this machine's processes, besides harnesses, that hold one of the words."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            line = path.read_bytes().replace(b"\0", b" ").decode("utf-8", "replace").strip()
            if any(word in line for word in words) and "SandboxConfig" not in line:
                found.append(line)
    return found


def killed(settings: dict[str, object], phase: str, number: int, after_s: float) -> list[str]:
    """What still runs 5 s after one harness was killed, `after_s` after it was told to go."""
    program = ["sleep", f"86{number}.25"]
    argv = [sys.executable, "-c", HARNESS, json.dumps(settings), phase, *program]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as harness:
        assert harness.stdin is not None
        assert harness.stdout is not None
        if harness.stdout.readline() != "ready\n":
            raise RuntimeError("the harness did not start")
        harness.stdin.write("\n")
        harness.stdin.flush()
        time.sleep(after_s)
        harness.kill()
    marks = (" ".join(program), f"rz-agent-sandbox={harness.pid}-")
    end = time.monotonic() + GONE_S
    while (left := running(*marks)) and time.monotonic() < end:
        time.sleep(0.05)
    return left


@contextlib.contextmanager
def settings_of(provider: str) -> Iterator[dict[str, object]]:
    """The `[sandbox]` table of a provider."""
    if provider == "local":
        yield {"provider": "local"}
        return
    sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
    from dockerd import started

    with started() as daemon:
        table: DockerTable = daemon.table()
        yield {"provider": "docker", "docker": table.model_dump(mode="json")}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tries", type=int, default=60)
    parser.add_argument("--providers", nargs="+", choices=("local", "docker"), default=["local", "docker"])
    arguments = parser.parse_args()
    table = Table("killed while it", *arguments.providers, title=f"still running {GONE_S:g} s later")
    rows: dict[str, list[str]] = {"make": [], "start": []}
    for provider in arguments.providers:
        with settings_of(provider) as settings:
            for phase, cells in rows.items():
                tries = arguments.tries // 2
                left = [killed(settings, phase, n, 0.02 * n / tries) for n in range(tries)]
                cells.append(f"{sum(map(bool, left))} of {tries}")
                print(provider, phase, *filter(None, left), file=sys.stderr)
    table.add_row("makes a sandbox", *rows["make"])
    table.add_row("starts a program", *rows["start"])
    Console(width=80).print(table)


if __name__ == "__main__":
    main()
