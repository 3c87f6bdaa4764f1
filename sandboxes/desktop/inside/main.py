"""The program that holds one desktop: frames in on stdin, frames out on stdout, one at a time.

    harness --act, look, launch--> this program --X, D-Bus--> Xvfb, window manager, applications
                                     `------ started by it, in its namespaces, gone with it

It runs as the applications do, and they can end it: then the desktop has died. They cannot speak for it:
its files, stdin and stdout among them, are closed to everybody else. Its end is the end of them all. Python
3.9 and what `archive.py` packs beside it.
"""

from __future__ import annotations

import ctypes
import os
import select
import sys
from collections.abc import Callable
from typing import Any, NoReturn

from ...inside.wire import Header, pack, take
from .xserver import XServer, missing

READY_S = 30.0
_PR_SET_DUMPABLE = 4
Answer = tuple[Header, bytes]
DONE: Answer = ({}, b"")


def _send(header: Header, body: bytes = b"") -> None:
    view = memoryview(pack(header, body))
    while view:
        view = view[os.write(1, view) :]


class Desk:
    """Serves requests. Made once the X server is ready."""

    def __init__(self, server: XServer, *, a11y: bool) -> None:
        # not at the top: importing these takes as long as the server does to start
        from Xlib.display import Display

        from .keyboard import Keyboard
        from .pointer import Pointer
        from .screen import Screen
        from .windows import Windows

        name = server.ready()
        server.furnish()
        self._server, self._display = server, Display(name)
        self._windows = Windows(self._display)
        self._keyboard = Keyboard(self._display, self._windows.caught_up)
        self._pointer = Pointer(self._display)
        self._screen = Screen(name)
        if a11y:
            from .accessibility import enable

            enable(server.environment["DBUS_SESSION_BUS_ADDRESS"])
        if not self._windows.managed(READY_S):
            raise RuntimeError(f"no window manager after {READY_S:g} s: {server.last_words()}")

    def serve(self) -> NoReturn:
        """Until stdin ends."""
        incoming = bytearray()
        while True:
            ready, _, _ = select.select([0, self._display.fileno()], [], [])
            self._windows.take_events()
            if 0 not in ready:
                continue
            data = os.read(0, 65536)
            if not data:
                sys.exit()
            incoming += data
            frame = take(incoming)
            while frame is not None:
                self._answer(frame[0])
                frame = take(incoming)

    def _answer(self, header: Header) -> None:
        handle: Callable[[Header], Answer] = getattr(self, "_do_" + header["op"])
        try:
            answer, body = handle(header["arguments"])
        except (OSError, ValueError) as error:
            answer, body = {"error": str(error)}, b""
        _send({**answer, "id": header["id"]}, body)

    # -- looking ----------------------------------------------------------------------------------------

    def _do_screenshot(self, arguments: Header) -> Answer:
        return self._screen.changes(arguments["since"])

    def _do_windows(self, arguments: Header) -> Answer:
        return {"windows": self._windows.listed()}, b""

    def _do_a11y(self, arguments: Header) -> Answer:
        from .accessibility import tree

        return {"tree": tree(self._server.environment["DBUS_SESSION_BUS_ADDRESS"], arguments["seconds"])}, b""

    # -- acting -----------------------------------------------------------------------------------------

    def _do_launch(self, arguments: Header) -> Answer:
        try:
            child = self._server.run(arguments["argv"], env=arguments["env"], cwd=arguments["cwd"])
        except (OSError, ValueError) as error:
            missing = isinstance(error, FileNotFoundError) and error.filename == arguments["argv"][0]
            return {"refused": str(error), "missing": missing}, b""
        return {"pid": child.pid}, b""

    def _do_catch_up(self, arguments: Header) -> Answer:
        self._windows.caught_up()
        return DONE

    def _do_activate(self, arguments: Header) -> Answer:
        self._windows.tell(arguments["window"], "_NET_ACTIVE_WINDOW")
        return DONE

    def _do_ask_to_close(self, arguments: Header) -> Answer:
        self._windows.tell(arguments["window"], "_NET_CLOSE_WINDOW")
        return DONE

    def _do_move(self, arguments: Header) -> Answer:
        self._pointer.move(arguments["x"], arguments["y"])
        return DONE

    def _do_click(self, arguments: Header) -> Answer:
        self._pointer.move(arguments["x"], arguments["y"])
        self._pointer.click(arguments["button"], arguments["clicks"])
        return DONE

    def _do_drag(self, arguments: Header) -> Answer:
        self._pointer.move(arguments["from_x"], arguments["from_y"])
        self._pointer.drag((arguments["x"], arguments["y"]), arguments["button"], arguments["duration_s"])
        return DONE

    def _do_scroll(self, arguments: Header) -> Answer:
        self._pointer.move(arguments["x"], arguments["y"])
        for direction, notches in (("up", arguments["up"]), ("right", arguments["right"])):
            opposite = {"up": "down", "right": "left"}[direction]
            self._pointer.scroll(direction if notches > 0 else opposite, abs(notches))
        return DONE

    def _do_mousedown(self, arguments: Header) -> Answer:
        self._pointer.move(arguments["x"], arguments["y"])
        self._pointer.hold(arguments["button"], True)
        return DONE

    def _do_mouseup(self, arguments: Header) -> Answer:
        self._pointer.move(arguments["x"], arguments["y"])
        self._pointer.hold(arguments["button"], False)
        return DONE

    def _do_press(self, arguments: Header) -> Answer:
        for _ in range(arguments["presses"]):
            self._keyboard.press(arguments["keys"])
        return DONE

    def _do_hotkey(self, arguments: Header) -> Answer:
        self._keyboard.hotkey(arguments["keys"])
        return DONE

    def _do_keydown(self, arguments: Header) -> Answer:
        self._keyboard.hold(arguments["key"], True)
        return DONE

    def _do_keyup(self, arguments: Header) -> Answer:
        self._keyboard.hold(arguments["key"], False)
        return DONE

    def _do_type(self, arguments: Header) -> Answer:
        self._keyboard.type(arguments["text"], arguments["interval_s"])
        return DONE


def main(settings: dict[str, Any]) -> NoReturn:
    """Entry, with the width, the height and whether there is an accessibility tree."""
    # /proc/PID/fd would let every program of this user write to its stdout
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0):
        _send({"id": 0, "failed": f"prctl: {os.strerror(ctypes.get_errno())}"})
        sys.exit(1)
    lacking = missing()
    if lacking:
        _send({"id": 0, "missing": lacking})
        sys.exit(1)
    server = XServer(settings["size"], a11y=settings["a11y"])
    try:
        desk = Desk(server, a11y=settings["a11y"])
    except Exception as error:
        _send({"id": 0, "failed": f"{error} {server.last_words()}".strip()})
        sys.exit(1)
    _send({"id": 0})
    desk.serve()
