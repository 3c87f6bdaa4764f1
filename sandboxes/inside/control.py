"""The agent's end of the channel: one descriptor to read frames from, one to write them to.

    local       one socket, whose descriptor is given once: it is used twice
    container   stdin and stdout of the container's first process, "0,1"

Invariant: the end of the channel is the end of the process, whatever it was doing; the harness is gone then.
"""

from __future__ import annotations

import os
import selectors
from collections.abc import Callable

from .wire import Header, pack, take

_PIECE = 1 << 20
_TAKEN = 1 << 16  # at a time: for more the C library asks the kernel for memory each time, and gives it back


class Control:
    """Frames in and frames out, on two descriptors that no program inherits."""

    def __init__(self, incoming: int, outgoing: int) -> None:
        self.incoming, self.outgoing = incoming, outgoing
        self._received, self._unsent = bytearray(), bytearray()
        self._selector: selectors.BaseSelector | None = None

    @classmethod
    def of(cls, given: str) -> Control:
        """From the command line: "5", or "0,1", which are then /dev/null and the error stream instead."""
        first, _, second = given.partition(",")
        control = cls(os.dup(int(first)), os.dup(int(second or first)))
        if second:
            null = os.open(os.devnull, os.O_RDONLY)
            os.dup2(null, int(first))
            os.dup2(2, int(second))
            os.close(null)
        else:
            os.close(int(first))
        return control

    def first(self) -> tuple[Header, bytes]:
        """Wait for one frame."""
        while True:
            frame = take(self._received)
            if frame is not None:
                return frame
            self._receive()

    def greet(self, header: Header) -> None:
        """Send the first frame of this side."""
        data = pack(header)
        try:
            while data:
                data = data[os.write(self.outgoing, data) :]
        except OSError:
            os._exit(0)

    def serve(self, selector: selectors.BaseSelector, handle: Callable[[Header, bytes], None]) -> None:
        """From now on do not wait: each frame goes to `handle` when `selector` says that it came."""
        os.set_blocking(self.incoming, False)
        os.set_blocking(self.outgoing, False)

        def arrived(_: int) -> None:
            self._receive()
            self._dispatch(handle)

        selector.register(self.incoming, selectors.EVENT_READ, arrived)
        self._selector = selector
        self._dispatch(handle)

    def send(self, header: Header, body: bytes = b"") -> None:
        """One frame, now or when there is room for it."""
        self._unsent += pack(header, body)
        self._flush(0)

    def close(self) -> None:
        """In a process that has no business with it."""
        for fd in (self.incoming, self.outgoing):
            os.close(fd)

    def _receive(self) -> None:
        try:
            data = os.read(self.incoming, _TAKEN)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            os._exit(0)
        self._received += data

    def _dispatch(self, handle: Callable[[Header, bytes], None]) -> None:
        while (frame := take(self._received)) is not None:
            handle(*frame)

    def _flush(self, _: int) -> None:
        try:
            while self._unsent:
                del self._unsent[: os.write(self.outgoing, self._unsent[:_PIECE])]
        except BlockingIOError:
            pass
        except OSError:
            os._exit(0)
        assert self._selector is not None, "send() before serve()"
        watched = self.outgoing in self._selector.get_map()
        if self._unsent and not watched:
            self._selector.register(self.outgoing, selectors.EVENT_WRITE, self._flush)
        elif not self._unsent and watched:
            self._selector.unregister(self.outgoing)
