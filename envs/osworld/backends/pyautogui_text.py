"""Events as a program of pyautogui, for machines that have it: the other direction of `actions/`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ....sandboxes.desktop.actions import (
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
from ..machine import InputEvent

_HEAD = "import pyautogui, subprocess, time\npyautogui.FAILSAFE = False"


def program(events: Sequence[InputEvent]) -> str:
    """A Python program that does them.

    >>> print(program([Click(3, 4), Press("enter")]).partition("False\\n")[2])
    pyautogui.click(x=3, y=4, clicks=1, button='left')
    pyautogui.press(['enter'], presses=1)
    """
    return "\n".join([_HEAD, *(line for event in events for line in _lines(event))])


def _lines(event: InputEvent) -> Iterator[str]:
    match event:
        case Move(x, y):
            yield f"pyautogui.moveTo({x!r}, {y!r})"
        case Click(x, y, button, clicks):
            yield f"pyautogui.click(x={x!r}, y={y!r}, clicks={clicks!r}, button={button!r})"
        case Drag(x, y, from_x, from_y, button, duration_s):
            if from_x is not None:
                yield f"pyautogui.moveTo({from_x!r}, {from_y!r})"
            yield f"pyautogui.dragTo({x!r}, {y!r}, duration={duration_s!r}, button={button!r})"
        case Scroll(up, right, x, y):
            for name, notches in (("scroll", up), ("hscroll", right)):
                if notches:
                    yield f"pyautogui.{name}({notches!r}, x={x!r}, y={y!r})"
        case MouseDown(x, y, button):
            yield f"pyautogui.mouseDown(x={x!r}, y={y!r}, button={button!r})"
        case MouseUp(x, y, button):
            yield f"pyautogui.mouseUp(x={x!r}, y={y!r}, button={button!r})"
        case Press(keys, presses):
            yield f"pyautogui.press({list(keys)!r}, presses={presses!r})"
        case Hotkey(keys):
            yield f"pyautogui.hotkey(*{list(keys)!r})"
        case KeyDown(key):
            yield f"pyautogui.keyDown({key!r})"
        case KeyUp(key):
            yield f"pyautogui.keyUp({key!r})"
        case Wait(seconds):
            yield f"time.sleep({seconds!r})"
        case Type(text, interval_s):
            yield from _typed(text, interval_s)


def _typed(text: str, interval_s: float) -> Iterator[str]:
    """pyautogui drops what is not ASCII, and types > for <."""
    if not text.isascii():
        yield f"subprocess.run(['xdotool', 'type', '--', {text!r}], check=True)"
        return
    for number, piece in enumerate(text.split("<")):
        if number:
            yield "pyautogui.hotkey('shift', ',')"
        if piece:
            yield f"pyautogui.write({piece!r}, interval={interval_s!r})"
