"""The mouse, through XTEST. Positions outside the screen are moved to its edge by the X server."""

from __future__ import annotations

import time

from Xlib import X
from Xlib.display import Display
from Xlib.ext import xtest

_BUTTONS = {"left": 1, "middle": 2, "right": 3}
_WHEEL = {"up": 4, "down": 5, "left": 6, "right": 7}
_STEP_S = 0.01  # programs tell a drag from a click by the motion between


class Pointer:
    """Moves, presses, drags, scrolls."""

    def __init__(self, display: Display) -> None:
        self._display = display

    def move(self, x: int | None, y: int | None) -> None:
        """Go there; stay where it is without a position."""
        if x is not None and y is not None:
            xtest.fake_input(self._display, X.MotionNotify, x=x, y=y)
            self._display.sync()

    def hold(self, button: str, down: bool) -> None:
        """Press a button, or release it."""
        self._button(_BUTTONS[button], down)

    def click(self, button: str, clicks: int) -> None:
        """Press and release, so many times."""
        for _ in range(clicks):
            self._button(_BUTTONS[button], True)
            self._button(_BUTTONS[button], False)

    def drag(self, to: tuple[int, int], button: str, duration_s: float) -> None:
        """From where it is to there, with the button held."""
        at = self._display.screen().root.query_pointer()
        steps = max(5, round(duration_s / _STEP_S))
        self.hold(button, True)
        for step in range(1, steps + 1):
            time.sleep(max(_STEP_S, duration_s / steps))
            part = step / steps
            self.move(
                round(at.root_x + (to[0] - at.root_x) * part), round(at.root_y + (to[1] - at.root_y) * part)
            )
        self.hold(button, False)

    def scroll(self, direction: str, notches: int) -> None:
        """Turn the wheel."""
        for _ in range(notches):
            self._button(_WHEEL[direction], True)
            self._button(_WHEEL[direction], False)

    def _button(self, number: int, down: bool) -> None:
        xtest.fake_input(self._display, X.ButtonPress if down else X.ButtonRelease, number)
        self._display.sync()
