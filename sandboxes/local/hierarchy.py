"""Where processes can be bounded here: each mounted hierarchy with a controller, and our place in it.

Version 1 has one hierarchy a controller, and groups in any group. Version 2 has one for all, and only a group
without processes of its own has groups with limits. So there sandboxes are

    beside the harness, in the group that its own lies in: one of the machine's, or of its user's; or
    beside it in what is lent to it (systemd's Delegate=yes, the root that a container sees), once the
        processes there have moved into a group of their own: what bounds the harness bounds them, too.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path

FOLDER = "rz-agent"
HARNESS = "rz-agent-harness"
_CONTROLLERS = frozenset({"memory", "pids", "cpu"})
_LENT = ("user.delegate", "trusted.delegate")  # how systemd marks what it leaves to others
_MOVES = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Hierarchy:
    """A mounted hierarchy in which this process may make groups below `path`."""

    version: int
    controllers: frozenset[str]
    path: Path


def put(path: str | Path, value: object) -> None:
    fd = os.open(path, os.O_WRONLY)
    try:
        os.write(fd, str(value).encode())
    finally:
        os.close(fd)


def _own_groups() -> dict[str, str]:
    """This process's group for each controller; "" is version 2."""
    groups = {}
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        for controller in controllers.split(","):
            groups[controller] = path
    return groups


def _below(mount_root: str, mount_point: str, group: str) -> Path:
    """Where `group` is seen under a mount; the mount point itself when it is not."""
    relative = os.path.relpath(group, mount_root)
    candidate = Path(mount_point) / relative
    return candidate if not relative.startswith("..") and candidate.is_dir() else Path(mount_point)


def _writable(path: Path) -> bool:
    try:
        (path / FOLDER).mkdir(exist_ok=True)
    except OSError:
        return False
    return os.access(path / FOLDER, os.W_OK)  # it may be there and belong to root


def _words(path: Path) -> list[str]:
    """Those of a file of a group; none when it has no such file, or the kernel none to say."""
    try:
        return path.read_text().split()
    except OSError:
        return []


def _is_machines_root(group: Path) -> bool:
    """Version 2: the one that may have both processes and groups with limits."""
    return not (group / "cgroup.type").exists()


def _is_lent(group: Path) -> bool:
    """Version 2: whether a group is ours to divide: marked so, or all that this container sees."""
    for mark in _LENT:
        with contextlib.suppress(OSError):
            if os.getxattr(group, mark) == b"1":
                return True
    return os.path.ismount(group)


def _make_room(group: Path) -> None:
    """Version 2: move the processes of a lent group into one in it, as long as they start new ones."""
    with contextlib.suppress(OSError):  # it is read-only here
        (group / HARNESS).mkdir(exist_ok=True)
    for _ in range(_MOVES):
        for pid in _words(group / "cgroup.procs"):
            with contextlib.suppress(OSError):  # it has ended, or is another user's
                put(group / HARNESS / "cgroup.procs", pid)


def _ask_for_controllers(group: Path) -> None:
    """Version 2: have a group give what it can to those in it.

    Not while it has processes: it would give what can do with that, and no process could go into them.
    """
    if _is_machines_root(group) or not _words(group / "cgroup.procs"):
        for name in _CONTROLLERS & {*_words(group / "cgroup.controllers")}:
            with contextlib.suppress(OSError):
                put(group / "cgroup.subtree_control", f"+{name}")


def _divided(own: Path) -> Path | None:
    """Version 2: the group in which those of sandboxes belong, giving them what it can."""
    if str(os.getpid()) not in _words(own / "cgroup.procs"):
        return None  # another container's, or the machine's seen from within one
    if not _CONTROLLERS & {*_words(own / "cgroup.controllers")}:
        return None  # version 1 has them all
    if _is_machines_root(own):
        group = own
    elif _is_lent(own):
        _make_room(own)
        group = own
    else:
        group = own.parent
    if _is_machines_root(group) or _is_lent(group):
        _ask_for_controllers(group)
    return group


def _usable(kind: str, options: str, root: str, point: str) -> tuple[frozenset[str], Path] | None:
    """The controllers that one mount can give, and the group in which those of sandboxes belong."""
    own = _own_groups()
    if kind == "cgroup":
        names = _CONTROLLERS & {*options.split(",")}
        return names, _below(root, point, own.get(next(iter(names), ""), "/"))
    if kind == "cgroup2":
        group = _divided(_below(root, point, own.get("", "/")))
        if group is not None:
            return _CONTROLLERS & {*_words(group / "cgroup.subtree_control")}, group
    return None


def find_hierarchies() -> list[Hierarchy]:
    """The hierarchies with a memory, pids or cpu controller in which groups can be made."""
    found: list[Hierarchy] = []
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        left, _, right = line.partition(" - ")
        kind, _, options = right.split(" ", 2)
        root, point = left.split()[3:5]
        usable = _usable(kind, options, root, point)
        if usable is None:
            continue
        names, group = usable
        names = names.difference(*(hierarchy.controllers for hierarchy in found))  # mounted twice
        if names and _writable(group):
            version = 2 if kind == "cgroup2" else 1
            found.append(Hierarchy(version=version, controllers=names, path=group / FOLDER))
    return found
