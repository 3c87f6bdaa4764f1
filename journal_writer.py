"""The one thread that writes the journal: many callers, one transaction, one sync to disk.

    submit(job) -> Future                             the job runs inside the next transaction; the future
                                                      resolves once that is on disk
    admission, ending, consumption, completion        the jobs: each checks the record before it writes

Group commit: whatever was submitted while the last transaction went to disk forms the next one, in the
order of submission. A job that fails is undone alone (savepoint) and raises in its caller; the others stand.
Waits: a caller, for its own future only; the thread, for the disk. No one else waits for the disk, so an
event loop that awaits its futures is never blocked by it.
"""

from __future__ import annotations

import json
import queue
import sqlite3
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import astuple
from typing import Any

from .journal_columns import encode, image_digest
from .journal_records import GroupRecord
from .trajectory import Trajectory

Job = Callable[[sqlite3.Connection], Any]

MAX_JOBS = 1024  # a transaction's upper size: bounds how long its first caller waits for the last one's job


class JournalWriter:
    """Owns the writing connection. One writer a journal; `submit` may be called from any thread."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._jobs: queue.SimpleQueue[tuple[Job, Future[Any]] | None] = queue.SimpleQueue()
        self._closing = threading.Lock()
        self._closed = False
        # A daemon: a process that dies without close() loses only what it was never told is durable.
        self._thread = threading.Thread(target=self._run, args=(connection,), name="journal", daemon=True)
        self._thread.start()

    def submit(self, job: Job) -> Future[Any]:
        future: Future[Any] = Future()
        with self._closing:
            if self._closed:
                raise ValueError("the journal is closed")
            self._jobs.put((job, future))
        return future

    def close(self) -> None:
        """Write what was submitted, then end the thread."""
        with self._closing:
            if not self._closed:
                self._closed = True
                self._jobs.put(None)
        self._thread.join()

    def _run(self, connection: sqlite3.Connection) -> None:
        open_ = True
        while open_:
            batch = [self._jobs.get()]
            while len(batch) < MAX_JOBS and not self._jobs.empty():
                batch.append(self._jobs.get())
            open_ = None not in batch
            self._commit(connection, [entry for entry in batch if entry is not None])
        connection.close()

    def _commit(self, connection: sqlite3.Connection, batch: list[tuple[Job, Future[Any]]]) -> None:
        live = [(job, future) for job, future in batch if future.set_running_or_notify_cancel()]
        if not live:
            return
        try:
            connection.execute("BEGIN IMMEDIATE")
            outcomes = [_attempt(connection, job) for job, _ in live]
            connection.execute("COMMIT")
        except BaseException as failure:
            # The disk is full or broken: nothing of this transaction is durable, and every caller must know.
            if connection.in_transaction:
                connection.execute("ROLLBACK")
            for _, future in live:
                future.set_exception(failure)
            return
        for (_, future), (result, error) in zip(live, outcomes, strict=True):
            if error is None:
                future.set_result(result)
            else:
                future.set_exception(error)


def _attempt(connection: sqlite3.Connection, job: Job) -> tuple[Any, Exception | None]:
    connection.execute("SAVEPOINT job")
    try:
        outcome: tuple[Any, Exception | None] = (job(connection), None)
    except sqlite3.OperationalError:
        raise
    except Exception as error:
        connection.execute("ROLLBACK TO job")
        outcome = (None, error)
    connection.execute("RELEASE job")
    return outcome


def admission(record: GroupRecord) -> Job:
    def job(db: sqlite3.Connection) -> None:
        (expected,) = db.execute("SELECT coalesce(max(position) + 1, 0) FROM groups").fetchone()
        if record.position != expected:
            place = f"position {record.position}, the next is {expected}"
            raise ValueError(f"group {record.group_id} has {place}: positions have no gap")
        db.execute(
            "INSERT INTO groups (group_id, task_id, position, size, admitted_version, planned_update) "
            "VALUES (?, ?, ?, ?, ?, ?)",
            astuple(record),
        )

    return job


def ending(trajectory: Trajectory, index: int) -> Job:
    """The record of a finished episode; encoded here, in the caller's thread."""
    rows = [
        (place, row.length, row.columns, row.sampling, row.contract, row.images, row.checksum)
        for place, row in enumerate(map(encode, trajectory.segments))
    ]
    images = {image_digest(png): png for segment in trajectory.segments for png in segment.images}
    reward, metrics = float(trajectory.reward), _json_of(trajectory.metrics)
    name, group_id, oldest = trajectory.episode_id, trajectory.group_id, trajectory.oldest_version
    outcome = (trajectory.status, trajectory.mask_reason, reward, metrics, oldest, len(rows))

    def job(db: sqlite3.Connection) -> None:
        group = db.execute("SELECT task_id, size FROM groups WHERE group_id = ?", (group_id,)).fetchone()
        if group is None or group["task_id"] != trajectory.task_id:
            found = "was never admitted" if group is None else f"is of task {group['task_id']}"
            raise ValueError(f"episode {name}, task {trajectory.task_id}: its group {group_id} {found}")
        if not 0 <= index < group["size"]:
            raise ValueError(f"episode {name} has index {index}, its group {group['size']} episodes")
        query = 'SELECT episode_id FROM episodes WHERE episode_id = ? OR (group_id = ? AND "index" = ?)'
        if (twin := db.execute(query, (name, group_id, index)).fetchone()) is not None:
            raise ValueError(f"episode {name}, index {index} of {group_id}: {twin[0]} is recorded already")
        cursor = db.execute(
            'INSERT INTO episodes (group_id, "index", episode_id, status, mask_reason, reward, metrics, '
            "oldest_version, segments) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (group_id, index, name, *outcome),
        )
        db.executemany("INSERT OR IGNORE INTO images (digest, png) VALUES (?, ?)", images.items())
        db.executemany(
            "INSERT INTO segments (episode, place, length, columns, sampling, contract, images, checksum) "
            "VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
            [(cursor.lastrowid, *row) for row in rows],
        )

    return job


def consumption(update: int, group_ids: tuple[str, ...]) -> Job:
    def job(db: sqlite3.Connection) -> None:
        _check_next(db, update, "consume")
        if db.execute('SELECT 1 FROM batches WHERE "update" = ?', (update,)).fetchone():
            raise ValueError(f"update {update} has its batch already; train that one")
        if not group_ids:
            raise ValueError(f"update {update} would train on no group")
        for group_id in group_ids:
            _check_consumable(db, group_id)
        db.executemany(
            'INSERT INTO batches ("update", place, group_id) VALUES (?, ?, ?)',
            [(update, place, group_id) for place, group_id in enumerate(group_ids)],
        )

    return job


def completion(update: int, version: int, weights_checksum: str, metrics: Mapping[str, Any]) -> Job:
    row = (update, version, weights_checksum, json.dumps(dict(metrics), default=float))

    def job(db: sqlite3.Connection) -> None:
        _check_next(db, update, "complete")
        if version != update + 1:
            raise ValueError(f"update {update} makes version {update + 1}, not {version}")
        if not db.execute('SELECT 1 FROM batches WHERE "update" = ?', (update,)).fetchone():
            raise ValueError(f"update {update} has no batch: consume it before its step")
        db.execute("INSERT INTO updates VALUES (?, ?, ?, ?)", row)

    return job


def saving(version: int, path: str) -> Job:
    def job(db: sqlite3.Connection) -> None:
        if not db.execute("SELECT 1 FROM updates WHERE version = ?", (version,)).fetchone():
            raise ValueError(f"a checkpoint of version {version}, which no durable update has made")
        db.execute("INSERT OR IGNORE INTO checkpoints VALUES (?, ?)", (version, path))

    return job


def _check_next(db: sqlite3.Connection, update: int, verb: str) -> None:
    (expected,) = db.execute('SELECT coalesce(max("update") + 1, 0) FROM updates').fetchone()
    if update != expected:
        raise ValueError(f"cannot {verb} update {update}: the next one is {expected}")


def _check_consumable(db: sqlite3.Connection, group_id: str) -> None:
    row = db.execute(
        """SELECT size, (SELECT count(*) FROM episodes WHERE group_id = g.group_id) AS finished,
                  (SELECT "update" FROM batches WHERE group_id = g.group_id) AS trained
           FROM groups AS g WHERE group_id = ?""",
        (group_id,),
    ).fetchone()
    if row is None:
        raise ValueError(f"group {group_id} was never admitted")
    if row["trained"] is not None:
        raise ValueError(f"group {group_id} was consumed by update {row['trained']}: trained once is enough")
    if row["finished"] != row["size"]:
        raise ValueError(f"group {group_id} has {row['finished']} finished episodes of {row['size']}")


def _json_of(figures: Mapping[str, float]) -> str:
    return json.dumps({name: float(value) for name, value in figures.items()})
