"""What a token costs in memory and in the journal, and how many episodes a second the journal takes.

    python benchmarks/journal_memory.py [EPISODES] [TOKENS]

Two shapes of episode: turns of 7 sampled tokens after 3 of observation (many runs of versions), and one long
answer. Memory is what the process grew by while it held all episodes; disk is the journal file after close.
Exits with 1 if a token needs 16 bytes of memory or 24 of disk, so that a gate can run it.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table
from rz_agent.journal import GroupRecord, Journal
from rz_agent.trajectory import Segment, Trajectory

MEMORY_LIMIT, DISK_LIMIT = 16, 24
GROUP_SIZE = 8


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


def trajectory(number: int, tokens: int, *, turns: bool) -> Trajectory:
    random = np.random.default_rng(number)
    positions = np.arange(tokens)
    mask = positions % 10 > 2 if turns else positions >= tokens // 10
    segment = Segment(
        token_ids=random.integers(0, 150_000, tokens).astype(np.int32),
        action_mask=mask,
        behaviour_logprobs=np.where(mask, -random.exponential(size=tokens), np.nan),
        policy_version=np.where(mask, number // 1000, -1),
    )
    group = number // GROUP_SIZE
    return Trajectory(
        episode_id=f"e{number}", group_id=f"g{group}", task_id=f"t{group}", segments=(segment,), reward=1.0
    )


async def write(path: Path, episodes: list[Trajectory]) -> float:
    """Seconds to make all episodes durable, submitted as fast as the journal takes them."""
    with Journal.open(path, run={}) as journal:
        for group in range(-(-len(episodes) // GROUP_SIZE)):
            record = GroupRecord(
                group_id=f"g{group}", task_id=f"t{group}", position=group, size=GROUP_SIZE, admitted_version=0
            )
            await journal.aadmit(record)
        start = time.perf_counter()
        for first in range(0, len(episodes), 256):  # as many episodes as end at about the same time
            wave = episodes[first : first + 256]
            calls = (journal.afinish_episode(t, (first + i) % GROUP_SIZE) for i, t in enumerate(wave))
            await asyncio.gather(*calls)
        return time.perf_counter() - start


def measure(count: int, tokens: int, *, turns: bool) -> tuple[float, float, float]:
    """(bytes a token in memory, bytes a token on disk, episodes a second)"""
    before = resident_bytes()
    episodes = [trajectory(number, tokens, turns=turns) for number in range(count)]
    memory = (resident_bytes() - before) / (count * tokens)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "journal.sqlite"
        seconds = asyncio.run(write(path, episodes))
        disk = path.stat().st_size / (count * tokens)
    return memory, disk, count / seconds


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("episodes", type=int, nargs="?", default=10_000)
    parser.add_argument("tokens", type=int, nargs="?", default=1_000)
    given = parser.parse_args()
    count, tokens = given.episodes, given.tokens
    table = Table(title=f"{count:,} episodes of {tokens:,} tokens")
    for heading in ("episode", "memory, bytes/token", "disk, bytes/token", "episodes/s, durable"):
        table.add_column(heading, justify="left" if heading == "episode" else "right")
    within = True
    for name, turns in (("turns of 7 + 3 tokens", True), ("one long answer", False)):
        # A process of its own: memory that an earlier measurement freed would hide what this one takes.
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as process:
            memory, disk, rate = process.submit(measure, count, tokens, turns=turns).result()
        table.add_row(name, f"{memory:.1f}", f"{disk:.1f}", f"{rate:,.0f}")
        within = within and memory < MEMORY_LIMIT and disk < DISK_LIMIT
    Console().print(table)
    return 0 if within else 1


if __name__ == "__main__":
    sys.exit(main())
