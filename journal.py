"""The record of a run, and the truth behind its queue, resume, replay, audit and viewer.

    admit -> finish_episode (n times) -> consume -> complete         the life of a group
    resume()                                                         what a new process needs to go on

One SQLite file, append-only in spirit: no row of it is changed or deleted. What a call recorded is on disk
when the call returns, and survives kill -9 and power loss at any later moment.
Invariants, kept by the schema and checked in the jobs: positions are admitted 0, 1, 2, ... without a gap;
an episode is finished at most once; a group is consumed at most once, and only when all its episodes are
finished; updates are consumed and completed in order, the batch before its step, the update before its
version is published.

Waits: the caller of a write for one group commit (`journal_writer`), so asyncio code uses the twins
`aadmit` and `afinish_episode`; readers for nobody and nobody for readers (write-ahead log).
synchronous = FULL, not NORMAL: NORMAL may forget the last transactions when the machine loses power, and
then a version that engines and a checkpoint already know would have no record. Group commit pays for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sqlite3
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import fields
from pathlib import Path
from typing import Any, TextIO

from .journal_columns import CorruptJournal, SegmentRow, decode, image_digest
from .journal_file import connect, create, hold_lock, open_to_read
from .journal_records import Event, GroupProgress, GroupRecord, Resume, UpdateRecord
from .journal_writer import Job, JournalWriter, admission, completion, consumption, ending, saving
from .trajectory import Group, Segment, Trajectory

__all__ = ["CorruptJournal", "Event", "GroupProgress", "GroupRecord", "Journal", "Resume", "UpdateRecord"]


class Journal:
    """The record of one run. Writing needs the run's lock; reading works beside a writer."""

    def __init__(self, path: Path, reader: sqlite3.Connection, writer: JournalWriter | None) -> None:
        """Use `Journal.open`."""
        self.path = path
        self._reader = reader
        self._reading = threading.RLock()
        self._writer = writer
        self._lock_file: TextIO | None = None
        self._event_failure: BaseException | None = None

    @classmethod
    def open(cls, path: str | Path, *, run: Mapping[str, Any] | None) -> Journal:
        """Create or continue a journal as its only writer, or read one.

        run   recipe, seed, versions of this process, as JSON; recorded as one more life. None: read only
        Raises ConfigError if there is no such journal to read, if another process writes it, or if its
        schema is another version's.
        """
        path = Path(path)
        if run is None:
            return cls(path, open_to_read(path), None)
        path.parent.mkdir(parents=True, exist_ok=True)
        lock_file = hold_lock(path)
        try:
            create(path)
            journal = cls(path, connect(path, "ro"), JournalWriter(connect(path, "rw")))
        except BaseException:
            lock_file.close()
            raise
        journal._lock_file = lock_file
        text = json.dumps(run)
        journal._write(
            lambda db: db.execute("INSERT INTO lives (started, run) VALUES (?, ?)", (time.time(), text))
        )
        return journal

    def close(self) -> None:
        """Write what is pending, give back the lock; raise the failure of an event, if there was one."""
        with self._reading:
            self._reader.close()
        if self._writer is not None:
            self._writer.close()  # last, so that it can fold the write-ahead log into the file
        if self._lock_file is not None:
            self._lock_file.close()
        self._raise_event_failure()

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Writing: durable on return

    def admit(self, record: GroupRecord) -> None:
        """Record a group before any of its episodes starts. Positions must come in order, without a gap."""
        self._submit(admission(record)).result()

    async def aadmit(self, record: GroupRecord) -> None:
        """`admit` for asyncio: other coroutines run while this one waits for the disk."""
        await asyncio.wrap_future(self._submit(admission(record)))

    def finish_episode(self, trajectory: Trajectory, index: int) -> None:
        """Record a finished episode, masked ones too. `index` is its place in the group."""
        self._submit(ending(trajectory, index)).result()

    async def afinish_episode(self, trajectory: Trajectory, index: int) -> None:
        """`finish_episode` for asyncio. Cancelled before its transaction began, it records nothing."""
        await asyncio.wrap_future(self._submit(ending(trajectory, index)))

    def consume(self, update: int, group_ids: Sequence[str]) -> None:
        """Record the batch of an update, in order, before its step."""
        self._write(consumption(update, tuple(group_ids)))

    def complete(
        self,
        update: int,
        *,
        version: int,
        weights_checksum: str,
        metrics: Mapping[str, Any],
    ) -> None:
        """Record that an update is done; only then may `version` (= update + 1) be published."""
        self._write(completion(update, version, weights_checksum, metrics))

    def record_checkpoint(self, version: int, path: str) -> None:
        """Record that the learner's state at a version is saved whole at `path`; a resume begins there."""
        self._write(saving(version, path))

    def record_event(self, kind: str, payload: Mapping[str, Any]) -> None:
        """Record what happened to an engine, a sandbox or the audit.

        Returns at once: the next commit holds it. If it cannot be written, the next write or close() raises.
        """
        row = (time.time(), kind, json.dumps(dict(payload)))
        future = self._submit(
            lambda db: db.execute("INSERT INTO events (time, kind, payload) VALUES (?, ?, ?)", row)
        )
        future.add_done_callback(self._keep_event_failure)

    def _write(self, job: Job) -> None:
        self._submit(job).result()

    def _submit(self, job: Job) -> Future[Any]:
        self._raise_event_failure()
        if self._writer is None:
            raise ValueError(f"{self.path} is open for reading only: open it with run=")
        return self._writer.submit(job)

    def _keep_event_failure(self, future: Future[Any]) -> None:
        if not future.cancelled() and (failure := future.exception()) is not None:
            self._event_failure = failure

    def _raise_event_failure(self) -> None:
        if self._event_failure is not None:
            failure, self._event_failure = self._event_failure, None
            raise failure

    # Reading

    def run(self) -> dict[str, Any]:
        """What the first life said about the run."""
        return self.lives()[0]

    def lives(self) -> list[dict[str, Any]]:
        """What each process that wrote this journal said about the run, in order."""
        return [json.loads(text) for (text,) in self._rows("SELECT run FROM lives ORDER BY life")]

    def groups(self) -> list[GroupRecord]:
        """Every admitted group, by position."""
        return [GroupRecord(**row) for row in map(dict, self._rows("SELECT * FROM groups ORDER BY position"))]

    def episodes(self, group_id: str) -> dict[int, Trajectory]:
        """The finished episodes of a group by index. Raises CorruptJournal for a damaged record."""
        with self._snapshot():
            rows = self._rows('SELECT * FROM episodes WHERE group_id = ? ORDER BY "index"', group_id)
            tasks = self._rows("SELECT task_id FROM groups WHERE group_id = ?", group_id)
            if not tasks:
                raise KeyError(f"{self.path}: no group {group_id}")
            return {row["index"]: self._trajectory(row, tasks[0]["task_id"]) for row in rows}

    def group(self, group_id: str) -> Group:
        """A group whose episodes are all finished."""
        with self._snapshot():
            episodes = self.episodes(group_id)
            (row,) = self._rows("SELECT task_id, size FROM groups WHERE group_id = ?", group_id)
        if len(episodes) != row["size"]:
            raise ValueError(f"group {group_id} has {len(episodes)} finished episodes of {row['size']}")
        return Group(group_id=group_id, task_id=row["task_id"], trajectories=tuple(episodes.values()))

    def unfinished(self) -> list[tuple[GroupRecord, frozenset[int]]]:
        """Groups with episodes still to run, by position, with the indices of the finished ones."""
        return [(group.record, group.finished) for group in self._progress() if not group.complete]

    def consumed(self, update: int) -> list[str]:
        """Batch of an update in its order; empty where none is recorded."""
        rows = self._rows('SELECT group_id FROM batches WHERE "update" = ? ORDER BY place', update)
        return [row["group_id"] for row in rows]

    def updates(self) -> list[UpdateRecord]:
        """Durable updates in order."""
        with self._snapshot():
            rows = self._rows('SELECT * FROM updates ORDER BY "update"')
            return [self._update(row) for row in rows]

    def last_update(self) -> UpdateRecord | None:
        """The newest durable update; its version is the one to publish."""
        with self._snapshot():
            rows = self._rows('SELECT * FROM updates ORDER BY "update" DESC LIMIT 1')
            return self._update(rows[0]) if rows else None

    def oldest_versions(self) -> dict[int, int]:
        """Of each durable update that trained on tokens, the version of the oldest of them."""
        rows = self._rows(
            """SELECT "update", min(oldest_version) AS oldest FROM updates
               JOIN batches USING ("update") JOIN episodes USING (group_id)
               GROUP BY "update" HAVING oldest NOT NULL"""
        )
        return {row["update"]: row["oldest"] for row in rows}

    def checkpoint(self) -> tuple[int, str] | None:
        """Version and path of the newest checkpoint."""
        rows = self._rows("SELECT version, path FROM checkpoints ORDER BY version DESC LIMIT 1")
        return (rows[0]["version"], rows[0]["path"]) if rows else None

    def next_position(self) -> int:
        """First position that was never admitted."""
        (row,) = self._rows("SELECT coalesce(max(position) + 1, 0) AS next FROM groups")
        return int(row["next"])

    def events(self, kind: str | None = None) -> list[Event]:
        """Events in the order of their recording, all or of one kind."""
        rows = self._rows("SELECT * FROM events WHERE kind = coalesce(?, kind) ORDER BY event", kind)
        return [Event(time=row["time"], kind=row["kind"], payload=json.loads(row["payload"])) for row in rows]

    def resume(self) -> Resume:
        """Where the run stands."""
        with self._snapshot():
            updates = self.updates()
            version, path = self.checkpoint() or (0, None)
            return Resume(
                update=len(updates),
                next_position=self.next_position(),
                untrained=tuple(
                    g for g in self._progress() if not g.complete or g.oldest_version is not None
                ),
                in_training=tuple(self.consumed(len(updates))),
                checkpoint=path,
                replay=tuple(updates[version:]),
            )

    def _progress(self) -> list[GroupProgress]:
        """Groups that no durable update has trained, by position."""
        rows = self._rows(
            """SELECT groups.*, group_concat("index") AS finished,
                      min(CASE WHEN status != 'masked' THEN oldest_version END) AS oldest_version
               FROM groups LEFT JOIN episodes USING (group_id)
               WHERE group_id NOT IN (SELECT group_id FROM batches JOIN updates USING ("update"))
               GROUP BY position ORDER BY position"""
        )
        names = [field.name for field in fields(GroupRecord)]
        return [
            GroupProgress(
                record=GroupRecord(**{name: row[name] for name in names}),
                finished=frozenset(map(int, row["finished"].split(","))) if row["finished"] else frozenset(),
                oldest_version=row["oldest_version"],
            )
            for row in rows
        ]

    def _update(self, row: sqlite3.Row) -> UpdateRecord:
        return UpdateRecord(
            update=row["update"],
            group_ids=tuple(self.consumed(row["update"])),
            version=row["version"],
            weights_checksum=row["weights_checksum"],
            metrics=json.loads(row["metrics"]),
        )

    def _trajectory(self, row: sqlite3.Row, task_id: str) -> Trajectory:
        stored = self._rows("SELECT * FROM segments WHERE episode = ? ORDER BY place", row["episode"])
        if len(stored) != row["segments"]:
            raise CorruptJournal(
                f"{self.path}: episode {row['episode_id']} has {len(stored)} segments of {row['segments']}"
            )
        return Trajectory(
            episode_id=row["episode_id"],
            group_id=row["group_id"],
            task_id=task_id,
            segments=tuple(self._segment(segment, row["episode_id"]) for segment in stored),
            reward=row["reward"],
            status=row["status"],
            mask_reason=row["mask_reason"],
            metrics=json.loads(row["metrics"]),
        )

    def _segment(self, row: sqlite3.Row, episode_id: str) -> Segment:
        where = f"{self.path}: episode {episode_id}, segment {row['place']}"
        stored = SegmentRow(**{field.name: row[field.name] for field in fields(SegmentRow)})
        digests = [stored.images[i : i + 32] for i in range(0, len(stored.images), 32)]
        return decode(stored, [self._image(digest, where) for digest in digests], where)

    def _image(self, digest: bytes, where: str) -> bytes:
        rows = self._rows("SELECT png FROM images WHERE digest = ?", digest)
        if not rows or image_digest(rows[0]["png"]) != digest:
            raise CorruptJournal(f"{where}: image {digest.hex()} is {'damaged' if rows else 'missing'}")
        return bytes(rows[0]["png"])

    def _rows(self, query: str, *values: Any) -> list[sqlite3.Row]:
        with self._reading:
            return self._reader.execute(query, values).fetchall()

    @contextlib.contextmanager
    def _snapshot(self) -> Iterator[None]:
        """All reads inside see one state of the journal."""
        with self._reading:
            outermost = not self._reader.in_transaction
            if outermost:
                self._reader.execute("BEGIN")
            try:
                yield
            finally:
                if outermost:
                    self._reader.execute("COMMIT")
