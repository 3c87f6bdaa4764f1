"""pyautogui's functions as events: `CALLS["click"](Arguments(...), hand)`.

Each function of this table adds to `hand.events` what pyautogui would do. Positions are pixels, or shares of
the screen where the policy writes those (`Scale`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from ....sandboxes.desktop.actions import (
    Action as InputEvent,
)
from ....sandboxes.desktop.actions import (
    Button,
    Click,
    Drag,
    Hotkey,
    KeyDown,
    KeyUp,
    MouseDown,
    MouseUp,
    Move,
    Press,
    Scroll,
    Type,
    Wait,
)
from .constants import Value
from .parsed import Malformed, Screen

Coordinates = Literal["absolute", "relative", "thousandths"]
_HERE = (None, None)
_BUTTONS: Mapping[str, Button] = {
    "left": "left", "middle": "middle", "right": "right", "primary": "left", "secondary": "right",
}  # fmt: skip


@dataclass
class Hand:
    """Events so far and where they have left the pointer.

    coordinates   what a position is written in: pixels, shares (0 to 1) or thousandths of the screen
    """

    screen: Screen
    coordinates: Coordinates = "absolute"
    events: list[InputEvent] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.pointer = self.screen.pointer

    def place(self, arguments: Arguments) -> tuple[int, int] | None:
        """The position that is asked for, None for where the pointer is."""
        x, y = arguments.take("x"), arguments.take("y")
        if isinstance(x, list | tuple) and y is None:
            if len(x) != 2:
                raise Malformed(f"{arguments.call}: {x} is no position: write x and y")
            x, y = x
        if x is None and y is None:
            return None
        across = self._pixel(arguments, "x", x, self.screen.width, self.pointer[0])
        down = self._pixel(arguments, "y", y, self.screen.height, self.pointer[1])
        self.pointer = (across, down)
        return across, down

    def moved(self, arguments: Arguments) -> tuple[int, int]:
        """The position at a distance from the pointer, in the same unit as positions."""
        right, down = arguments.number("xOffset", 0), arguments.number("yOffset", 0)
        if self.coordinates != "absolute":
            whole = 1 if self.coordinates == "relative" else 1000
            right, down = right / whole * self.screen.width, down / whole * self.screen.height
        x = min(max(round(self.pointer[0] + right), 0), self.screen.width - 1)
        y = min(max(round(self.pointer[1] + down), 0), self.screen.height - 1)
        self.pointer = (x, y)
        return x, y

    def _pixel(self, arguments: Arguments, name: str, value: Value, size: int, now: int) -> int:
        if value is None:
            return now
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise Malformed(f"{arguments.call}: {name} = {value!r} is no number")
        if self.coordinates == "absolute":
            return round(value)
        whole = 1 if self.coordinates == "relative" else 1000
        if not 0 <= value <= whole:
            raise Malformed(f"{arguments.call}: {name} = {value:g} is not between 0 and {whole}")
        return min(round(value / whole * size), size - 1)


class Arguments:
    """What a call was given, by name: a function takes what it knows, and the rest is an error."""

    def __init__(self, call: str, names: Sequence[str], given: Sequence[Value], named: Mapping[str, Value]):
        self.call, self._names = call, names
        if len(given) > len(names):
            raise Malformed(f"{call} takes at most {len(names)} values, not {len(given)}")
        self._values = dict(zip(names, given, strict=False))
        for name, value in named.items():
            if name not in names:
                raise Malformed(f"{call} has no {name!r}; it has {', '.join(names)}")
            if name in self._values:
                raise Malformed(f"{call}: {name} is given twice")
            self._values[name] = value

    def take(self, name: str) -> Value:
        return self._values.get(name)

    def number(self, name: str, default: float) -> float:
        value = self.take(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise Malformed(f"{self.call}: {name} = {value!r} is no number")
        return value

    def count(self, name: str, default: int) -> int:
        value = self.number(name, default)
        if value != int(value):
            raise Malformed(f"{self.call}: {name} = {value!r} is no whole number")
        return int(value)

    def text(self, name: str) -> str:
        value = self.take(name)
        if not isinstance(value, str):
            raise Malformed(f"{self.call}: {name} = {value!r} is no text")
        return value

    def texts(self, name: str) -> tuple[str, ...]:
        """One text or a list of texts."""
        value = self.take(name)
        items = [value] if isinstance(value, str) else value
        if not isinstance(items, list | tuple) or not all(isinstance(item, str) for item in items):
            raise Malformed(f"{self.call}: {name} = {value!r} is neither a text nor a list of texts")
        return tuple(str(item) for item in items)

    def button(self, default: Button = "left") -> Button:
        value = self.take("button")
        if value is None:
            return default
        if not isinstance(value, str) or value.lower() not in _BUTTONS:
            raise Malformed(f"{self.call}: there is no button {value!r}; there are left, middle and right")
        return _BUTTONS[value.lower()]


Meaning = Callable[[Arguments, Hand], None]


def _click(button: Button | None = None, clicks: int | None = None) -> Meaning:
    def click(given: Arguments, hand: Hand) -> None:
        _pause(given, hand, "duration")
        times = given.count("clicks", 1) if clicks is None else clicks
        x, y = hand.place(given) or _HERE
        hand.events.append(Click(x, y, given.button() if button is None else button, times))

    return click


def _move(given: Arguments, hand: Hand) -> None:
    _pause(given, hand, "duration")
    if place := hand.place(given):
        hand.events.append(Move(*place))


def _move_by(given: Arguments, hand: Hand) -> None:
    hand.events.append(Move(*hand.moved(given)))


def _drag(given: Arguments, hand: Hand) -> None:
    place = hand.place(given)
    if place is None:
        raise Malformed(f"{given.call} needs a position")
    seconds = max(given.number("duration", 0.0), 0.1)
    hand.events.append(Drag(*place, button=given.button(), duration_s=seconds))


def _drag_by(given: Arguments, hand: Hand) -> None:
    x, y = hand.moved(given)
    seconds = max(given.number("duration", 0.0), 0.1)
    hand.events.append(Drag(x, y, button=given.button(), duration_s=seconds))


def _scroll(direction: Literal["up", "right"]) -> Meaning:
    def scroll(given: Arguments, hand: Hand) -> None:
        notches = given.count("clicks", 0)
        x, y = hand.place(given) or _HERE
        hand.events.append(Scroll(**{direction: notches}, x=x, y=y))

    return scroll


def _mouse_down(given: Arguments, hand: Hand) -> None:
    x, y = hand.place(given) or _HERE
    hand.events.append(MouseDown(x, y, given.button()))


def _mouse_up(given: Arguments, hand: Hand) -> None:
    x, y = hand.place(given) or _HERE
    hand.events.append(MouseUp(x, y, given.button()))


def _write(given: Arguments, hand: Hand) -> None:
    message, interval_s = given.take("message"), given.number("interval", 0.0)
    if isinstance(message, str):
        hand.events.append(Type(message, interval_s))
    else:  # pyautogui presses the keys of a list one by one
        hand.events += [Press(key) for key in given.texts("message")]


def _press(given: Arguments, hand: Hand) -> None:
    keys, presses, interval_s = given.texts("keys"), given.count("presses", 1), given.number("interval", 0.0)
    if not interval_s:
        hand.events.append(Press(keys, presses))
        return
    for _ in range(presses):
        hand.events += [Press(keys), Wait(interval_s)]


def _key_down(given: Arguments, hand: Hand) -> None:
    hand.events.append(KeyDown(given.text("key")))


def _key_up(given: Arguments, hand: Hand) -> None:
    hand.events.append(KeyUp(given.text("key")))


def _sleep(given: Arguments, hand: Hand) -> None:
    hand.events.append(Wait(given.number("secs", 0.0)))


def _pause(given: Arguments, hand: Hand, name: str) -> None:
    """pyautogui glides there; here the pointer jumps, after the same time."""
    if seconds := given.number(name, 0.0):
        hand.events.append(Wait(seconds))


_PLACE = ("x", "y")
_GLIDE = ("duration", "tween", "logScreenshot", "_pause")
_CLICK = (*_PLACE, "interval", "button", *_GLIDE)
# name of the function -> (names of its parameters in pyautogui's order, what it means)
CALLS: Mapping[str, tuple[Sequence[str], Meaning]] = {
    "click": ((*_PLACE, "clicks", "interval", "button", *_GLIDE), _click()),
    "leftClick": (_CLICK, _click("left", 1)),
    "rightClick": (_CLICK, _click("right", 1)),
    "middleClick": (_CLICK, _click("middle", 1)),
    "doubleClick": (_CLICK, _click(clicks=2)),
    "tripleClick": (_CLICK, _click(clicks=3)),
    "moveTo": ((*_PLACE, *_GLIDE), _move),
    "move": (("xOffset", "yOffset", *_GLIDE), _move_by),
    "moveRel": (("xOffset", "yOffset", *_GLIDE), _move_by),
    "dragTo": ((*_PLACE, "duration", "tween", "button", "logScreenshot", "_pause", "mouseDownUp"), _drag),
    "drag": (("xOffset", "yOffset", "duration", "tween", "button", "logScreenshot", "_pause"), _drag_by),
    "dragRel": (("xOffset", "yOffset", "duration", "tween", "button", "logScreenshot", "_pause"), _drag_by),
    "scroll": (("clicks", *_PLACE, "logScreenshot", "_pause"), _scroll("up")),
    "vscroll": (("clicks", *_PLACE, "logScreenshot", "_pause"), _scroll("up")),
    "hscroll": (("clicks", *_PLACE, "logScreenshot", "_pause"), _scroll("right")),
    "mouseDown": ((*_PLACE, "button", *_GLIDE), _mouse_down),
    "mouseUp": ((*_PLACE, "button", *_GLIDE), _mouse_up),
    "write": (("message", "interval", "logScreenshot", "_pause"), _write),
    "typewrite": (("message", "interval", "logScreenshot", "_pause"), _write),
    "press": (("keys", "presses", "interval", "logScreenshot", "_pause"), _press),
    "keyDown": (("key", "logScreenshot", "_pause"), _key_down),
    "keyUp": (("key", "logScreenshot", "_pause"), _key_up),
    "sleep": (("secs",), _sleep),
}


def do(name: str, given: Sequence[Value], named: Mapping[str, Value], hand: Hand, *, call: str) -> None:
    """One call of pyautogui, `call` as it was written. Malformed for what it cannot mean."""
    if name == "hotkey":
        hand.events.append(Hotkey(_keys(given, named, call)))
        return
    if name not in CALLS:
        offered = ", ".join(sorted([*CALLS, "hotkey"]))
        raise Malformed(f"{call} cannot be done: of pyautogui there are {offered}")
    names, meaning = CALLS[name]
    meaning(Arguments(call, names, given, named), hand)


def _keys(given: Sequence[Value], named: Mapping[str, Value], call: str) -> tuple[str, ...]:
    """hotkey takes the keys one by one, or a list of them."""
    if unknown := set(named) - {"interval", "logScreenshot"}:
        raise Malformed(f"{call} has no {min(unknown)!r}; it has the keys and interval")
    first = given[0] if len(given) == 1 else given
    keys = [first] if isinstance(first, str) else first
    if not isinstance(keys, list | tuple) or not keys or not all(isinstance(key, str) for key in keys):
        raise Malformed(f"{call}: write the keys as texts, such as hotkey('ctrl', 's')")
    return tuple(str(key) for key in keys)
