"""The record of a run: what it acknowledged is there, bit for bit, whatever happened to the process."""

from __future__ import annotations

import asyncio
import json
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from journal_writing import admit, episode
from numpy.typing import NDArray
from rz_agent.errors import ConfigError
from rz_agent.journal import CorruptJournal, GroupRecord, Journal
from rz_agent.rollout.resume import restore
from rz_agent.rollout.scheduler import Scheduler, Ticket
from rz_agent.trajectory import Sampling, Segment, Status, Trajectory
from simulated_run import Episode, Records, Run, World

RUN = {"seed": 7, "recipe": {"max_lag": 2}}


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[Journal]:
    with Journal.open(tmp_path / "runs" / "a" / "journal.sqlite", run=RUN) as opened:
        yield opened


def finished_group(journal: Journal, position: int, size: int = 1, version: int = 0) -> str:
    name = admit(journal, position, size, version)
    for index in range(size):
        journal.finish_episode(episode(name, index, version=version), index)
    return name


def complete(journal: Journal, update: int, checkpoint: str | None = None) -> None:
    journal.complete(
        update,
        version=update + 1,
        weights_checksum=f"sum{update}",
        metrics={"loss": 0.1},
    )
    if checkpoint:
        journal.record_checkpoint(update + 1, checkpoint)


# Bit for bit


def bits(array: NDArray[Any]) -> bytes:
    return array.tobytes() + str(array.dtype).encode()


def assert_same_episode(left: Trajectory, right: Trajectory) -> None:
    for name in ("episode_id", "group_id", "task_id", "status", "mask_reason", "metrics"):
        assert getattr(left, name) == getattr(right, name)
    assert np.float64(left.reward).tobytes() == np.float64(right.reward).tobytes()
    assert len(left.segments) == len(right.segments)
    for mine, other in zip(left.segments, right.segments, strict=True):
        for name in ("token_ids", "action_mask", "behaviour_logprobs", "policy_version"):
            assert bits(getattr(mine, name)) == bits(getattr(other, name))
        assert (mine.images, mine.sampling, mine.contract) == (other.images, other.sampling, other.contract)


@st.composite
def segments(draw: st.DrawFn) -> Segment:
    length = draw(st.integers(0, 40))
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    mask = random.random(length) < draw(st.sampled_from([0.0, 0.5, 1.0]))
    payloads = random.integers(0x7F800001, 0x80000000, length, dtype=np.uint32)
    payloads |= random.integers(0, 2, length, dtype=np.uint32) << np.uint32(31)
    logprobs = np.where(mask, (-random.exponential(size=length).astype(np.float32)).view(np.uint32), payloads)
    newest = draw(st.sampled_from([0, 3, 2**31 - 1]))
    return Segment(
        token_ids=random.integers(-(2**31), 2**31, length).astype(np.int32),
        action_mask=mask,
        behaviour_logprobs=logprobs.astype(np.uint32).view(np.float32),
        policy_version=np.where(mask, random.integers(max(newest - 2, 0), newest + 1, length), -1),
        images=tuple(draw(st.lists(st.sampled_from([b"", b"png one", b"png two" * 999]), max_size=3))),
        sampling=Sampling(temperature=draw(st.sampled_from([1.0, 0.1, 1 / 3]))),
        contract=draw(st.sampled_from(["", "cpu:1f", "größer"])),
    )


@st.composite
def trajectories(draw: st.DrawFn) -> Trajectory:
    status: Status = draw(st.sampled_from(["ok", "truncated", "masked"]))
    return Trajectory(
        episode_id="e",
        group_id="g0",
        task_id="task0",
        segments=tuple(draw(st.lists(segments(), max_size=3))),
        reward=draw(st.floats(allow_nan=False, allow_infinity=False)),
        status=status,
        mask_reason="lost" if status == "masked" else "",
        metrics=draw(st.dictionaries(st.text(max_size=5), st.floats(allow_nan=False), max_size=3)),
    )


def test_a_trajectory_comes_back_bit_for_bit(journal: Journal) -> None:
    position = iter(range(10_000))

    @given(trajectory=trajectories())
    @settings(max_examples=60, deadline=None)
    def check(trajectory: Trajectory) -> None:
        name = admit(journal, next(position))
        renamed = Trajectory(
            episode_id=f"e-{name}",
            group_id=name,
            task_id=f"task{name[1:]}",
            segments=trajectory.segments,
            reward=trajectory.reward,
            status=trajectory.status,
            mask_reason=trajectory.mask_reason,
            metrics=trajectory.metrics,
        )
        journal.finish_episode(renamed, 0)
        (read,) = journal.group(name)
        assert_same_episode(read, renamed)

    check()


def test_an_image_is_stored_once_however_often_it_is_seen(journal: Journal) -> None:
    screen = b"png" * 1000
    for position in range(2):
        name = admit(journal, position)
        seen = Segment(
            token_ids=np.array([1], np.int32),
            action_mask=np.array([False]),
            behaviour_logprobs=np.array([np.nan], np.float32),
            policy_version=np.array([-1], np.int32),
            images=(screen, b"other", screen),
        )
        journal.finish_episode(
            Trajectory(episode_id=name, group_id=name, task_id=f"task{position}", segments=(seen,), reward=0),
            0,
        )
        assert journal.group(name).trajectories[0].segments[0].images == seen.images
    database = sqlite3.connect(journal.path)
    assert database.execute("SELECT count(*) FROM images").fetchone() == (2,)
    database.close()


FIRST_BYTE_ZERO = "CAST(x'00' || substr(columns, 2) AS BLOB)"


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (
            "UPDATE segments SET columns = CAST(x'00' || substr(columns, 2) AS BLOB)",
            "episode g0-0, segment 0: checksum",
        ),
        ("UPDATE segments SET columns = substr(columns, 1, 20)", "episode g0-0, segment 0: checksum"),
        ("UPDATE segments SET length = 2", "episode g0-0, segment 0: checksum"),
        ("UPDATE segments SET contract = 'other'", "episode g0-0, segment 0: checksum"),
        ("DELETE FROM segments", "episode g0-0 has 0 segments of 1"),
    ],
)
def test_damage_is_an_error_that_names_the_place(journal: Journal, damage: str, said: str) -> None:
    name = finished_group(journal, 0)
    database = sqlite3.connect(journal.path)
    with database:
        database.execute(damage)
    database.close()
    with pytest.raises(CorruptJournal, match=said):
        journal.group(name)


# The life of a group


def test_a_run_is_recorded_from_admission_to_its_update(journal: Journal) -> None:
    names = [finished_group(journal, position, size=2) for position in range(3)]
    journal.consume(0, [names[2], names[0]])
    assert journal.consumed(0) == [names[2], names[0]]
    assert journal.last_update() is None
    complete(journal, 0, checkpoint="ckpt/1")
    record = journal.last_update()
    assert record is not None
    assert (record.update, record.version, record.group_ids) == (0, 1, (names[2], names[0]))
    assert (record.weights_checksum, record.metrics) == ("sum0", {"loss": 0.1})
    assert journal.resume().checkpoint == "ckpt/1"
    assert journal.updates() == [record]
    assert [t.episode_id for t in journal.group(names[1])] == ["g1-0", "g1-1"]
    assert journal.next_position() == 3


def test_it_knows_the_newest_checkpoint_and_each_updates_oldest_version(journal: Journal) -> None:
    assert (journal.checkpoint(), journal.oldest_versions()) == (None, {})
    for position, version in enumerate((0, 3, 2)):
        finished_group(journal, position, version=version)
    journal.consume(0, ["g0"])
    complete(journal, 0, checkpoint="ckpt/1")
    journal.consume(1, ["g1", "g2"])
    assert journal.oldest_versions() == {0: 0}  # the other one is not durable yet
    complete(journal, 1, checkpoint="ckpt/2")
    assert (journal.checkpoint(), journal.oldest_versions()) == ((2, "ckpt/2"), {0: 0, 1: 2})


def test_a_group_can_be_read_only_when_all_its_episodes_are_finished(journal: Journal) -> None:
    name = admit(journal, 0, size=2)
    journal.finish_episode(episode(name, 1), 1)
    assert list(journal.episodes(name)) == [1]
    with pytest.raises(ValueError, match="g0 has 1 finished episodes of 2"):
        journal.group(name)
    with pytest.raises(KeyError, match="no group g9"):
        journal.episodes("g9")


def test_nothing_is_recorded_twice_or_out_of_order(journal: Journal) -> None:
    name = finished_group(journal, 0)
    running = admit(journal, 1, size=2)
    refused: dict[str, Callable[[], object]] = {
        "position 3, the next is 2": lambda: admit(journal, 3),
        "g0-0 is recorded already": lambda: journal.finish_episode(episode(name), 0),
        "g9 was never admitted": lambda: journal.finish_episode(episode("g9"), 0),
        "index 2, its group 2 episodes": lambda: journal.finish_episode(episode(running, 2), 2),
        "consume update 1: the next one is 0": lambda: journal.consume(1, [name]),
        "g1 has 0 finished episodes of 2": lambda: journal.consume(0, [running]),
        "would train on no group": lambda: journal.consume(0, []),
        "update 0 has no batch": lambda: complete(journal, 0),
    }
    for said, call in refused.items():
        with pytest.raises(ValueError, match=said):
            call()
    journal.consume(0, [name])
    with pytest.raises(ValueError, match="update 0 has its batch already"):
        journal.consume(0, [name])
    with pytest.raises(ValueError, match="update 0 makes version 1, not 2"):
        journal.complete(0, version=2, weights_checksum="", metrics={})
    complete(journal, 0)
    with pytest.raises(ValueError, match="g0 was consumed by update 0"):
        journal.consume(1, [name])


def test_a_refused_record_leaves_the_others_of_its_transaction(journal: Journal) -> None:
    name = admit(journal, 0, size=50)

    async def finish_all() -> list[BaseException | None]:
        calls = [journal.afinish_episode(episode(name, i), i) for i in [*range(50), 7]]
        return await asyncio.gather(*calls, return_exceptions=True)

    outcomes = asyncio.run(finish_all())
    assert [type(outcome) for outcome in outcomes if outcome is not None] == [ValueError]
    assert len(journal.group(name)) == 50


def test_the_event_loop_goes_on_while_a_record_waits_for_the_disk(journal: Journal) -> None:
    async def count_while_admitting() -> int:
        beats = 0

        async def beat() -> None:
            nonlocal beats
            while True:
                beats += 1
                await asyncio.sleep(0)

        heart = asyncio.create_task(beat())
        for position in range(5):
            await journal.aadmit(
                GroupRecord(
                    group_id=f"g{position}", task_id="t", position=position, size=1, admitted_version=0
                )
            )
        heart.cancel()
        return beats

    assert asyncio.run(count_while_admitting()) > 10


def test_events_are_kept_in_order_and_found_by_kind(journal: Journal) -> None:
    journal.record_event("engine", {"name": "a", "lost": True})
    journal.record_event("audit", {"tokens": 3})
    admit(journal, 0)
    assert [event.kind for event in journal.events()] == ["engine", "audit"]
    assert journal.events("audit")[0].payload == {"tokens": 3}


# Resume


def test_resume_tells_what_is_running_ready_in_training_and_to_be_replayed(journal: Journal) -> None:
    for position in range(4):
        finished_group(journal, position)
    for update in range(3):
        journal.consume(update, [f"g{update}"])
        complete(journal, update, checkpoint="ckpt" if update == 0 else None)
    journal.consume(3, ["g3"])
    ready = finished_group(journal, 4, version=2)
    running = admit(journal, 5, size=3)
    journal.finish_episode(episode(running, 2, version=1), 2)
    journal.finish_episode(episode(running, 0, version=0, masked=True), 0)
    left = admit(journal, 6)
    journal.finish_episode(episode(left, masked=True), 0)

    point = journal.resume()
    assert (point.update, point.next_position, point.checkpoint) == (3, 7, "ckpt")
    assert point.in_training == ("g3",)
    assert [(r.update, r.group_ids, r.weights_checksum) for r in point.replay] == [
        (1, ("g1",), "sum1"),
        (2, ("g2",), "sum2"),
    ]
    assert [(g.record.group_id, g.finished, g.oldest_version) for g in point.untrained] == [
        ("g3", frozenset({0}), 0),
        (ready, frozenset({0}), 2),
        (running, frozenset({0, 2}), 1),
    ]
    assert [(record.group_id, done) for record, done in journal.unfinished()] == [
        (running, frozenset({0, 2}))
    ]


def test_a_checkpoint_of_a_version_that_no_durable_update_made_is_refused(journal: Journal) -> None:
    with pytest.raises(ValueError, match="version 1, which no durable update"):
        journal.record_checkpoint(1, "ckpt/1")
    assert journal.resume().checkpoint is None


def test_a_new_run_resumes_from_nothing(journal: Journal) -> None:
    point = journal.resume()
    assert (point.update, point.next_position, point.checkpoint) == (0, 0, None)
    assert (point.untrained, point.in_training, point.replay) == ((), (), ())


class JournalRecords(Records):
    """The simulated run's records, kept and restored by the real journal."""

    def __init__(self, group_size: int, journal: Journal) -> None:
        super().__init__(group_size)
        self.journal = journal

    def admit(self, ticket: Ticket) -> None:
        super().admit(ticket)
        self.journal.admit(
            GroupRecord(
                group_id=ticket.group_id,
                task_id="t",
                position=ticket.position,
                size=self.group_size,
                admitted_version=ticket.version,
                planned_update=ticket.planned_update,
            )
        )

    def finish_episode(self, name: str, index: int, episode: Episode) -> None:
        super().finish_episode(name, index, episode)
        count = len(episode.tokens)
        turns = Segment(
            token_ids=np.arange(count, dtype=np.int32),
            action_mask=np.ones(count, bool),
            behaviour_logprobs=np.zeros(count, np.float32),
            policy_version=np.array(episode.tokens, np.int32),
        )
        reason = "lost" if episode.masked else ""
        self.journal.finish_episode(
            Trajectory(
                episode_id=f"{name}-{index}",
                group_id=name,
                task_id="t",
                segments=(turns,),
                reward=0,
                status="masked" if reason else "ok",
                mask_reason=reason,
            ),
            index,
        )

    def consume(self, update: int, batch: list[str]) -> None:
        super().consume(update, batch)
        self.journal.consume(update, batch)

    def complete(self, update: int) -> None:
        super().complete(update)
        complete(self.journal, update)

    def restore(self, scheduler: Scheduler) -> None:
        restore(scheduler, self.journal.resume())

    def unfinished(self) -> list[str]:
        return [record.group_id for record, _ in self.journal.unfinished()]


@pytest.mark.parametrize("schedule", ["bounded", "constant"])
def test_a_killed_run_goes_on_from_its_journal_within_the_bound(journal: Journal, schedule: Any) -> None:
    world = World(seed=11, max_lag=2, schedule=schedule, total_updates=20, masked_share=0.2, kills=8)
    run = Run(world, records=JournalRecords(world.group_size, journal)).finish()
    assert run.lives > 4
    assert [list(record.group_ids) for record in journal.updates()] == list(run.records.batches.values())
    expected = Run(world).finish()
    assert run.records.batches == expected.records.batches


# Processes


WRITER = Path(__file__).with_name("journal_writing.py")


def test_what_was_acknowledged_survives_kill_9_and_nothing_is_there_twice(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"
    random = np.random.default_rng(0)
    facts: list[list[Any]] = []
    for _ in range(6):
        command = [sys.executable, str(WRITER), str(path)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as writer:
            assert writer.stdout is not None
            first = writer.stdout.readline()
            time.sleep(random.uniform(0, 0.2))
            writer.kill()
            rest = writer.stdout.read()
        facts += [
            json.loads(line) for line in (first + rest).splitlines(keepends=True) if line.endswith("\n")
        ]

    with Journal.open(path, run=RUN) as journal:
        for name, index in [(name, index) for kind, name, index in facts if kind == "finished"]:
            assert_same_episode(journal.episodes(name)[index], episode(name, index, version=index))
        for update, batch in [(update, batch) for kind, update, batch in facts if kind == "consumed"]:
            assert journal.consumed(update) == batch
        completed = [update for kind, update, _ in facts if kind == "completed"]
        assert len(journal.updates()) > max(completed)
        trained = [name for record in journal.updates() for name in record.group_ids]
        assert len(trained) == len(set(trained))
        assert [group.position for group in journal.groups()] == list(range(journal.next_position()))
    assert len(facts) == len(set(map(str, facts)))
    database = sqlite3.connect(path)
    assert database.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    database.close()


def test_one_process_writes_and_any_number_read_beside_it(journal: Journal) -> None:
    with pytest.raises(ConfigError, match=r"lock = 'held' by another process that writes this run"):
        Journal.open(journal.path, run=RUN)
    with Journal.open(journal.path, run=None) as reader:
        finished_group(journal, 0)
        assert len(reader.group("g0")) == 1
        assert reader.run() == RUN
        with pytest.raises(ValueError, match="open for reading only"):
            admit(reader, 1)


def test_each_process_of_a_run_is_recorded_as_one_of_its_lives(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"
    for seed in (1, 2):
        Journal.open(path, run={"seed": seed}).close()
    with Journal.open(path, run=None) as reader:
        assert reader.lives() == [{"seed": 1}, {"seed": 2}]
        assert reader.run() == {"seed": 1}


def test_another_schema_another_file_and_no_file_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"
    with pytest.raises(ConfigError, match="No journal is there"):
        Journal.open(path, run=None)
    Journal.open(path, run=RUN).close()
    database = sqlite3.connect(path)
    database.execute("PRAGMA user_version = 99")
    database.close()
    for run in (RUN, None):
        with pytest.raises(ConfigError, match="schema = 99 is not the schema 1"):
            Journal.open(path, run=run)
    path.write_text("recipe = 'not a journal, but long enough to be read as a header of a file' " * 9)
    for run in (RUN, None):
        with pytest.raises(ConfigError, match="file is not a database"):
            Journal.open(path, run=run)


def test_a_closed_journal_takes_no_more_records(journal: Journal) -> None:
    journal.close()
    with pytest.raises(ValueError, match="the journal is closed"):
        admit(journal, 0)
