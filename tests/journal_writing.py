"""Records for the journal's tests, and a process that writes them until it is killed.

As a program: `journal_writing.py JOURNAL` continues the journal as a run does, prints each fact after the
journal acknowledged it, one JSON list a line, and never ends.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
from rz_agent.journal import GroupRecord, Journal
from rz_agent.trajectory import Segment, Trajectory


def admit(journal: Journal, position: int, size: int = 1, version: int = 0) -> str:
    name = f"g{position}"
    journal.admit(
        GroupRecord(
            group_id=name,
            task_id=f"task{position}",
            position=position,
            size=size,
            admitted_version=version,
        )
    )
    return name


def episode(group: str, index: int = 0, *, version: int = 0, masked: bool = False) -> Trajectory:
    nan = float("nan")
    return Trajectory(
        episode_id=f"{group}-{index}",
        group_id=group,
        task_id=f"task{group[1:]}",
        segments=(
            Segment(
                token_ids=np.array([5, 6, 7], np.int32),
                action_mask=np.array([False, True, True]),
                behaviour_logprobs=np.array([nan, -0.5, -1.5], np.float32),
                policy_version=np.array([-1, version, version + 1], np.int32),
            ),
        ),
        reward=0.0 if masked else 1.0,
        status="masked" if masked else "ok",
        mask_reason="sandbox lost" if masked else "",
    )


def say(*fact: Any) -> None:
    print(json.dumps(fact), flush=True)


async def finish(journal: Journal, name: str, index: int) -> None:
    await journal.afinish_episode(episode(name, index, version=index), index)
    say("finished", name, index)


def update_with(journal: Journal, update: int, batch: list[str]) -> None:
    if not journal.consumed(update):
        journal.consume(update, batch)
        say("consumed", update, batch)
    journal.complete(update, version=update + 1, weights_checksum="", metrics={})
    say("completed", update, None)


async def write_forever(path: Path) -> None:
    with Journal.open(path, run={"seed": 7}) as journal:
        point = journal.resume()
        for group in point.untrained:
            for index in set(range(group.record.size)) - group.finished:
                await finish(journal, group.record.group_id, index)
        update = point.update
        if point.in_training:
            update_with(journal, update, [])
            update += 1
        while True:
            for _ in range(2):
                name = admit(journal, journal.next_position(), size=4)
                await asyncio.gather(*(finish(journal, name, index) for index in range(4)))
            update_with(journal, update, [group.record.group_id for group in journal.resume().untrained])
            update += 1


if __name__ == "__main__":
    asyncio.run(write_forever(Path(sys.argv[1])))
