"""One running program as the supervisor sees it: its pipes, and the call that waits for it.

A command serves one call and ends. A session serves many, one after the other, and each call ends with
the mark that carries its number. Bytes beyond the limits are counted and dropped, never held. A stream is
a command that is talked with: nothing of it is dropped, it stands still while nobody takes its output.
"""

from __future__ import annotations

import os
import struct
import time
from typing import Any

from .output import Kept

GRACE_S = 2.0  # between interrupting a cell and killing its session
START_S = 30.0  # for a program to be ready: afterwards the sandbox is at fault, not the program
_PIECE = 65536
_DRAIN = 32  # reads; a pipe holds one piece, a few more may come meanwhile
_STATUS = 65535  # the highest wait status
_SAID = 4096  # bytes of marks during a cell, of which one of twenty bytes is due
_LONGEST_MARK = 32


class Call:
    """One request of the harness that a program is working on."""

    def __init__(self, header: dict[str, Any], fresh: bool) -> None:
        self.header = header
        self.id: int = header["id"]
        self.timeout: float = header["timeout"]
        self.flood: int = header["flood"]
        self.cap: int = header["cap"]
        # a stream is held back at its cap; what its pipe holds in the end comes on top, whole
        kept = 2 * (self.cap + 2 * _PIECE) if header["op"] == "start" else self.cap
        self.out, self.err = Kept(kept), Kept(kept)
        self.fresh = fresh
        self.timed_out = self.flooded = self.interrupted = self.cancelled = False
        self.number = 0
        self.begun = time.monotonic()

    def result(self, code: int, signal_number: int | None, died: bool) -> tuple[dict[str, Any], bytes]:
        """The answer's header and body: stdout, then stderr."""
        out, err = self.out.value(), self.err.value()
        header = {
            "id": self.id, "code": code, "signal": signal_number, "died": died, "fresh": self.fresh,
            "timed_out": self.timed_out, "flooded": self.flooded, "cut": self.out.cut or self.err.cut,
            "out": len(out),
            "totals": [self.out.total + self.out.taken, self.err.total + self.err.taken],
            "duration": time.monotonic() - self.begun,
        }  # fmt: skip
        return header, out + err


def _small(digits: bytes) -> int | None:
    """A number that may be a wait status; None for anything else, however long it is."""
    number = int(digits) if digits.isdigit() and len(digits) <= 5 else None
    return number if number is not None and number <= _STATUS else None


class Program:
    """The supervisor's ends of one program's pipes, and what is going on in them.

    marks      what a session says of itself, and may say as it likes
    ends       what its init says of its end, where no program can write
    stream     talked with: its input ends when it is told so, its output waits for a `reader`
    beside     whether others ran when it was started
    finished   of out and err, those that have ended
    said       bytes of marks since its cell began
    acks       ids of calls to be answered once its input has taken all that waits
    """

    def __init__(self, key: int, session: str | None, stream: bool = False, *, beside: bool = False) -> None:
        self.key, self.session, self.stream, self.beside = key, session, stream, beside
        self.input_ends = session is None and not stream
        self.finished: set[int] = set()
        self.reader = 0
        self.acks: list[int] = []
        self.call: Call | None = None
        self.ready = session is None
        self.killed = False
        self.cells = self.said = 0
        self.waiting = memoryview(b"")  # bytes still to be written to its input
        self._marks = b""
        theirs_in, self.input = os.pipe()
        self.out, theirs_out = os.pipe()
        self.err, theirs_err = os.pipe()
        self.ends, theirs_ends = os.pipe()
        self.theirs = [theirs_in, theirs_out, theirs_err, theirs_ends]
        self.marks = -1
        if session is not None:
            self.marks, theirs_marks = os.pipe()
            self.theirs.append(theirs_marks)
        for fd in self.descriptors():
            os.set_blocking(fd, False)

    def descriptors(self) -> list[int]:
        """Ours that are open."""
        return [fd for fd in (self.input, self.out, self.err, self.ends, self.marks) if fd >= 0]

    def hand_over(self) -> None:
        """The program has its ends: drop ours of the same."""
        for fd in self.theirs:
            os.close(fd)

    def begin(self, call: Call, body: bytes) -> None:
        """Give it its stdin, or the next cell."""
        self.call = call
        if self.session is not None:
            self.cells += 1
            self.said = 0
            call.number = self.cells
            body = struct.pack(">II", len(body), self.cells) + body
        self.waiting = memoryview(body)

    def feed(self) -> bool:
        """Write what its input takes now; True when nothing is left to write."""
        if not self.waiting:
            return True
        try:
            self.waiting = self.waiting[os.write(self.input, self.waiting[:_PIECE]) :]
        except BlockingIOError:
            return False
        except OSError:  # it closed its input
            self.waiting = memoryview(b"")
        return not self.waiting

    def absorb(self, fd: int) -> bool:
        """Take output that is there now; False at its end."""
        try:
            data = os.read(fd, _PIECE)
        except BlockingIOError:
            return True
        if self.call is not None:
            self._kept(self.call, fd).add(data)
        if not data:
            self.finished.add(fd)
        return bool(data)

    def over_limit(self) -> bool:
        """Whether the current call has written more than it may."""
        call = self.call
        return call is not None and not self.stream and call.out.total + call.err.total > call.flood

    def talks_too_much(self) -> bool:
        """Whether it has marked more than any session needs to; reading that is the agent's time."""
        return self.said > _SAID

    def full(self, fd: int) -> bool:
        """Whether a stream holds as much as it may until somebody takes it."""
        call = self.call
        return call is not None and self.stream and self._kept(call, fd).total >= call.cap

    def _kept(self, call: Call, fd: int) -> Kept:
        return call.out if fd == self.out else call.err

    def pending(self) -> bool:
        """Whether there is output to be taken."""
        return self.call is not None and self.call.out.total + self.call.err.total > 0

    def drain(self) -> None:
        """Take what is in the pipes now; bounded, as something may still be writing."""
        for fd in {self.out, self.err} - self.finished:
            for _ in range(_DRAIN):
                try:
                    data = os.read(fd, _PIECE)
                except BlockingIOError:
                    break
                if not data:
                    break
                if self.call is not None:
                    self._kept(self.call, fd).add(data)

    def read_marks(self) -> tuple[int | None, bool]:
        """(exit code of the current cell if its mark came, whether the descriptor ended).

        Whatever a program writes there, this does not raise.
        """
        if self.marks < 0:
            return None, True
        try:
            data = os.read(self.marks, 4096)
        except BlockingIOError:
            return None, False
        self.said += len(data)
        *lines, rest_of_line = (self._marks + data).split(b"\n")
        self._marks = rest_of_line[-_LONGEST_MARK:]
        code = None
        for line in lines:
            word, _, rest = line.partition(b" ")
            number = _small(rest)
            if number is None:
                continue
            if word == b"0":
                self.ready = True
            elif self.call is not None and word == b"%d" % self.call.number:
                code = number & 255
        return code, not data

    def status(self) -> int | None:
        """The program's wait status, once its init has ended; None where it has none or was killed."""
        try:
            word, _, rest = os.read(self.ends, 64).rstrip().partition(b" ")
        except BlockingIOError:
            return None
        return _small(rest) if word == b"exit" else None

    def close(self) -> None:
        """Drop every descriptor of ours."""
        for fd in self.descriptors():
            os.close(fd)
        self.input = self.out = self.err = self.ends = self.marks = -1
