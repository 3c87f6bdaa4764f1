"""What keeps programs apart where nobody may make namespaces: inside a container, as its root.

    Ground        uids: one that commands share, with the container's files; one more for each session
    OutOfMemory   the kernel's own count of processes that it killed for memory here
    guard         the first process of a program: starts it, and leaves nothing of it

Invariants: a program is never root and shares its uid with no other container of the machine (the kernel
counts processes by uid). When a guard has ended, so has everything that its program ever started: orphans
come to the guard, whatever session or group they made for themselves.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

from . import confine, files
from .family import Family

SESSIONS = "/sessions"  # a folder for each session, closed to all others
_BLOCK = 2048  # uids of programs, and as many of their guards
_MEMORY = ("/sys/fs/cgroup/memory/memory.oom_control", "/sys/fs/cgroup/memory.events")
STOPS = (signal.SIGINT, signal.SIGTERM)


class Ground:
    """The uids of one container, and the files that its commands share.

    owned   folders of the image, copied for this container: given to the commands with all that is in them
    """

    def __init__(self, writable: Sequence[str], owned: Sequence[str] = ()) -> None:
        blocks = confine.mapped_uids() // (2 * _BLOCK)
        # not by `random`, which would seed itself anew in every process that the spawner forks
        drawn = int.from_bytes(os.urandom(8), "big") % (blocks - blocks // 2)
        self.uid = 2 * _BLOCK * (blocks // 2 + drawn)
        self._sessions: dict[str, int] = {}
        self._given = 0
        # an image's folder gives its mode to what is mounted over it
        for folder, mode in ((writable[0], 0o755), (SESSIONS, 0o711), ("/tmp", 0o1777), ("/dev/shm", 0o1777)):
            os.chmod(folder, mode)
        os.chown(writable[0], self.uid, self.uid)
        for folder in owned:
            self._give(folder)

    def _give(self, folder: str) -> None:
        """Change whose it is; links are not followed."""
        os.chown(folder, self.uid, self.uid)
        for _, folders, others, here in os.fwalk(folder):
            for name in (*folders, *others):
                os.chown(name, self.uid, self.uid, dir_fd=here, follow_symlinks=False)

    def uid_for(self, session: str | None, living: Sequence[str]) -> int:
        """Of commands, or of a session: one that no other has, and that was not another's shortly before."""
        if session is None:
            return self.uid
        self._sessions = {name: uid for name, uid in self._sessions.items() if name in living}
        if session not in self._sessions:
            self._sessions[session] = self._unused_uid()
        return self._sessions[session]

    def _unused_uid(self) -> int:
        for _ in range(1, _BLOCK):
            self._given = self._given % (_BLOCK - 1) + 1
            uid = self.uid + self._given
            if uid not in self._sessions.values() and not os.path.exists(f"{SESSIONS}/{uid}"):
                return uid
        raise OSError(f"all of the {_BLOCK - 1} uids for sessions are in use: end sessions, or the sandbox")

    def guard_uid(self, key: int) -> int:
        """One for the guard of a program."""
        return self.uid + _BLOCK + key % _BLOCK

    def use_files_like_programs(self) -> None:
        """This process reads and writes files as a command would, not as root."""
        confine.use_files_as(self.uid)

    @contextlib.contextmanager
    def all_files(self) -> Iterator[None]:
        """Meanwhile as root, of whom nothing is hidden; only while no program runs."""
        confine.use_files_as(0)
        try:
            yield
        finally:
            self.use_files_like_programs()


class OutOfMemory:
    """Whether the kernel has killed for memory since a program's call began."""

    def __init__(self) -> None:
        self._path = next((path for path in _MEMORY if os.path.exists(path)), None)
        self._seen: dict[int, int] = {}

    def _kills(self) -> int:
        if self._path is None:
            return 0
        with open(self._path) as lines:
            return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)

    def begin(self, key: int) -> None:
        """A call begins."""
        self._seen[key] = self._kills()

    def end(self, key: int) -> bool:
        """The call ends: whether there was one meanwhile."""
        return self._kills() > self._seen.pop(key, 0)


def guard(job: dict[str, Any], report: Callable[[], int], start: Callable[[], NoReturn]) -> NoReturn:
    """The life of one program. `start` becomes it; `report` closes all but the descriptor for its end.

    SIGINT: end what the program started, then interrupt it. SIGTERM: end all of it.
    The two are blocked when this is called.
    """
    confine.prctl(confine.PR_SET_CHILD_SUBREAPER, 1)
    os.setsid()
    if job["private"]:
        job["cwd"] = job["env"]["HOME"] = _private_folder(job["uid"])
    program = os.fork()
    if program == 0:
        for number in STOPS:
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPS)
        start()
    family = Family(job["uid"], alone=job["private"], own_uid=job["guard_uid"])

    def leave(status: int) -> NoReturn:
        family.end()
        if job["private"]:
            _forget_files(job["uid"])
        os.write(out, b"exit %d\n" % status)
        os._exit(0)

    out = report()
    signal.signal(signal.SIGINT, lambda *_: family.interrupt(program))
    signal.signal(signal.SIGTERM, lambda *_: leave(signal.SIGKILL))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPS)
    while True:
        pid, status = os.wait()
        if pid == program:
            leave(status)


def _private_folder(uid: int) -> str:
    folder = f"{SESSIONS}/{uid}"
    os.mkdir(folder, 0o700)
    os.chown(folder, uid, uid)
    return folder


def _forget_files(uid: int) -> None:
    """Remove a session's folder, and what it has made in those that all may write to.

    What it has put into a folder of somebody else is left to that one.
    """
    for top in (SESSIONS, "/tmp", "/dev/shm"):
        with os.scandir(top) as entries:
            for entry in list(entries):
                with contextlib.suppress(OSError):  # others may remove theirs meanwhile
                    if entry.stat(follow_symlinks=False).st_uid == uid:
                        _remove(entry)


def _remove(entry: os.DirEntry[str]) -> None:
    if entry.is_dir(follow_symlinks=False):
        files.empty(entry.path, 0o700)
        os.rmdir(entry.path)
    else:
        os.unlink(entry.path)
