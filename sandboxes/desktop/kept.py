"""A desktop as its keeper hands it out; see `kept.py` beside this folder."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..kept import KeptSandbox
from .actions import Action
from .desktop import Accessible, Desktop, Window

if TYPE_CHECKING:
    from PIL.Image import Image


class KeptDesktop(KeptSandbox):
    """See `desktop.Desktop`."""

    def __init__(
        self,
        inner: Desktop,
        *,
        end: Callable[[], Coroutine[Any, Any, None]],
        renewed: Callable[[float], None],
    ) -> None:
        super().__init__(inner, end=end, renewed=renewed)
        self._desktop = inner

    @property
    def size(self) -> tuple[int, int]:
        """Width and height of the screen in pixels."""
        return self._desktop.size

    async def screenshot(self) -> Image:
        """The screen now."""
        return await self._desktop.screenshot()

    async def act(self, action: Action) -> None:
        """Do it."""
        await self._desktop.act(action)

    async def launch(
        self, argv: Sequence[str], *, env: Mapping[str, str] | None = None, cwd: str | None = None
    ) -> int:
        """Start a program on the desktop."""
        return await self._desktop.launch(argv, env=env, cwd=cwd)

    async def windows(self) -> list[Window]:
        """Those that the window manager knows."""
        return await self._desktop.windows()

    async def catch_up(self) -> None:
        """Returns when what was sent has been handled."""
        await self._desktop.catch_up()

    async def activate(self, window: Window) -> None:
        """Bring a window to the front."""
        await self._desktop.activate(window)

    async def ask_to_close(self, window: Window) -> None:
        """What clicking its cross does."""
        await self._desktop.ask_to_close(window)

    async def a11y(self, *, timeout_s: float = 5.0) -> Accessible:
        """The root of the accessibility tree."""
        return await self._desktop.a11y(timeout_s=timeout_s)
