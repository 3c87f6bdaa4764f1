"""A sandbox of any provider with a desktop in it: files, commands and sessions are the sandbox's own."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from PIL.Image import Image

from ..errors import Died, Unsupported
from ..forwarding import ForwardingSandbox
from ..sandbox import Sandbox, Snapshot
from ..tables import DesktopTable
from .actions import Action, Drag, Type, Wait
from .desktop import Accessible, Window
from .hand import PROVIDER, Hand
from .screen import Screen


class DesktopSandbox(ForwardingSandbox):
    """See `desktop.Desktop`. Made by `DesktopProvider.create`, which opens it.

    Commands run beside the desktop, not on it: see `launch`. A snapshot has files, no windows.
    """

    def __init__(self, under: Sandbox, config: DesktopTable, size: tuple[int, int], archive: bytes) -> None:
        super().__init__(under)
        self._config, self._size, self._archive = config, size, archive
        self._hand: Hand | None = None
        self._screen = Screen()
        self._turn = asyncio.Lock()
        self._settled_at = 0.0  # monotonic

    @property
    def size(self) -> tuple[int, int]:
        """Width and height in pixels."""
        return self._size

    async def open(self) -> None:
        """Start the desktop; see `Hand.start`."""
        settings = {"size": self._size, "a11y": self._config.a11y}
        self._hand = await Hand.start(
            self._inner, self._archive, python=self._config.python, settings=settings
        )
        self._screen = Screen()

    # -- the desktop ------------------------------------------------------------------------------------

    async def screenshot(self) -> Image:
        """The screen now, RGB."""
        async with self._turn:
            await self._settle()
            answer, body = await self._ask("screenshot", {"since": self._screen.number})
            return self._screen.update(answer, body)

    async def act(self, action: Action) -> None:
        """Do it."""
        async with self._turn:
            await self._settle()
            if isinstance(action, Wait):
                await asyncio.sleep(action.seconds)
                return
            await self._ask(type(action).__name__.lower(), asdict(action), longer_s=_duration(action))
            self._acted()

    async def launch(
        self, argv: Sequence[str], *, env: Mapping[str, str] | None = None, cwd: str | None = None
    ) -> int:
        """Start a program on the desktop; its pid there."""
        async with self._turn:
            await self._settle()
            arguments = {"argv": list(argv), "env": dict(env or {}), "cwd": cwd}
            answer, _ = await self._ask("launch", arguments)
            self._acted()
            return int(answer["pid"])

    async def windows(self) -> list[Window]:
        """Those that the window manager knows."""
        async with self._turn:
            await self._settle()
            answer, _ = await self._ask("windows", {})
            return [Window(**{**found, "box": tuple(found["box"])}) for found in answer["windows"]]

    async def a11y(self, *, timeout_s: float = 5.0) -> Accessible:
        """The accessibility tree."""
        if not self._config.a11y:
            message = "there is no accessibility tree\n  Set sandbox.desktop.a11y = true."
            raise Unsupported(message, provider=PROVIDER, sandbox_id=self.id)
        async with self._turn:
            await self._settle()
            answer, _ = await self._ask("a11y", {"seconds": timeout_s}, longer_s=timeout_s)
            return _accessible(answer["tree"]["root"], complete=answer["tree"]["complete"])

    async def _ask(self, op: str, arguments: dict[str, Any], *, longer_s: float = 0.0) -> tuple[Any, bytes]:
        if self._hand is None:
            raise Died("its desktop was reset", provider=PROVIDER, sandbox_id=self.id, cause="closed")
        return await self._hand.ask(op, arguments, timeout_s=30.0 + longer_s)

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


def _accessible(node: dict[str, Any], *, complete: bool = True) -> Accessible:
    box = node["box"]
    return Accessible(
        role=node["role"], name=node["name"], box=tuple(box) if box else None,
        states=frozenset(node["states"]), text=node["text"], complete=complete,
        children=tuple(_accessible(child) for child in node["children"]),
    )  # fmt: skip
