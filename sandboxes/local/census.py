"""Which local sandboxes there are on this machine, whoever made them: by their processes and their folders.

    sandbox name   <owner's pid>-<owner's start time>-<8 digits>, so a name alone says whose it is
    processes      bubblewrap and the agent carry the name as their last argument (`mark`)
    folders        <cgroup>/<owner>/<name> and, without isolation, <scratch of the owner>/<name>

Invariant: only what belongs to this user is found; root finds everybody's.
Nobody waits here but `end`, for the kernel to finish the processes it was told to kill.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from ..owner import Owner, start_time
from .cgroups import remove_tree
from .hierarchy import find_hierarchies

SCRATCH = "rz-agent-scratch-"
_MARK = "rz-agent-sandbox="
END_S = 5.0


def mark(name: str) -> str:
    """The argument by which a sandbox's processes are found."""
    return _MARK + name


def owner_of(name: str) -> Owner | None:
    """The process that a sandbox's or an owner's name begins with; None for any other name.

    >>> owner_of("17-4242-0a1b2c3d").pid
    17
    >>> owner_of("notes") is None
    True
    """
    parts = name.split("-")
    if len(parts) != 3 or not (parts[0].isdigit() and parts[1].isdigit()):
        return None
    return Owner.on_this_machine(int(parts[0]), parts[1])


@dataclass(slots=True)
class Found:
    """What there is of one sandbox."""

    name: str
    pids: list[int] = field(default_factory=list)
    folders: list[Path] = field(default_factory=list)
    begun: float = field(default_factory=time.time)  # s since the epoch

    @property
    def owner(self) -> Owner | None:
        """Whose it is."""
        return owner_of(self.name)


def take_census() -> dict[str, Found]:
    """All of them, by name."""
    found: dict[str, Found] = {}
    for pid, name in _marked():
        one = found.setdefault(name, Found(name))
        one.pids.append(pid)
        one.begun = min(one.begun, _begun(pid))
    for folder in _folders():
        one = found.setdefault(folder.name, Found(folder.name))
        one.folders.append(folder)
        with contextlib.suppress(OSError):
            one.begun = min(one.begun, folder.stat().st_mtime)
    return found


def end(name: str) -> bool:
    """Kill its processes and remove its folders; False when there is nothing of this name."""
    gone_by, known = time.monotonic() + END_S, False
    while (found := take_census().get(name)) is not None:
        known = True
        for pid, started in _members(found):
            _kill(pid, started)
        for folder in () if found.pids else found.folders:
            if folder.is_relative_to(tempfile.gettempdir()):
                shutil.rmtree(folder, ignore_errors=True)
            else:
                remove_tree(folder)
        if time.monotonic() > gone_by:
            break
        time.sleep(0.02)
    return known


def scratch_folders() -> Iterator[tuple[str, Path]]:
    """Owner and folder of each harness that runs sandboxes without isolation."""
    for folder in Path(tempfile.gettempdir()).glob(f"{SCRATCH}*"):
        if folder.is_dir() and _ours(folder):
            yield folder.name.removeprefix(SCRATCH).rpartition("-")[0], folder


def _marked() -> Iterator[tuple[int, str]]:
    for entry in os.listdir("/proc"):
        if entry.isdigit() and (name := _name_of(int(entry))) is not None:
            yield int(entry), name


def _name_of(pid: int) -> str | None:
    """The sandbox that a living process belongs to."""
    try:
        if not _ours(Path(f"/proc/{pid}")):
            return None
        last = Path(f"/proc/{pid}/cmdline").read_bytes().rstrip(b"\0").rpartition(b"\0")[2]
    except OSError:
        return None
    if not last.startswith(_MARK.encode()):
        return None
    name = last.decode(errors="replace").removeprefix(_MARK)
    return name if owner_of(name) is not None else None


def _begun(pid: int) -> float:
    """When a process started, in seconds since the epoch; now, when it has just ended."""
    ticks = start_time(pid)
    if ticks is None:
        return time.time()
    booted = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)
    return booted + int(ticks) / os.sysconf("SC_CLK_TCK")


def _members(found: Found) -> list[tuple[int, str]]:
    """Processes of a sandbox with their start times: those with its mark, their children, its cgroups'."""
    parents = dict(_parents())
    members, wave = set(found.pids), set(found.pids)
    while wave := {pid for pid, parent in parents.items() if parent in wave} - members:
        members |= wave
    for folder in found.folders:
        for path, _, _ in os.walk(folder):  # which passes over what is removed meanwhile
            with contextlib.suppress(OSError):
                members |= {int(line) for line in Path(path, "cgroup.procs").read_text().split()}
    return [(pid, started) for pid in members if (started := start_time(pid)) is not None]


def _parents() -> Iterator[tuple[int, int]]:
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(OSError):
                yield int(entry), int(Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()[1])


def _kill(pid: int, started: str) -> None:
    """SIGKILL, unless the pid has a new bearer by now."""
    with contextlib.suppress(OSError):
        handle = os.pidfd_open(pid)
        try:
            if start_time(pid) == started:
                signal.pidfd_send_signal(handle, signal.SIGKILL)
        finally:
            os.close(handle)


def _folders() -> Iterator[Path]:
    groups = [owner for hierarchy in find_hierarchies() for owner in hierarchy.path.iterdir()]
    for owner in [*groups, *(folder for _, folder in scratch_folders())]:
        with contextlib.suppress(OSError):  # its owner is removing it
            yield from (path for path in owner.iterdir() if path.is_dir() and owner_of(path.name))


def _ours(path: Path) -> bool:
    return os.geteuid() in (0, path.stat().st_uid)
