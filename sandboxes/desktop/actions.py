"""What can be done to a desktop, as values: `await desktop.act(Click(x=10, y=20))`.

Keys and buttons have pyautogui's names. What cannot be done is a ValueError where the action is made, so
that a tool can tell the model; positions outside the screen end at its edge.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from .inside import keys as known

Button = Literal["left", "middle", "right"]
MAX_S = 600.0  # of one action


def _limited(name: str, seconds: float) -> None:
    if not 0 <= seconds <= MAX_S:
        raise ValueError(f"{name} = {seconds} is not between 0 and {MAX_S:g}")


def _counted(name: str, value: int) -> None:
    if not 1 <= value <= 100:
        raise ValueError(f"{name} = {value} is not between 1 and 100")


def _positioned(x: int | None, y: int | None) -> None:
    if (x is None) != (y is None):
        raise ValueError(f"x = {x}, y = {y}: give both, or none for where the pointer is")
    for name, value in (("x", x), ("y", y)):
        if value is not None and not -32768 <= value <= 32767:
            raise ValueError(f"{name} = {value} is no position")


@dataclass(frozen=True, slots=True)
class Move:
    """Move the pointer."""

    x: int
    y: int

    def __post_init__(self) -> None:
        _positioned(self.x, self.y)


@dataclass(frozen=True, slots=True)
class Click:
    """Click there, or where the pointer is; twice for a double click."""

    x: int | None = None
    y: int | None = None
    button: Button = "left"
    clicks: int = 1

    def __post_init__(self) -> None:
        _positioned(self.x, self.y)
        _counted("clicks", self.clicks)


@dataclass(frozen=True, slots=True)
class Drag:
    """Press the button at `from_x`, `from_y` (or where the pointer is), release it at `x`, `y`."""

    x: int
    y: int
    from_x: int | None = None
    from_y: int | None = None
    button: Button = "left"
    duration_s: float = 0.1

    def __post_init__(self) -> None:
        _positioned(self.x, self.y)
        _positioned(self.from_x, self.from_y)
        _limited("duration_s", self.duration_s)


@dataclass(frozen=True, slots=True)
class Scroll:
    """Turn the wheel by notches: `up` and `right`, negative for down and left."""

    up: int = 0
    right: int = 0
    x: int | None = None
    y: int | None = None

    def __post_init__(self) -> None:
        _positioned(self.x, self.y)
        for name, value in (("up", self.up), ("right", self.right)):
            if abs(value) > 1000:
                raise ValueError(f"{name} = {value} is more than 1000 notches")


@dataclass(frozen=True, slots=True)
class _Button:
    """One half of a click, there or where the pointer is."""

    x: int | None = None
    y: int | None = None
    button: Button = "left"

    def __post_init__(self) -> None:
        _positioned(self.x, self.y)


@dataclass(frozen=True, slots=True)
class MouseDown(_Button):
    """Press a button and hold it."""


@dataclass(frozen=True, slots=True)
class MouseUp(_Button):
    """Release a button."""


@dataclass(frozen=True, slots=True)
class Press:
    """Press and release keys one after the other, the whole row `presses` times.

    >>> Press("entr")
    Traceback (most recent call last):
    ValueError: there is no key 'entr': did you mean enter?
    """

    keys: str | tuple[str, ...]
    presses: int = 1

    def __post_init__(self) -> None:
        object.__setattr__(self, "keys", _known(self.keys))
        _counted("presses", self.presses)


@dataclass(frozen=True, slots=True)
class Hotkey:
    """Press keys together: `Hotkey(("ctrl", "s"))`."""

    keys: tuple[str, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "keys", _known(self.keys))


@dataclass(frozen=True, slots=True)
class _Key:
    """One half of a press."""

    key: str

    def __post_init__(self) -> None:
        known.of(self.key)


@dataclass(frozen=True, slots=True)
class KeyDown(_Key):
    """Press a key and hold it."""


@dataclass(frozen=True, slots=True)
class KeyUp(_Key):
    """Release a key."""


@dataclass(frozen=True, slots=True)
class Type:
    """Type a text, whatever its characters and the keyboard's layout; a line's end is the enter key.

    interval_s   s after each character, for programs that lose fast typing
    """

    text: str
    interval_s: float = 0.0

    def __post_init__(self) -> None:
        for character in self.text:
            known.of_character(character)
        _limited("interval_s times the characters", self.interval_s * len(self.text))


@dataclass(frozen=True, slots=True)
class Wait:
    """Do nothing for a while."""

    seconds: float

    def __post_init__(self) -> None:
        _limited("seconds", self.seconds)


def _known(names: str | tuple[str, ...]) -> tuple[str, ...]:
    found = (names,) if isinstance(names, str) else tuple(names)
    for name in found:
        known.of(name)
    return found


Action = Move | Click | Drag | Scroll | MouseDown | MouseUp | Press | Hotkey | KeyDown | KeyUp | Type | Wait
