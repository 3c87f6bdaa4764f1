"""A repository on this machine as something to send: the objects of some commits' history, as one pack.

    await Repositories().pack("/src/project", commits) -> bytes

Invariant: nothing else of the repository travels: no ref, no hook, no configuration, no later commit, no file
that is not committed. So what a policy must not see never comes to where it acts.
Waits: a caller for git, in a thread.
"""

from __future__ import annotations

import functools
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from ...errors import ConfigError
from ..hooks import in_thread

# Whose folder it is does not matter: a person named it.
GIT = ("git", "-c", "safe.directory=*")
_KEPT = 8  # packs: episodes of one group ask for the same one


class Repositories:
    """Packs of a run, the last few kept."""

    def __init__(self) -> None:
        self._packed = functools.lru_cache(maxsize=_KEPT)(packed)

    async def pack(self, path: str, commits: Sequence[str]) -> bytes:
        """All objects of these commits and their ancestors. ConfigError where one is not there."""
        return await in_thread(self._packed, path, tuple(commits))


def packed(path: str, commits: tuple[str, ...]) -> bytes:
    """See `Repositories.pack`; blocks."""
    if Path(path).is_file():  # a bundle
        with tempfile.TemporaryDirectory(prefix="rz-agent-bundle-") as folder:
            git(path, "clone", "--quiet", "--mirror", path, folder)
            return _pack(folder, commits)
    return _pack(path, commits)


def git(source: str, *arguments: str, folder: str | None = None, stdin: bytes = b"") -> bytes:
    """Run git here; ConfigError with its words where it fails."""
    place = () if folder is None else ("-C", folder)
    done = subprocess.run([*GIT, *place, *arguments], input=stdin, capture_output=True, check=False)
    if done.returncode:
        raise ConfigError(
            source=source,
            key=f"git {' '.join(arguments[:2])}",
            value=arguments[-1],
            why=f"failed: {done.stderr.decode(errors='replace').strip()[:300]}",
            remedy="Name a git checkout, or a bundle, that has this commit.",
        )
    return done.stdout


def _pack(folder: str, commits: Sequence[str]) -> bytes:
    for commit in commits:
        git(folder, "rev-parse", "--quiet", "--verify", f"{commit}^{{commit}}", folder=folder)
    wanted = "".join(f"{commit}\n" for commit in commits).encode()
    return git(folder, "pack-objects", "--revs", "--stdout", "--quiet", folder=folder, stdin=wanted)
