"""Bounds on memory, processes and CPU that no program can step over, where the machine lends cgroups.

    <hierarchy>/<own group>/rz-agent/<owner>/<sandbox>/<program>

`owner` is `<pid>-<start time>-<provider>`, so that a later harness can tell what a dead one left behind.
The sandbox's uid may move its own processes into a program's group and change nothing else.
Versions 1 (one hierarchy a controller) and 2 (one for all, processes only in leaves).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
from collections.abc import Iterator
from pathlib import Path

from ..owner import start_time
from ..spec import Limits, Total
from .hierarchy import Hierarchy, put

AGENT_LEAF = "agent"


def owner_name() -> str:
    """A new name for what one provider of this process owns."""
    return f"{os.getpid()}-{start_time(os.getpid())}-{secrets.token_hex(4)}"


def is_orphan(name: str) -> bool:
    """Whether the process in an owner's name is no more (its pid may have a new bearer)."""
    pid, begun, _ = name.split("-")
    return start_time(int(pid)) != begun


def remove_tree(path: Path) -> bool:
    """Remove a group and those below it; True when it is gone."""
    try:
        with os.scandir(path) as entries:
            # The kind comes with the entry: a group holds some forty files.
            below = [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]
        for name in below:
            remove_tree(path / name)
        path.rmdir()
    except FileNotFoundError:
        return True
    except OSError:  # a process has not quite ended
        return False
    return True


def _removed(group: str) -> bool:
    """Remove a group with none below it; True when it is gone."""
    try:
        os.rmdir(group)
    except FileNotFoundError:
        return True
    except OSError:  # a process has not quite ended
        return False
    return True


def sweep(hierarchies: list[Hierarchy]) -> list[str]:
    """Remove the groups of harnesses that are no more; their names."""
    removed = set()
    for hierarchy in hierarchies:
        for folder in hierarchy.path.iterdir():
            if folder.is_dir() and is_orphan(folder.name) and remove_tree(folder):
                removed.add(folder.name)
    return sorted(removed)


class SandboxGroups:
    """The groups of one sandbox, one in each hierarchy."""

    def __init__(
        self, hierarchies: list[Hierarchy], owner: str, name: str, total: Total, uid: int | None
    ) -> None:
        self._uid = uid
        self._busy: set[str] = set()  # of programs that have not quite ended
        self._folders = [(h, h.path / owner / name) for h in hierarchies]
        # as text: what is done for every program is mostly paths being put together
        self._of_programs = [(h, str(f)) for h, f in self._folders if h.controllers & {"memory", "pids"}]
        try:
            for hierarchy, folder in self._folders:
                self._make(hierarchy, folder)
                _limit(hierarchy, str(folder), memory_mb=total.memory_mb, pids=total.pids, cpus=total.cpus)
        except OSError:
            for _, folder in self._folders:
                remove_tree(folder)
            raise

    def _make(self, hierarchy: Hierarchy, folder: Path) -> None:
        folder.mkdir(parents=True)
        if hierarchy.version == 2:
            for path in (hierarchy.path, folder.parent, folder):
                put(path / "cgroup.subtree_control", " ".join(f"+{c}" for c in hierarchy.controllers))
            (folder / AGENT_LEAF).mkdir()
            self._lend(str(folder))  # moving needs the common parent's list too

    def _lend(self, folder: str) -> None:
        if self._uid is not None:
            os.chown(f"{folder}/cgroup.procs", self._uid, self._uid)

    def has(self, controller: str) -> bool:
        """Whether this controller bounds the sandbox."""
        return any(controller in h.controllers for h, _ in self._folders)

    def join_fds(self) -> Iterator[int]:
        """Open lists through which the agent moves itself in."""
        for hierarchy, folder in self._folders:
            yield os.open(f"{_agents_group(hierarchy, str(folder))}/cgroup.procs", os.O_WRONLY)

    def folder_fds(self) -> Iterator[int]:
        """Open folders below which the spawner finds a program's group; cpu alone has none."""
        for _, folder in self._of_programs:
            yield os.open(folder, os.O_RDONLY | os.O_DIRECTORY)

    def add(self, name: str, limits: Limits) -> None:
        """A group for one program."""
        for hierarchy, folder in self._of_programs:
            group = f"{folder}/{name}"
            os.mkdir(group)
            # + 1: its init counts as well
            _limit(hierarchy, group, memory_mb=limits.memory_mb, pids=limits.pids + 1, cpus=None)
            self._lend(group)

    def remove(self, name: str) -> None:
        """Drop a program's group; one that is still busy goes with the next one, or with the sandbox."""
        self._busy.add(name)
        for busy in list(self._busy):
            left = [folder for _, folder in self._of_programs if not _removed(f"{folder}/{busy}")]
            if not left:
                self._busy.discard(busy)

    def oom_kills(self, name: str | None = None) -> int:
        """Processes of a program, or of the agent's own, that the kernel has killed for memory so far.

        One counter of the kernel under two names. Both versions count the kernel's own memory for a program,
        and a fork that `pids.max` refuses costs some until it is freed, on each core: so a fork bomb may run
        out of memory before its deadline. Its result says then what happened, with one flag or with both.
        """
        for hierarchy, folder in self._of_programs:
            if "memory" in hierarchy.controllers:
                events = "memory.events" if hierarchy.version == 2 else "memory.oom_control"
                group = f"{folder}/{name}" if name else _agents_group(hierarchy, folder)
                with contextlib.suppress(OSError), open(f"{group}/{events}", "rb") as handle:
                    for line in handle.read().splitlines():
                        if line.startswith(b"oom_kill "):
                            return int(line.split()[1])
        return 0

    async def close(self) -> None:
        """Remove the groups, waiting up to two seconds for the last process to leave the kernel."""
        for _ in range(100):
            left = [folder for _, folder in self._folders if not remove_tree(folder)]
            if not left:
                return
            await asyncio.sleep(0.02)


def _agents_group(hierarchy: Hierarchy, folder: str) -> str:
    """Where the agent of the sandbox in `folder` is: version 2 has processes in leaves only."""
    return f"{folder}/{AGENT_LEAF}" if hierarchy.version == 2 else folder


def _limit(hierarchy: Hierarchy, folder: str, *, memory_mb: int, pids: int, cpus: float | None) -> None:
    if "memory" in hierarchy.controllers and hierarchy.version == 2:
        put(f"{folder}/memory.max", memory_mb << 20)
        with contextlib.suppress(OSError):  # no swap accounting
            put(f"{folder}/memory.swap.max", 0)
    elif "memory" in hierarchy.controllers:
        put(f"{folder}/memory.limit_in_bytes", memory_mb << 20)
        with contextlib.suppress(OSError):
            put(f"{folder}/memory.memsw.limit_in_bytes", memory_mb << 20)
    if "pids" in hierarchy.controllers:
        put(f"{folder}/pids.max", pids)
    if "cpu" in hierarchy.controllers and cpus is not None:
        if hierarchy.version == 2:
            put(f"{folder}/cpu.max", f"{int(cpus * 100000)} 100000")
        else:
            put(f"{folder}/cpu.cfs_period_us", 100000)
            put(f"{folder}/cpu.cfs_quota_us", int(cpus * 100000))
