"""A sandbox with a screen: what a person at it could see and do, and its programs' accessibility tree.

Invariant: between an action and the next look or action lies at least the configured `settle_s`. Programs
draw and take input with a delay: a click directly followed by typing loses characters in some of them.
Waits: an action for the one before it; a look for the actions before it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from ..sandbox import Sandbox
from .actions import Action

if TYPE_CHECKING:
    from PIL.Image import Image


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """One window of a program. `box`: left, top, width and height in pixels, without its frame.

    pid    of its program in the desktop's namespace, as that says; 0 when it does not
    kind   what its program calls such windows (the class of WM_CLASS), such as "Gnome-terminal"
    """

    id: int
    title: str
    box: tuple[int, int, int, int]
    active: bool
    pid: int = 0
    kind: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Accessible:
    """One node of the accessibility tree. `box` like a window's; None for what has no place on the screen.

    role      "push button", "text", "menu item" ...
    states    "focused", "checked", "showing" ...
    text      of text fields, its first 4000 characters
    complete  whether everything below it is here; said of the root alone
    """

    role: str
    name: str
    box: tuple[int, int, int, int] | None = None
    states: frozenset[str] = frozenset()
    text: str = ""
    children: tuple[Accessible, ...] = ()
    complete: bool = True

    def walk(self) -> Iterator[Accessible]:
        """It and all below it, each before its children."""
        yield self
        for child in self.children:
            yield from child.walk()


class Desktop(Sandbox, Protocol):
    """A sandbox that holds a desktop. `reset` makes a new one; snapshots hold files, never windows."""

    @property
    def size(self) -> tuple[int, int]:
        """Width and height of the screen in pixels."""
        ...

    async def screenshot(self) -> Image:
        """The screen now, RGB, without the pointer."""
        ...

    async def act(self, action: Action) -> None:
        """Do it. Returns when the X server has taken it, not when a program has shown its effect."""
        ...

    async def launch(
        self, argv: Sequence[str], *, env: Mapping[str, str] | None = None, cwd: str | None = None
    ) -> int:
        """Start a program on the desktop; its pid there. Misconfigured when there is no program of that name,
        FileError when it cannot be started from the sandbox's own files, or for want of room."""
        ...

    async def windows(self) -> list[Window]:
        """Those that the window manager knows, the oldest first."""
        ...

    async def catch_up(self) -> None:
        """Returns when the window manager and the program in front have handled what was sent to them."""
        ...

    async def activate(self, window: Window) -> None:
        """Bring a window to the front and give it the keyboard; one that is gone is fine."""
        ...

    async def ask_to_close(self, window: Window) -> None:
        """What clicking its cross does: its program may ask back. One that is gone is fine."""
        ...

    async def a11y(self, *, timeout_s: float = 5.0) -> Accessible:
        """The root of the accessibility tree, whose children are programs. Unsupported unless configured.

        A program that does not answer in `timeout_s` is cut short, and the root is not `complete`.
        """
        ...
