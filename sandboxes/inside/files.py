"""Reading and writing the sandbox's own files for the harness, whatever a program put in the way.

Invariant: only a regular file that really lies in a writable folder is ever read. The kernel's own name
of the opened file decides, and its file system: so no symbolic link, FIFO, device or race points elsewhere.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterator, Sequence

MAX_ENTRIES = 10_000  # of one listing; a program may make more than a frame can hold
_FOLDER = os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def _inside(fd: int, folders: Sequence[str]) -> bool:
    """By name, and by file system: /proc/PID/root leads to files of the same name in another namespace."""
    real, device = os.readlink(f"/proc/self/fd/{fd}"), os.fstat(fd).st_dev
    named = [folder for folder in folders if real == folder or real.startswith(folder + "/")]
    return any(os.stat(folder).st_dev == device for folder in named)


def read(path: str, limit: int, folders: Sequence[str]) -> bytes:
    """The bytes of a regular file of at most `limit` bytes. OSError otherwise."""
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    try:
        if not _inside(fd, folders):
            raise OSError(errno.EACCES, "not in a writable folder of the sandbox", path)
        facts = os.fstat(fd)
        if not stat.S_ISREG(facts.st_mode):
            raise OSError(errno.EINVAL, "not a regular file", path)
        if facts.st_size > limit:
            raise OSError(errno.EFBIG, f"{facts.st_size} bytes, more than {limit}", path)
        data = bytearray()
        while len(data) <= limit:
            more = os.read(fd, min(1 << 20, limit + 1 - len(data)))
            if not more:
                return bytes(data)
            data += more
        raise OSError(errno.EFBIG, f"more than {limit} bytes", path)
    finally:
        os.close(fd)


def list_folder(path: str, folders: Sequence[str]) -> list[tuple[str, str, int]]:
    """(name, kind, size) of what lies in it, by name; links are not followed. OSError otherwise."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        if not _inside(fd, folders):
            raise OSError(errno.EACCES, "not in a writable folder of the sandbox", path)
        found: list[tuple[str, str, int]] = []
        with os.scandir(fd) as entries:
            for entry in entries:
                if len(found) == MAX_ENTRIES:
                    raise OSError(errno.EFBIG, f"more than {MAX_ENTRIES} entries", path)
                with contextlib.suppress(FileNotFoundError):  # a program has removed it meanwhile
                    found.append(_described(entry))
        return sorted(found)
    finally:
        os.close(fd)


def _described(entry: os.DirEntry[str]) -> tuple[str, str, int]:
    if entry.is_symlink():
        return entry.name, "link", 0
    if entry.is_dir():
        return entry.name, "folder", 0
    if entry.is_file():
        return entry.name, "file", entry.stat(follow_symlinks=False).st_size
    return entry.name, "other", 0


def write(path: str, data: bytes, mode: int, folders: Sequence[str]) -> None:
    """Replace the file atomically, making its folders. OSError when it lies outside `folders`."""
    parent, name = os.path.split(path)
    os.makedirs(parent, exist_ok=True)
    folder = os.open(parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        if not _inside(folder, folders):
            raise OSError(errno.EACCES, "not in a writable folder of the sandbox", path)
        draft = f".{os.urandom(8).hex()}.draft"
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        fd = os.open(draft, flags, mode, dir_fd=folder)
        try:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise OSError(errno.EINVAL, "not a regular file", path)
            view = memoryview(data)
            while view:
                view = view[os.write(fd, view) :]
            os.fchmod(fd, mode)
            os.replace(draft, name, src_dir_fd=folder, dst_dir_fd=folder)
        except OSError:
            with contextlib.suppress(OSError):
                os.unlink(draft, dir_fd=folder)  # what had no room takes none
            raise
        finally:
            os.close(fd)
    finally:
        os.close(folder)


def empty(folder: str, mode: int) -> None:
    """Remove all that lies in it, however deep and however closed, and give it this mode. OSError otherwise.

    Each folder is moved up to the top before its turn comes: so no path is too long and few are open at once.
    What is mounted there stays.
    """
    mark, moved = os.urandom(16).hex(), 0
    with _opened(folder, mode) as top:
        device = os.fstat(top).st_dev
        names = _drop_files(top)
        left = [name for name in names if os.stat(name, dir_fd=top, follow_symlinks=False).st_dev == device]
        while left:
            name = left.pop()
            with _opened(name, 0o700, top) as inner:
                for child in _drop_files(inner):
                    moved += 1
                    left.append(f"{mark}-{moved}")
                    with _opened(
                        child, 0o700, inner
                    ):  # the kernel moves no folder that may not be written to
                        os.rename(child, left[-1], src_dir_fd=inner, dst_dir_fd=top)
            os.rmdir(name, dir_fd=top)


@contextlib.contextmanager
def _opened(name: str, mode: int, parent: int | None = None) -> Iterator[int]:
    """A folder, never a link to one, for reading; with this mode from now on."""
    handle = os.open(name, os.O_PATH | _FOLDER, dir_fd=parent)  # which its own mode cannot refuse
    try:
        path = f"/proc/self/fd/{handle}"
        if stat.S_IMODE(os.fstat(handle).st_mode) != mode:
            os.chmod(path, mode)
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    finally:
        os.close(handle)
    try:
        yield fd
    finally:
        os.close(fd)


def _drop_files(folder: int) -> list[str]:
    """Remove all that is no folder; the names of those that are."""
    folders = []
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                folders.append(entry.name)
            else:
                os.unlink(entry.name, dir_fd=folder)
    return folders
