"""A sandbox of any provider with a desktop in it: files, commands and sessions are the sandbox's own."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, TypeVar

from PIL.Image import Image

from ..errors import Died, FileError, Misconfigured, Unsupported
from ..forwarding import ForwardingSandbox
from ..inside.wire import Header
from ..sandbox import Sandbox, Snapshot
from ..tables import DesktopTable
from . import answers
from .actions import Action, Drag, Type, Wait
from .desktop import Accessible, Window
from .hand import PROVIDER, Hand
from .screen import Screen

T = TypeVar("T")


class DesktopSandbox(ForwardingSandbox):
    """See `desktop.Desktop`. Made by `DesktopProvider.create`, which opens it.

    Commands run beside the desktop, not on it: see `launch`. A snapshot has files, no windows.
    """

    def __init__(self, under: Sandbox, config: DesktopTable, size: tuple[int, int], archive: bytes) -> None:
        super().__init__(under)
        self._config, self._size, self._archive = config, size, archive
        self._hand: Hand | None = None
        self._screen = Screen(size)
        self._turn = asyncio.Lock()
        self._settled_at = 0.0  # monotonic

    @property
    def size(self) -> tuple[int, int]:
        """Width and height in pixels."""
        return self._size

    async def open(self) -> None:
        """Start the desktop; see `Hand.start`."""
        self._hand = await Hand.start(
            self._inner, self._archive, python=self._config.python, size=self._size, a11y=self._config.a11y
        )
        self._screen = Screen(self._size)

    # -- the desktop ------------------------------------------------------------------------------------

    async def screenshot(self) -> Image:
        """The screen now, RGB."""
        async with self._turn:
            await self._settle()
            return await self._ask("screenshot", {"since": self._screen.number}, self._screen.update)

    async def act(self, action: Action) -> None:
        """Do it."""
        async with self._turn:
            await self._settle()
            if isinstance(action, Wait):
                await asyncio.sleep(action.seconds)
                return
            op, longer_s = type(action).__name__.lower(), _duration(action)
            await self._ask(op, asdict(action), answers.nothing, longer_s=longer_s)
            self._acted()

    async def launch(
        self, argv: Sequence[str], *, env: Mapping[str, str] | None = None, cwd: str | None = None
    ) -> int:
        """Start a program on the desktop; its pid there."""
        if not argv:
            raise FileError("launch: a command of no words", provider=PROVIDER, sandbox_id=self.id)
        async with self._turn:
            await self._settle()
            arguments = {"argv": list(argv), "env": dict(env or {}), "cwd": cwd}
            started = await self._ask("launch", arguments, answers.started)
            self._acted()
        if isinstance(started, int):
            return started
        # A name is looked for among the programs of the place, a path may lead to the sandbox's own files.
        wrong = Misconfigured if started.missing and "/" not in argv[0] else FileError
        raise wrong(f"launch: {started.words}", provider=PROVIDER, sandbox_id=self.id)

    async def windows(self) -> list[Window]:
        """Those that the window manager knows."""
        async with self._turn:
            await self._settle()
            return await self._ask("windows", {}, answers.windows)

    async def catch_up(self) -> None:
        """Returns when what was sent has been handled."""
        async with self._turn:
            await self._ask("catch_up", {}, answers.nothing)

    async def activate(self, window: Window) -> None:
        """Bring a window to the front."""
        await self._tell("activate", window)

    async def ask_to_close(self, window: Window) -> None:
        """What clicking its cross does."""
        await self._tell("ask_to_close", window)

    async def _tell(self, op: str, window: Window) -> None:
        async with self._turn:
            await self._settle()
            await self._ask(op, {"window": window.id}, answers.nothing)
            self._acted()

    async def a11y(self, *, timeout_s: float = 5.0) -> Accessible:
        """The accessibility tree."""
        if not self._config.a11y:
            message = "there is no accessibility tree\n  Set sandbox.desktop.a11y = true."
            raise Unsupported(message, provider=PROVIDER, sandbox_id=self.id)
        async with self._turn:
            await self._settle()
            return await self._ask("a11y", {"seconds": timeout_s}, answers.tree, longer_s=timeout_s)

    async def _ask(
        self, op: str, arguments: dict[str, Any], read: Callable[[Header, bytes], T], *, longer_s: float = 0.0
    ) -> T:
        if self._hand is None:
            raise Died("its desktop was reset", provider=PROVIDER, sandbox_id=self.id, cause="closed")
        return await self._hand.ask(op, arguments, read, longer_s=longer_s)

    def _acted(self) -> None:
        self._settled_at = time.monotonic() + self._config.settle_s

    async def _settle(self) -> None:
        await asyncio.sleep(max(0.0, self._settled_at - time.monotonic()))

    # -- the sandbox under it ---------------------------------------------------------------------------

    async def reset(self, *, to: Snapshot | None = None) -> None:
        """A new desktop with no files, or with those of `to`."""
        async with self._turn:
            hand, self._hand = self._hand, None
            if hand is not None:
                await hand.end()
            await self._inner.reset(to=to)
            await self.open()

    async def alive(self) -> bool:
        """Whether the desktop's program runs and the sandbox answers."""
        return self._hand is not None and self._hand.alive and await self._inner.alive()


def _duration(action: Action) -> float:
    if isinstance(action, Type):
        return len(action.text) * (action.interval_s + 0.01)
    return action.duration_s if isinstance(action, Drag) else 0.0
