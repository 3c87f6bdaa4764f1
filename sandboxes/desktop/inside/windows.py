"""What the window manager shows, and whether the program in front has caught up with its events."""

from __future__ import annotations

import select
import time
from collections.abc import Callable
from typing import Any

from Xlib import X, error
from Xlib.display import Display
from Xlib.protocol import event

_DEAF_S = 0.1  # for programs that answer no ping
_ANSWER_S = 5.0
_RETRY_S = 0.1


class Windows:
    """The windows of one display. Reads this connection's events: nobody else may."""

    def __init__(self, display: Display) -> None:
        self._display, self._root = display, display.screen().root
        self._asked = self._manager = self._front = 0  # pings so far, and the last that each has answered
        self._extents = display.intern_atom("_NET_FRAME_EXTENTS")
        self._root.change_attributes(event_mask=X.SubstructureNotifyMask)  # where answers to pings come
        self._own = self._hidden_window()
        display.set_error_handler(lambda *_: None)  # windows vanish between two requests

    def managed(self, within_s: float) -> bool:
        """Wait for a window manager that takes requests; whether one does.

        Its name on the root window is not enough: openbox writes that long before it handles events, and
        loses some that come in between. A window that is first shown then is never shown.
        """
        deadline = time.monotonic() + within_s
        while not self._numbers(self._root, "_NET_SUPPORTING_WM_CHECK") and time.monotonic() < deadline:
            time.sleep(0.005)
        while not self._manager and time.monotonic() < deadline:
            self._own.destroy()  # a late answer to the question before counts no more
            self._own = self._hidden_window()
            self._ping_manager()
            self._hear(lambda: self._manager > 0, _RETRY_S)
        self._asked = self._manager
        return bool(self._manager)

    def _hidden_window(self) -> Any:
        return self._root.create_window(0, 0, 1, 1, 0, 0, X.InputOnly, event_mask=X.PropertyChangeMask)

    def listed(self) -> list[dict[str, Any]]:
        """Those that the window manager has, the oldest first."""
        found = []
        for number in self._numbers(self._root, "_NET_CLIENT_LIST"):
            try:
                found.append(self._described(number))
            except (error.BadWindow, error.BadDrawable):
                continue  # it has just been closed
        return found

    def _described(self, number: int) -> dict[str, Any]:
        window = self._display.create_resource_object("window", number)
        size = window.get_geometry()
        corner = window.translate_coords(self._root, 0, 0)  # answers where the root's corner is seen from it
        pid = self._numbers(window, "_NET_WM_PID")
        names = window.get_wm_class()
        return {
            "id": number,
            "title": self._text(window, "_NET_WM_NAME") or self._text(window, "WM_NAME"),
            "box": [-corner.x, -corner.y, size.width, size.height],
            "active": self._numbers(self._root, "_NET_ACTIVE_WINDOW") == [number],
            "pid": pid[0] if pid else 0,
            "kind": names[1] if names else "",
        }

    def tell(self, number: int, what: str) -> None:
        """Ask the window manager to do this with a window, as a pager would; one that is gone is fine."""
        window = self._display.create_resource_object("window", number)
        kind, pager = self._display.intern_atom(what), 2
        data = (32, [pager if what == "_NET_ACTIVE_WINDOW" else 0, pager, 0, 0, 0])
        asked = event.ClientMessage(window=window, client_type=kind, data=data)
        self._root.send_event(asked, event_mask=X.SubstructureRedirectMask | X.SubstructureNotifyMask)
        self._display.flush()

    def _numbers(self, window: Any, name: str) -> list[int]:
        found = window.get_full_property(self._display.intern_atom(name), X.AnyPropertyType)
        return list(found.value) if found else []

    def _text(self, window: Any, name: str) -> str:
        found = window.get_full_property(self._display.intern_atom(name), X.AnyPropertyType)
        value = found.value if found else b""
        return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)

    # -- events -----------------------------------------------------------------------------------------

    def caught_up(self) -> None:
        """Wait until the window manager and the program in front have handled what was sent to them.

        Both answer a question only after the events before it. A program that answers none gets a moment.
        """
        self._asked += 1
        front = self._ping_front(self._asked)
        self._ping_manager()
        self._hear(
            lambda: self._manager >= self._asked and (not front or self._front == self._asked), _ANSWER_S
        )
        if not front:
            time.sleep(_DEAF_S)

    def _hear(self, answered: Callable[[], bool], seconds: float) -> None:
        """Take events until the answer is there, or for so long."""
        deadline = time.monotonic() + seconds
        while True:
            self.take_events()
            left = deadline - time.monotonic()
            if answered() or left < 0:
                return
            select.select([self._display.fileno()], [], [], left)

    def _ping_front(self, serial: int) -> bool:
        """Whether the program in front says that it answers."""
        protocols, ping = (self._display.intern_atom(name) for name in ("WM_PROTOCOLS", "_NET_WM_PING"))
        active = self._numbers(self._root, "_NET_ACTIVE_WINDOW")
        if not active or not active[0]:
            return False
        front = self._display.create_resource_object("window", active[0])
        try:
            if ping not in self._numbers(front, "WM_PROTOCOLS"):
                return False
        except (error.BadWindow, error.BadDrawable):
            return False
        data = (32, [ping, serial, front.id, 0, 0])
        front.send_event(event.ClientMessage(window=front, client_type=protocols, data=data))
        self._display.flush()
        return True

    def _ping_manager(self) -> None:
        """Ask it for the frame of a window that is never shown: it writes the answer on that window."""
        question = self._display.intern_atom("_NET_REQUEST_FRAME_EXTENTS")
        asked = event.ClientMessage(window=self._own, client_type=question, data=(32, [0] * 5))
        self._root.send_event(asked, event_mask=X.SubstructureRedirectMask | X.SubstructureNotifyMask)
        self._display.flush()

    def take_events(self) -> None:
        """Take those that are there; only answers to pings are of use."""
        while self._display.pending_events():
            came = self._display.next_event()
            kind = came.type & 0x7F
            if kind == X.PropertyNotify and came.window == self._own and came.atom == self._extents:
                self._manager += 1
            elif kind == X.ClientMessage and came.window == self._root and came.data[0] == 32:
                self._front = came.data[1][1]
