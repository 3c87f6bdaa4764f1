"""A program for the desktop's tests: covers the screen, writes down its input, paints late after a click.

    python3 painter.py SECONDS     with the libraries of the desktop's archive on PYTHONPATH

Each click fills the left half of the screen with the next colour of COLOURS after so many seconds.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from Xlib import X  # in the sandbox
from Xlib.display import Display

COLOURS = (0x102030, 0xFF0000, 0x00FF00, 0x0000FF, 0x808000)
KINDS = {
    X.ButtonPress: "button", X.ButtonRelease: "release", X.KeyPress: "key", X.KeyRelease: "up",
    X.MotionNotify: "motion",
}  # fmt: skip


def main(seconds: float) -> None:
    """Until it is killed."""
    display = Display()
    screen = display.screen()
    size = screen.width_in_pixels, screen.height_in_pixels
    inputs = X.ButtonPressMask | X.ButtonReleaseMask | X.KeyPressMask | X.KeyReleaseMask | X.PointerMotionMask
    window = screen.root.create_window(
        0, 0, *size, 0, screen.root_depth, background_pixel=COLOURS[0], override_redirect=True,
        event_mask=inputs | X.ExposureMask,
    )  # fmt: skip
    window.map()
    window.set_input_focus(X.RevertToParent, X.CurrentTime)
    display.sync()
    pen, clicks = window.create_gc(), 0
    with Path("events").open("w", buffering=1) as events:
        print("ready", file=events)
        while True:
            event = display.next_event()
            if event.type not in KINDS:
                continue
            pressed = event.type in (X.KeyPress, X.KeyRelease)
            symbol = display.keycode_to_keysym(event.detail, 0) if pressed else event.detail
            print(KINDS[event.type], f"{symbol:#x}", event.root_x, event.root_y, file=events)
            if event.type == X.ButtonPress:
                time.sleep(seconds)
                clicks += 1
                pen.change(foreground=COLOURS[clicks % len(COLOURS)])
                window.fill_rectangle(pen, 0, 0, size[0] // 2, size[1])
                display.flush()


if __name__ == "__main__":
    main(float(sys.argv[1]))
