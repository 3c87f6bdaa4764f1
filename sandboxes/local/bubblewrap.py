"""Starting an agent: inside bubblewrap, or bare when a person wrote isolation = "none".

Three leaks are closed here. The agent's parent is bubblewrap, and its environment is readable inside as
/proc/1/environ: so it is started with two variables and nothing of ours. A root harness drops to a uid of
the sandbox's own first: a user namespace alone leaves the kernel uid 0, which owns /etc/shadow. And the
device folder is read-only: it would be an unbounded place for files.
"""

from __future__ import annotations

import os
import secrets
import subprocess
from collections.abc import Sequence
from pathlib import Path

from ..agent.interpreter import BOOT, Interpreter

BINARY = "bwrap"
ARCHIVE = "/run/rz-agent.zip"
# What the distribution's packages put there for their programs; from the third on for those with windows.
SETTINGS = (
    "/etc/alternatives", "/etc/ld.so.cache", "/etc/fonts", "/etc/xdg", "/etc/X11", "/etc/gimp",
    "/etc/libreoffice", "/etc/chromium.d",
)  # fmt: skip
WRITABLE = ("/box", "/tmp", "/dev/shm")
# Where programs of a desktop expect their user's files and sockets, whatever HOME says.
NAMES = {"/home/user": "/box", "/run/user/1000": "/tmp/.desktop"}
ENVIRONMENT = {"PATH": "/usr/local/bin:/usr/bin:/bin", "LANG": "C.UTF-8"}
PASSWD = b"root:x:0:0::/nonexistent:/usr/sbin/nologin\nbox:x:1000:1000::/box:/bin/sh\n"
GROUP = b"root:x:0:\nbox:x:1000:\n"
# Of the agent alone; CAP_SETFCAP because the kernel asks for it to map root into a nested user namespace.
_CAPABILITIES = ("CAP_SYS_ADMIN", "CAP_SETPCAP", "CAP_NET_ADMIN", "CAP_SETFCAP")
_UNSHARE = ("user", "pid", "net", "ipc", "uts")


def sandbox_uid() -> int | None:
    """A host uid for one sandbox, from the upper half of those mapped here; None when not root."""
    if os.geteuid() != 0:
        return None
    lengths = [int(line.split()[2]) for line in Path("/proc/self/uid_map").read_text().splitlines()]
    top = min(max(lengths), 1 << 31)
    return top // 2 + secrets.randbelow(top // 2 - 1)


def holder(data: bytes) -> int:
    """An anonymous file with these bytes, at its start."""
    fd = os.memfd_create("rz-agent", os.MFD_CLOEXEC)
    os.write(fd, data)
    os.lseek(fd, 0, os.SEEK_SET)
    return fd


def outermost(folders: Sequence[str]) -> list[str]:
    """Folders without those that lie in another one of the list.

    >>> outermost(["/usr", "/usr/lib", "/opt/py"])
    ['/usr', '/opt/py']
    """
    unique = list(dict.fromkeys(folders))
    return [f for f in unique if not any(f != g and f.startswith(g.rstrip("/") + "/") for g in unique)]


def command(binary: str, *, read_only: Sequence[str], files: dict[str, int], info_fd: int) -> list[str]:
    """bubblewrap's arguments up to the program. `files`: path inside -> descriptor of its content.

    Folders to write to are empty and read-only: the agent mounts over each (`confine.shared_files`).
    """
    args = [binary, *(f"--unshare-{kind}" for kind in _UNSHARE)]
    args += ["--uid", "0", "--gid", "0", "--hostname", "sandbox", "--new-session", "--cap-drop", "ALL"]
    for capability in _CAPABILITIES:
        args += ["--cap-add", capability]
    for folder in outermost(read_only):
        args += ["--ro-bind", folder, folder]
    for name in ("bin", "sbin", "lib", "lib32", "lib64", "libx32"):
        if os.path.islink(f"/{name}"):
            args += ["--symlink", os.readlink(f"/{name}"), f"/{name}"]
        elif os.path.isdir(f"/{name}"):
            args += ["--ro-bind", f"/{name}", f"/{name}"]
    for path in SETTINGS:
        args += ["--ro-bind-try", path, path]
    for path, place in NAMES.items():
        args += ["--symlink", place, path]
    for path, fd in files.items():
        args += ["--perms", "0444", "--ro-bind-data", str(fd), path]
    args += ["--proc", "/proc", "--dev", "/dev", "--remount-ro", "/dev", "--dir", "/box", "--dir", "/tmp"]
    return [*args, "--remount-ro", "/", "--chdir", "/box", "--info-fd", str(info_fd)]


def agent_command(interpreter: Interpreter, control_fd: int, archive: str, mark: str) -> list[str]:
    """The agent's own command line; `mark` is for whoever looks for it from outside."""
    return [interpreter.path, "-I", "-S", "-c", BOOT, str(control_fd), archive, mark]


def start(
    args: Sequence[str], *, fds: Sequence[int], errors: int, uid: int | None, cwd: str
) -> subprocess.Popen[bytes]:
    """Start it with only these descriptors, as `uid` when given.

    No --die-with-parent: the kernel means the parent *thread* by that, and the socket says it better.
    """
    return subprocess.Popen(
        args,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=errors,
        env=ENVIRONMENT,
        cwd=cwd,
        pass_fds=fds,
        user=uid,
        group=uid,
        extra_groups=None if uid is None else [],
        start_new_session=True,
    )
