"""Machines that run OSWorld's own server: virtual machines that somebody else starts and stops.

    HttpBackend   a machine that is free, made new by a command, ready when it shows its screen
    HttpMachine   /screenshot /accessibility /file /execute /setup/... of one of them

Invariants: a request that acts is sent once, never again: a click that arrived and whose answer was lost
would be made twice. What only looks is tried again. A server that is gone, or that a gateway does not reach,
has `Died`, one that answers nothing any more is a `CallTimeout`; both mask the episode. One that answers that
it cannot, also to a look, and one that is stuck in a request and still shows its screen, is `Hindered`: it
runs, it has shown its screen before the episode began, and what it lacks since (the X server, room on its
disk) is within reach of the policy's programs and of nobody else's.
Waits: an episode for a free machine, and for its server to be up.
"""

from __future__ import annotations

import asyncio
import shlex
from collections.abc import AsyncIterator, Awaitable, Sequence
from contextlib import asynccontextmanager

from ....errors import ConfigError
from ....sandboxes.errors import CallTimeout, CreateError, SandboxError
from ..machine import Executed, Hindered, InputEvent
from ..patience import shows_its_screen
from .pyautogui_text import program
from .wire import Wire, WireFault, parsed

HOME = "/home/user"
READY_S = 300.0  # for a machine to be up after it was reverted
REVERT_S = 600.0
LOOK_S = 60.0
GRACE_S = 15.0
MAX_TREE = 8 << 20  # characters


class HttpBackend:
    """See `backend.Backend`. At most as many episodes run as there are servers; the others wait."""

    def __init__(self, servers: Sequence[str], revert: Sequence[str], password: str) -> None:
        if not servers:
            raise ConfigError(
                source="environment OSWorldEnv",
                key="servers",
                value=list(servers),
                remedy='Name the machines: servers = ["http://HOST:5000"].',
            )
        self._revert, self._password = tuple(revert), password
        self._free: asyncio.Queue[str] = asyncio.Queue()
        for server in servers:
            self._free.put_nowait(server)

    @asynccontextmanager
    async def machine(self) -> AsyncIterator[HttpMachine]:
        """A machine that nobody else has. CreateError where it cannot be reverted or does not come up."""
        server = await self._free.get()
        try:
            if self._revert:
                await self._make_new(server)
            yield await self._ready(server)
        finally:
            self._free.put_nowait(server)

    async def _make_new(self, server: str) -> None:
        argv = [part.replace("{server}", server) for part in self._revert]
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(*argv, stdout=pipe, stderr=asyncio.subprocess.STDOUT)
        try:
            async with asyncio.timeout(REVERT_S):
                output, _ = await process.communicate()
        except TimeoutError:
            raise CreateError(f"{shlex.join(argv)} did not end in {REVERT_S:g} s", provider="http") from None
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        if process.returncode:
            last = output.decode(errors="replace").strip()[-500:]
            message = f"{shlex.join(argv)} ended with {process.returncode}: {last}"
            raise CreateError(message, provider="http")

    async def _ready(self, server: str) -> HttpMachine:
        wire = Wire(server)
        try:
            async with asyncio.timeout(READY_S):
                while True:
                    try:
                        await wire.get("/screenshot", timeout_s=LOOK_S)
                        size = parsed(await wire.post("/screen_size", {}, timeout_s=LOOK_S))
                        return HttpMachine(wire, (size["width"], size["height"]), self._password)
                    except (WireFault, SandboxError):  # it is still starting
                        await asyncio.sleep(1.0)
        except TimeoutError:
            raise CreateError(f"{server} did not come up in {READY_S:g} s", provider="http") from None


class HttpMachine:
    """See `machine.Machine`."""

    home = HOME

    def __init__(self, wire: Wire, size: tuple[int, int], password: str) -> None:
        self._wire, self.password = wire, password
        self.width, self.height = size

    async def execute(
        self, command: str | Sequence[str], *, shell: bool = False, timeout_s: float = 120
    ) -> Executed:
        """Run a program to its end; the server itself stops it after 120 s."""
        request = {"command": command if isinstance(command, str) else list(command), "shell": shell}
        try:
            asked = self._wire.post("/execute", request, timeout_s=timeout_s + GRACE_S)
            answer = parsed(await self._answered(asked))
        except WireFault as fault:
            if not fault.told:
                raise self._hindered(fault) from fault
            # its answer to a command that it could not start, or that ran too long
            return Executed("", self._explained(fault), 124 if "timed out" in fault.body else 127)
        return Executed(answer.get("output") or "", answer.get("error") or "", answer.get("returncode", 0))

    async def launch(self, command: str | Sequence[str], *, shell: bool = False) -> None:
        """Start a program."""
        request = {"command": command if isinstance(command, str) else list(command), "shell": shell}
        try:
            await self._answered(self._wire.post("/setup/launch", request, timeout_s=LOOK_S))
        except WireFault as fault:
            raise self._hindered(fault) from fault

    async def read(self, path: str) -> bytes:
        """A file's content."""
        try:
            asked = self._wire.form("/file", {"file_path": self._whole(path)}, timeout_s=LOOK_S)
            return await self._answered(asked)
        except WireFault as fault:
            raise FileNotFoundError(f"{path}: {self._explained(fault)}") from fault

    async def write(self, path: str, data: bytes) -> None:
        """Replace a file."""
        fields = {"file_path": self._whole(path)}
        await self._done(self._wire.upload("/setup/upload", fields, data, timeout_s=LOOK_S))

    async def screenshot(self) -> bytes:
        """The screen as PNG."""
        try:
            return await self._wire.get("/screenshot", timeout_s=LOOK_S)
        except WireFault as fault:
            raise self._hindered(fault) from fault

    async def accessibility_tree(self) -> str:
        """As the server says it."""
        tree = parsed(await self._done(self._wire.get("/accessibility", timeout_s=LOOK_S)))
        if len(found := str(tree.get("AT", ""))) > MAX_TREE:
            raise Hindered(f"its accessibility tree has {len(found)} characters", provider="http")
        return found

    async def window_titles(self) -> list[str]:
        """Of all windows, as wmctrl lists them: id, desktop, host, title."""
        lines = (await self.execute(["wmctrl", "-l"])).stdout.splitlines()
        return [line.split(None, 3)[3] for line in lines if len(line.split(None, 3)) == 4]

    async def activate_window(self, name: str, *, strict: bool = False, by_class: bool = False) -> bool:
        """Bring it to the front."""
        return await self._window("/setup/activate_window", name, strict, by_class)

    async def close_window(self, name: str, *, strict: bool = False, by_class: bool = False) -> bool:
        """Ask it to close."""
        return await self._window("/setup/close_window", name, strict, by_class)

    async def _window(self, endpoint: str, name: str, strict: bool, by_class: bool) -> bool:
        request = {"window_name": name, "strict": strict, "by_class": by_class}
        try:
            await self._answered(self._wire.post(endpoint, request, timeout_s=LOOK_S))
        except WireFault:
            return False
        return True

    async def window_size(self, window_class: str) -> tuple[int, int]:
        """Of the first window of a class."""
        try:
            asked = self._wire.form("/window_size", {"app_class_name": window_class}, timeout_s=LOOK_S)
            size = parsed(await self._answered(asked))
        except WireFault:
            size = {}
        if not {"width", "height"} <= set(size):
            raise LookupError(f"there is no window of class {window_class!r}")
        return size["width"], size["height"]

    async def perform(self, events: Sequence[InputEvent]) -> None:
        """All events as one program of pyautogui in the machine."""
        if events:
            executed = await self.execute(["python", "-c", program(events)], timeout_s=120)
            if executed.exit_code:
                message = f"the machine could not do {list(events)!r}: {executed.stderr.strip()[-500:]}"
                raise Hindered(message, provider="http")

    async def _done(self, answer: Awaitable[bytes]) -> bytes:
        try:
            return await self._answered(answer)
        except WireFault as fault:
            raise self._hindered(fault) from fault

    async def _answered(self, answer: Awaitable[bytes]) -> bytes:
        try:
            return await answer
        except CallTimeout as late:
            if await shows_its_screen(self):
                raise Hindered(f"{late}, and it still shows its screen", provider="http") from late
            raise

    def _hindered(self, fault: WireFault) -> Hindered:
        return Hindered(self._explained(fault), provider="http")

    def _whole(self, path: str) -> str:
        return path if path.startswith("/") else f"{HOME}/{path.removeprefix('~/')}"

    @staticmethod
    def _explained(fault: WireFault) -> str:
        return f"{fault}: {fault.body.strip()[:500]}"
