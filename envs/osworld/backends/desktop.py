"""Machines that are desktops of ours: a virtual screen in a sandbox, made for one episode.

Programs run on the desktop, not beside it: they see its session bus, its windows and each other, as the
commands of tasks expect. Code of a task that drives pyautogui (`python -c "import pyautogui; ..."`) is
read and done as input, for there is no pyautogui in the sandbox.
"""

from __future__ import annotations

import asyncio
import io
import posixpath
import shlex
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from uuid import uuid4

from ....errors import ConfigError
from ....sandboxes.desktop.actions import Press
from ....sandboxes.desktop.desktop import Desktop, Window
from ....sandboxes.desktop.kept import KeptDesktop
from ....sandboxes.errors import FileError, Misconfigured
from ....sandboxes.pool import SandboxPool
from ...failure import InfraFailure
from ..actions.parsed import Malformed, Screen
from ..actions.pyautogui_code import events_of
from ..machine import Executed, Hindered, InputEvent
from . import furniture
from .furniture import BOX, HOME
from .tree import as_xml

_Do = Callable[[Window], Awaitable[None]]
MAX_FILE = 256 << 20  # bytes
MAX_OUTPUT = 8 << 20
GRACE_S = 10.0  # beyond a command's deadline
# $1 a folder for what comes of it, $2 s; the rest is the command. The folder appears under its last name
# when all is in it.
_RUN = """
mkdir -p "$1.new"; folder=$1; seconds=$2; shift 2
timeout -k 2 "$seconds" "$@" >"$folder.new/stdout" 2>"$folder.new/stderr" </dev/null
echo $? >"$folder.new/exit"
mv "$folder.new" "$folder"
"""


class DesktopBackend:
    """See `backend.Backend`. `sandboxes` makes desktops (`sandbox.provider = "desktop"`) of this size."""

    def __init__(self, sandboxes: SandboxPool, screen: tuple[int, int]) -> None:
        env = {**sandboxes.spec.env, "PATH": furniture.PATH}
        self._sandboxes, self._spec = sandboxes, replace(sandboxes.spec, env=env, screen=screen)

    @asynccontextmanager
    async def machine(self) -> AsyncIterator[DesktopMachine]:
        """A new desktop. ConfigError where the run's sandboxes have none."""
        async with await self._sandboxes.lease(self._spec) as desktop:
            if not isinstance(desktop, KeptDesktop):
                raise ConfigError(
                    source="environment OSWorldEnv",
                    key="sandbox.provider",
                    value=type(desktop).__name__,
                    why="has no screen.",
                    remedy='Set sandbox.provider = "desktop" and sandbox.desktop.a11y = true.',
                )
            machine = DesktopMachine(desktop)
            await machine.furnish()
            yield machine


class DesktopMachine:
    """See `machine.Machine`. Its home is the sandbox's folder; `local` shows that as /home/user as well."""

    password = furniture.PASSWORD

    def __init__(self, desktop: Desktop) -> None:
        self._desktop, self.home = desktop, BOX
        self.width, self.height = desktop.size

    async def furnish(self) -> None:
        """Once, before a task's own steps."""
        if (await self._desktop.exec(["test", HOME, "-ef", BOX])).exit_code == 0:
            self.home = HOME
        for name, text in furniture.STAND_INS.items():
            await self._desktop.write(f"{furniture.PROGRAMS}/{name}", text.encode(), mode=0o755)
        arranged = await self.execute(furniture.ARRANGE, shell=True)
        if arranged.exit_code:
            raise InfraFailure(f"the desktop could not be arranged: {arranged.stderr.strip()}")
        # The window manager takes its new settings a little later. And the first key of all makes the server
        # announce a keyboard, at which the window manager takes its own keys anew and would miss one.
        await self._desktop.catch_up()
        await self._desktop.act(Press("shift"))
        await self._desktop.catch_up()

    # -- programs and files -----------------------------------------------------------------------------

    async def execute(
        self, command: str | Sequence[str], *, shell: bool = False, timeout_s: float = 120
    ) -> Executed:
        """Run a program on the desktop to its end."""
        argv = self._argv(command, shell=shell)
        if code := _pyautogui_code(argv):
            await self.perform(self._events(code))
            return Executed("", "", 0)
        folder = f"/tmp/execute-{uuid4().hex}"
        await self._start(["/bin/sh", "-c", _RUN, "sh", folder, str(timeout_s), *argv])
        deadline, pause_s = time.monotonic() + timeout_s + GRACE_S, 0.01
        while (ended := await self._text(f"{folder}/exit")) is None:
            if time.monotonic() > deadline:
                raise self._hindered(f"did not end {command!r} in {timeout_s:g} s")
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, 0.2)
        if not ended.strip().isdecimal():  # a full disk, or whoever else writes there
            raise self._hindered(f"could not keep the output of {command!r}")
        output = [await self._text(f"{folder}/{name}") or "" for name in ("stdout", "stderr")]
        await self._start(["rm", "-rf", folder])
        return Executed(output[0], output[1], int(ended))

    async def launch(self, command: str | Sequence[str], *, shell: bool = False) -> None:
        """Start a program on the desktop. Hindered where it is not there."""
        argv = self._argv(command, shell=shell)
        if code := _pyautogui_code(argv):
            await self.perform(self._events(code))
        else:
            await self._start(argv)

    async def _start(self, argv: Sequence[str]) -> None:
        try:
            await self._desktop.launch(argv, env={"HOME": self.home}, cwd=self.home)
        except Misconfigured as error:
            raise self._hindered(f"cannot start {argv[0]!r}: {error}") from error

    def _hindered(self, what: str) -> Hindered:
        return Hindered(f"it {what}", provider="desktop", sandbox_id=self._desktop.id)

    async def _text(self, path: str) -> str | None:
        try:
            return (await self._desktop.read(path, max_bytes=MAX_OUTPUT)).decode(errors="replace")
        except FileError:
            return None

    async def read(self, path: str) -> bytes:
        """A file's content."""
        try:
            return await self._desktop.read(self._inside(path), max_bytes=MAX_FILE)
        except FileError as error:
            raise FileNotFoundError(f"{path}: {error}") from error

    async def write(self, path: str, data: bytes) -> None:
        """Replace a file."""
        await self._desktop.write(self._inside(path), data)

    def _argv(self, command: str | Sequence[str], *, shell: bool) -> list[str]:
        if shell:
            return ["/bin/sh", "-c", command if isinstance(command, str) else shlex.join(command)]
        words = shlex.split(command) if isinstance(command, str) else list(command)
        return [f"{self.home}{word[1:]}" if word.startswith("~/") else word for word in words]

    def _inside(self, path: str) -> str:
        """The path as the sandbox knows it."""
        whole = posixpath.normpath(
            posixpath.join(HOME, path.replace("~", HOME, 1) if path[:2] == "~/" else path)
        )
        return BOX + whole.removeprefix(HOME) if whole == HOME or whole.startswith(f"{HOME}/") else whole

    # -- the screen -------------------------------------------------------------------------------------

    async def screenshot(self) -> bytes:
        """The screen as PNG, with little compression: it is made for one look."""
        image, buffer = await self._desktop.screenshot(), io.BytesIO()
        await asyncio.to_thread(image.save, buffer, "PNG", compress_level=1)
        return buffer.getvalue()

    async def accessibility_tree(self) -> str:
        """See `tree.py`."""
        return as_xml(await self._desktop.a11y())

    async def window_titles(self) -> list[str]:
        """Of all windows."""
        return [window.title for window in await self._desktop.windows()]

    async def activate_window(self, name: str, *, strict: bool = False, by_class: bool = False) -> bool:
        """Bring it to the front."""
        return await self._with(name, strict, by_class, self._desktop.activate)

    async def close_window(self, name: str, *, strict: bool = False, by_class: bool = False) -> bool:
        """Ask it to close."""
        return await self._with(name, strict, by_class, self._desktop.ask_to_close)

    async def _with(self, name: str, strict: bool, by_class: bool, do: _Do) -> bool:
        found = next((w for w in await self._desktop.windows() if _is(w, name, strict, by_class)), None)
        if found is not None:
            await do(found)
        return found is not None

    async def window_size(self, window_class: str) -> tuple[int, int]:
        """Of the first window of a class."""
        for window in await self._desktop.windows():
            if _is(window, window_class, strict=False, by_class=True):
                return window.box[2], window.box[3]
        raise LookupError(f"there is no window of class {window_class!r}")

    async def perform(self, events: Sequence[InputEvent]) -> None:
        """One after the other."""
        for event in events:
            await self._desktop.act(event)

    def _events(self, code: str) -> tuple[InputEvent, ...]:
        middle = (self.width // 2, self.height // 2)
        try:
            return events_of(code, Screen(width=self.width, height=self.height, pointer=middle))
        except Malformed as fault:
            raise InfraFailure(f"the task's own pyautogui code cannot be done here: {fault}") from fault


def _pyautogui_code(argv: Sequence[str]) -> str:
    """The code of a `python -c` that drives pyautogui, else ""."""
    if list(argv[:2]) == ["/bin/sh", "-c"]:
        try:
            argv = shlex.split(argv[2])
        except ValueError:
            return ""
    interpreter = len(argv) == 3 and argv[0] in ("python", "python3") and argv[1] == "-c"
    return argv[2] if interpreter and "pyautogui" in argv[2] else ""


def _is(window: Window, name: str, strict: bool, by_class: bool) -> bool:
    """As OSWorld's server finds windows, through wmctrl."""
    if by_class:
        return name.lower() in window.kind.lower()
    return window.title == name if strict else name.lower() in window.title.lower()
