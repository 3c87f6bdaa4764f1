"""The X server and what a desktop needs beside it, as child processes of one group.

Standard library only: the rest of this program is imported while the server starts.
"""

from __future__ import annotations

import ctypes
import os
import pwd
import shutil
import subprocess
from collections.abc import Mapping, Sequence

PROGRAMS = ("Xvfb", "openbox", "dbus-daemon")
NAMES = "libnss_wrapper.so"  # names for a user whom /etc/passwd does not know: the bus lets nobody else in
# Outside of the folder where programs work, which is theirs alone. The same for each desktop of a sandbox: a
# snapshot brings back that of the one before, to be replaced.
FOLDER = "/tmp/.desktop"
_NO_A11Y = {"NO_AT_BRIDGE": "1", "GTK_A11Y": "none"}
_A11Y = {"GTK_MODULES": "gail:atk-bridge", "QT_ACCESSIBILITY": "1", "GNOME_ACCESSIBILITY": "1"}


def missing() -> list[str]:
    """Programs that are not on PATH, and the library of names where it is needed."""
    lacking = [program for program in PROGRAMS if shutil.which(program) is None]
    if not _has_name():
        try:
            ctypes.CDLL(NAMES)
        except OSError:
            lacking.append(NAMES)
    return lacking


def _has_name() -> bool:
    try:
        pwd.getpwuid(os.getuid())
    except KeyError:
        return False
    return True


def _naming() -> dict[str, str]:
    """Variables with which a program finds a name for its user; none where there is one anyway."""
    if _has_name():
        return {}
    ids = f"{os.getuid()}:{os.getgid()}"
    lines = {"passwd": f"box:x:{ids}::{os.environ['HOME']}:/bin/sh\n", "group": f"box:x:{os.getgid()}:\n"}
    for name, line in lines.items():
        with open(os.path.join(FOLDER, name), "w") as file:
            file.write(line)
    places = {f"NSS_WRAPPER_{name.upper()}": os.path.join(FOLDER, name) for name in lines}
    return {"LD_PRELOAD": NAMES, **places}


class XServer:
    """Xvfb and the session bus. `environment` is what programs on this desktop get."""

    def __init__(self, size: Sequence[int], *, a11y: bool) -> None:
        shutil.rmtree(FOLDER, ignore_errors=True)
        os.mkdir(FOLDER, 0o700)  # private to this user, as XDG wants it
        self._log = open(os.path.join(FOLDER, "log"), "w+b")  # noqa: SIM115 - as long as this process
        self._children: list[subprocess.Popen[bytes]] = []
        self.environment = {
            **os.environ,
            "XDG_RUNTIME_DIR": FOLDER,
            "XDG_CACHE_HOME": os.path.join(FOLDER, "cache"),
            "DBUS_SESSION_BUS_ADDRESS": "unix:path=" + os.path.join(FOLDER, "bus"),
            "GDK_BACKEND": "x11",
            **(_A11Y if a11y else _NO_A11Y),
        }
        self._number, given = os.pipe()
        screen = f"{size[0]}x{size[1]}x24"
        # -noreset: it would forget the keyboard map with its last client; -s 0: never blank
        options = ["-displayfd", str(given), "-screen", "0", screen, "-nolisten", "tcp", "-noreset", "-ac"]
        self._server = self.run(["Xvfb", *options, "-s", "0"], logged=True, pass_fds=(given,))
        os.close(given)

    def ready(self) -> str:
        """The display's name, once the server accepts clients. RuntimeError with its last words."""
        name = b""
        while not name.endswith(b"\n"):
            more = os.read(self._number, 16)
            if not more:
                raise RuntimeError(f"Xvfb ended with status {self._server.wait()}: {self.last_words()}")
            name += more
        os.close(self._number)
        display = ":" + name.decode().strip()
        self.environment["DISPLAY"] = display
        return display

    def furnish(self) -> None:
        """The session bus and the window manager."""
        address = "--address=" + self.environment["DBUS_SESSION_BUS_ADDRESS"]
        bus = ["dbus-daemon", "--session", "--nofork", "--nosyslog", address]
        self.run(bus, env=_naming(), logged=True)
        # at each change of the keyboard it would read the table of composed characters anew, for 0.1 s
        self.run(["openbox", "--sm-disable"], env={"XCOMPOSEFILE": os.devnull}, logged=True)

    def last_words(self) -> str:
        """The end of what its own programs wrote to stderr."""
        size = os.fstat(self._log.fileno()).st_size
        return os.pread(self._log.fileno(), 2000, max(0, size - 2000)).decode("utf-8", "replace").strip()

    def run(
        self, argv: Sequence[str], *, env: Mapping[str, str] | None = None, cwd: str | None = None,
        logged: bool = False, pass_fds: Sequence[int] = (),
    ) -> subprocess.Popen[bytes]:  # fmt: skip
        """Start a program on this desktop. OSError when it cannot be run."""
        self._children = [child for child in self._children if child.poll() is None]  # reaps as well
        output = self._log if logged else subprocess.DEVNULL
        child = subprocess.Popen(
            argv, env={**self.environment, **(env or {})}, cwd=cwd, pass_fds=pass_fds,
            stdin=subprocess.DEVNULL, stdout=output, stderr=output,
        )  # fmt: skip
        self._children.append(child)
        return child
