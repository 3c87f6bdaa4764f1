"""The journal's SQLite file: its tables, its schema version, its lock.

Waits: `hold_lock` for nobody; a second writer is refused at once. The lock is the kernel's and goes with the
process, however that ends.
"""

from __future__ import annotations

import fcntl
import sqlite3
from pathlib import Path
from typing import Literal, TextIO

from .errors import ConfigError

SCHEMA_VERSION = 1
SCHEMA = """
CREATE TABLE lives    (life INTEGER PRIMARY KEY, started REAL NOT NULL, run TEXT NOT NULL);
CREATE TABLE groups   (position INTEGER PRIMARY KEY, group_id TEXT NOT NULL UNIQUE, task_id TEXT NOT NULL,
                       size INTEGER NOT NULL, admitted_version INTEGER NOT NULL, planned_update INTEGER);
CREATE TABLE episodes (episode INTEGER PRIMARY KEY, group_id TEXT NOT NULL REFERENCES groups(group_id),
                       "index" INTEGER NOT NULL, episode_id TEXT NOT NULL UNIQUE, status TEXT NOT NULL,
                       mask_reason TEXT NOT NULL, reward NOT NULL, metrics TEXT NOT NULL,
                       oldest_version INTEGER, segments INTEGER NOT NULL, UNIQUE (group_id, "index"));
CREATE TABLE segments (episode INTEGER NOT NULL REFERENCES episodes(episode), place INTEGER NOT NULL,
                       length INTEGER NOT NULL, columns BLOB NOT NULL, sampling TEXT NOT NULL,
                       contract TEXT NOT NULL, images BLOB NOT NULL, checksum BLOB NOT NULL,
                       PRIMARY KEY (episode, place));
CREATE TABLE images   (digest BLOB PRIMARY KEY, png BLOB NOT NULL);
CREATE TABLE batches  ("update" INTEGER NOT NULL, place INTEGER NOT NULL,
                       group_id TEXT NOT NULL UNIQUE REFERENCES groups(group_id),
                       PRIMARY KEY ("update", place));
CREATE TABLE updates  ("update" INTEGER PRIMARY KEY, version INTEGER NOT NULL UNIQUE,
                       weights_checksum TEXT NOT NULL, metrics TEXT NOT NULL);
CREATE TABLE checkpoints (version INTEGER PRIMARY KEY, path TEXT NOT NULL);
CREATE TABLE events   (event INTEGER PRIMARY KEY, time REAL NOT NULL, kind TEXT NOT NULL,
                       payload TEXT NOT NULL);
"""

GIVE_A_PATH = "Give the path of a run's journal.sqlite."


def connect(path: Path, mode: Literal["ro", "rw", "rwc"]) -> sqlite3.Connection:
    """A connection without implicit transactions, usable from any thread (one at a time)."""
    uri = f"{path.resolve().as_uri()}?mode={mode}"
    try:
        db = sqlite3.connect(uri, uri=True, isolation_level=None, check_same_thread=False, timeout=60)
        db.execute("PRAGMA synchronous = FULL")  # reads the file's header
    except sqlite3.DatabaseError as error:
        raise _refusal(path, "path", str(path), GIVE_A_PATH, f"cannot be opened: {error}.") from error
    db.execute("PRAGMA foreign_keys = ON")
    db.row_factory = sqlite3.Row
    return db


def create(path: Path) -> None:
    """Make the tables where there are none; refuse another schema. A kill leaves all tables or none."""
    db = connect(path, "rwc")
    try:
        db.execute("PRAGMA journal_mode = WAL")
        if db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0] == 0:
            db.executescript(f"BEGIN; {SCHEMA} PRAGMA user_version = {SCHEMA_VERSION}; COMMIT;")
        check_schema(path, db)
    finally:
        db.close()


def open_to_read(path: Path) -> sqlite3.Connection:
    if not path.exists():
        raise _refusal(path, "path", str(path), f"No journal is there. {GIVE_A_PATH}")
    db = connect(path, "ro")
    try:
        check_schema(path, db)
    except BaseException:
        db.close()
        raise
    return db


def check_schema(path: Path, db: sqlite3.Connection) -> None:
    (found,) = db.execute("PRAGMA user_version").fetchone()
    if found != SCHEMA_VERSION:
        why = f"is not the schema {SCHEMA_VERSION} that this version of rz-agent reads and writes."
        raise _refusal(path, "schema", found, "Use the version that began the run, or begin a new run.", why)


def hold_lock(path: Path) -> TextIO:
    """The writer's lock, held while the returned file is open."""
    lock_file = Path(f"{path}.lock").open("w")  # noqa: SIM115
    try:
        fcntl.flock(lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock_file.close()
        remedy = "Stop that process or choose another run name; run=None reads beside it."
        raise _refusal(path, "lock", "held", remedy, "by another process that writes this run.") from None
    return lock_file


def _refusal(path: Path, key: str, value: object, remedy: str, why: str = "") -> ConfigError:
    return ConfigError(source=str(path), key=key, value=value, remedy=remedy, why=why)
