"""Programs that are talked with while they run.

    start                   a program whose input goes on until it is told to end
    input, output, stop     about a started one, by the number of the call that started it

Invariants: nothing that it writes is dropped; it stands still while nobody takes its output. A reader gets
one answer: what there is, what comes first, or nothing when its time is over or the next reader is there.
Waits: a writer for the program to take its bytes; nobody else.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from .programs import Call, Program
from .wire import Header

OPERATIONS = ("start", "input", "output", "stop")


class Host(Protocol):
    """The supervisor, as far as it is needed here."""

    programs: dict[int, Program]

    def reply(self, header: Header, body: bytes = b"") -> None: ...
    def after(self, seconds: float, program: Program, then: Callable[[], None]) -> None: ...
    def start(self, header: Header, session: str | None, stream: bool = False) -> Program: ...
    def begin(self, program: Program, call: Call, body: bytes) -> None: ...
    def feed(self, program: Program) -> None: ...
    def listen(self, program: Program, fd: int) -> None: ...
    def overdue(self, program: Program, call: Call) -> None: ...
    def end(self, programs: list[Program], header: Header, then: Callable[[], None]) -> None: ...


class Streams:
    """The operations about them, one method each."""

    def __init__(self, host: Host) -> None:
        self._host = host

    def do_start(self, header: Header, body: bytes) -> None:
        """Begin one; the answer is its end."""
        program = self._host.start(header, None, stream=True)
        call = Call(header, fresh=False)
        self._host.begin(program, call, b"")
        if header["timeout"] is not None:  # else it lives as long as the sandbox
            self._host.after(call.timeout, program, lambda: self._host.overdue(program, call))

    def do_input(self, header: Header, body: bytes) -> None:
        """More for its stdin; answered when all has been taken."""
        program = self._started(header)
        if program is None or program.input < 0:
            self._host.reply({"id": header["id"]})
            return
        program.waiting = memoryview(bytes(program.waiting) + body)
        program.input_ends |= header["end"]
        program.acks.append(header["id"])
        self._host.feed(program)

    def do_output(self, header: Header, body: bytes) -> None:
        """A reader comes."""
        program = self._started(header)
        if program is None:
            self._host.reply({"id": header["id"], "ended": True, "out": 0})
            return
        self.hand_out(program)  # a reader that is still there hears that nothing came
        program.reader = header["id"]
        if program.pending() or header["wait"] <= 0:
            self.hand_out(program)
        else:
            self._host.after(header["wait"], program, lambda: self.hand_out(program, header["id"]))

    def do_stop(self, header: Header, body: bytes) -> None:
        """End one; answered when it is gone."""
        program = self._started(header)
        doomed = [] if program is None else [program]
        self._host.end(doomed, header, lambda: self._host.reply({"id": header["id"]}))

    def hand_out(self, program: Program, reader: int | None = None) -> None:
        """Answer the waiting reader (that one, if named) with what is there, and let the program go on."""
        call = program.call
        if not program.reader or call is None or reader not in (None, program.reader):
            return
        out, err = call.out.take(), call.err.take()
        self._host.reply({"id": program.reader, "ended": False, "out": len(out)}, out + err)
        program.reader = 0
        for fd in (program.out, program.err):
            if fd not in program.finished:
                self._host.listen(program, fd)

    def _started(self, header: Header) -> Program | None:
        """The stream that a frame is about, while it lives."""
        for program in self._host.programs.values():
            if program.stream and program.call is not None and program.call.id == header["target"]:
                return program
        return None
