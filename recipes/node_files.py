"""A folder of files on nodes that do not share a file system: named by its content, sent once to each node.

    folder_digest(folder)            sender: the name
    NodeFiles.find / receive / complete      node: is it here; take a file; check that it is whole

Invariant: a folder under its digest has exactly the content that gave the digest; it appears whole (files are
written aside and the folder is renamed) and never changes, so that processes of one node may share it.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ..errors import RzError

CHUNK = 1 << 24

Content = NDArray[np.uint8]


class DamagedFolder(RzError):
    """What arrived is not what was sent."""


def files_of(folder: Path) -> list[str]:
    """Names of all files below a folder, sorted."""
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def folder_digest(folder: Path) -> str:
    """blake2b over the names and contents of all files below: 32 hex digits. About a second for each GB."""
    digest = hashlib.blake2b(digest_size=16)
    for name in files_of(folder):
        path = folder / name
        digest.update(f"{name}\0{path.stat().st_size}\0".encode())
        with path.open("rb") as file:
            while chunk := file.read(CHUNK):
                digest.update(chunk)
    return digest.hexdigest()


def default_cache() -> Path:
    """Where a node keeps folders: below its temporary folder, readable by this user alone."""
    cache = Path(tempfile.gettempdir()) / f"rz-agent-{os.getuid()}"
    cache.mkdir(mode=0o700, exist_ok=True)
    if cache.stat().st_uid != os.getuid():
        raise DamagedFolder(f"{cache} belongs to another user: remove it, or set TMPDIR on this node")
    return cache


class NodeFiles:
    """The folders that a node holds, and the one that this process is receiving."""

    def __init__(self, cache: Path) -> None:
        self._cache = cache
        self._incoming: Path | None = None

    def find(self, digest: str) -> Path | None:
        """The folder of that content, if it is here."""
        folder = self._cache / digest
        return folder if folder.is_dir() else None

    def receive(self, name: str, content: Content) -> None:
        """Take one file of the folder that `complete` will name."""
        if self._incoming is None:
            self._incoming = Path(tempfile.mkdtemp(prefix="incoming-", dir=self._cache))
        path = self._incoming / name
        path.parent.mkdir(parents=True, exist_ok=True)
        content.tofile(path)

    def complete(self, digest: str) -> Path:
        """The received folder under its name. Raises DamagedFolder if the content gives another one."""
        incoming, self._incoming = self._incoming, None
        if incoming is None:
            raise DamagedFolder(f"folder {digest}: no file of it arrived")
        try:
            if (found := folder_digest(incoming)) != digest:
                raise DamagedFolder(f"folder {digest} arrived with the content of {found}: send it again")
            try:
                incoming.rename(self._cache / digest)
            except OSError:
                if self.find(digest) is None:  # else another process of this node was first
                    raise
        finally:
            shutil.rmtree(incoming, ignore_errors=True)
        return self._cache / digest
