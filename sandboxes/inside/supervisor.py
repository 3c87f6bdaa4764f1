"""The agent: the one trusted process in a sandbox. Standard library only, no host file in sight.

    harness --frames--> supervisor (this file) --jobs--> spawners --fork--> programs
    harness <--answers-- supervisor <--------- pipes of every program ----------/

Many calls are in flight at once, told apart by their id; one loop serves them all, so no program can
make another one wait. The end of the channel, of the harness process, or of the time it was given, is the end
of the agent, and the agent's end is the end of the PID namespace: a sandbox cannot outlive its harness.
A mistake of this file about one program ends that program, one about a request is its answer.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import selectors
import signal
import stat
import sys
import time
import traceback
from collections.abc import Callable
from typing import NoReturn

from . import confine, files, spawners
from .container import Ground, OutOfMemory
from .control import Control
from .jobs import Jobs
from .programs import GRACE_S, START_S, Call, Program
from .spawner import exit_code
from .streams import OPERATIONS, Streams
from .timers import Timers
from .wire import Header

READ, WRITE = selectors.EVENT_READ, selectors.EVENT_WRITE
_FAILURES = {"read": "file", "write": "file", "list": "file", "reset": "reset"}  # of all others: a start
_LONGEST_S = 3600.0  # without a look at the clock; the kernel takes no more than some weeks


class Supervisor:
    """The loop between the harness and the programs."""

    def __init__(
        self, control: Control, commands: Jobs, sessions: Jobs, settings: Header, ground: Ground | None
    ) -> None:
        self._control, self._settings = control, settings
        self._commands, self._session_starts = commands, sessions
        self._ground = ground  # of a container
        self._folders = [*settings["writable"], *settings.get("owned", ())]  # that files may be in
        self._memory = OutOfMemory() if ground else None
        self._streams = Streams(self)
        self._selector = selectors.DefaultSelector()
        self.programs: dict[int, Program] = {}
        self._sessions: dict[str, Program] = {}
        self._next_key = 0
        self._timers = Timers()
        self._after_exit: list[tuple[set[int], Header, Callable[[], None]]] = []
        lifetime = settings["lifetime_s"]
        self._live_until = float("inf") if lifetime is None else time.monotonic() + lifetime
        # before any program could change them
        self._modes = {folder: stat.S_IMODE(os.stat(folder).st_mode) for folder in settings["writable"]}

    def run(self) -> NoReturn:
        """Serve until the harness is gone."""
        for jobs in (self._commands, self._session_starts):
            self._selector.register(jobs.channel, READ, lambda _, jobs=jobs: self._on_reports(jobs))
        if self._settings["owner"] >= 0:
            self._selector.register(self._settings["owner"], READ, lambda _: os._exit(0))
        self._control.serve(self._selector, self._handle)
        while True:
            for key, events in self._selector.select(self._pause()):
                if self._selector.get_map().get(key.fd) is key:  # not dropped by an earlier one of this round
                    key.data(events)

    # -- plumbing ---------------------------------------------------------------------------------------

    def _forget(self, fd: int) -> None:
        if fd >= 0 and fd in self._selector.get_map():
            self._selector.unregister(fd)

    def _serve(self, program: Program, fd: int, then: Callable[[], None], events: int = READ) -> None:
        self._selector.register(fd, events, lambda _: self._guarded(program, then))

    def after(self, seconds: float, program: Program, then: Callable[[], None]) -> None:
        """Do it then, between two rounds of the loop."""
        self._timers.add(seconds, lambda: self._guarded(program, then))

    def _guarded(self, program: Program, then: Callable[[], None]) -> None:
        """What goes wrong there is this program's end and nobody else's."""
        try:
            then()
        except Exception:
            traceback.print_exc()
            for fd in program.descriptors():
                self._forget(fd)
            self._kill(program)

    def _pause(self) -> float:
        """Run what is due; seconds until there may be more. At the end of its time, end."""
        pause, left = self._timers.fire(), self._live_until - time.monotonic()
        if left <= 0:
            os._exit(0)
        return min(pause, left, _LONGEST_S)

    def reply(self, header: Header, body: bytes = b"") -> None:
        """One frame to the harness."""
        self._control.send(header, body)

    def _handle(self, header: Header, body: bytes) -> None:
        who = self._streams if header["op"] in OPERATIONS else self
        handle: Callable[[Header, bytes], None] = getattr(who, "do_" + header["op"])
        self._answered(header, lambda: handle(header, body))

    def _answered(self, header: Header, work: Callable[[], None]) -> None:
        """Work for a request, which is told what goes wrong there."""
        try:
            work()
        except Exception as error:
            if not isinstance(error, (OSError, ValueError)):
                traceback.print_exc()
            kind = _FAILURES.get(header["op"]) or self._no_start()
            if kind == "reset" and isinstance(error, OSError):  # of files as programs have left them
                kind = "hindered"
            self.reply({"id": header["id"], "error": kind, "message": str(error) or repr(error)})

    # -- operations -------------------------------------------------------------------------------------

    def do_ping(self, header: Header, body: bytes) -> None:
        self.reply({"id": header["id"]})

    def do_keepalive(self, header: Header, body: bytes) -> None:
        self._live_until = max(self._live_until, time.monotonic() + header["seconds"])
        self.reply({"id": header["id"]})

    def do_exec(self, header: Header, body: bytes) -> None:
        program = self.start(header, None)
        call = Call(header, fresh=False)
        self.begin(program, call, body)
        self.after(call.timeout, program, lambda: self.overdue(program, call))

    def do_cell(self, header: Header, body: bytes) -> None:
        program = self._sessions.get(header["session"])
        if program is not None and program.killed:  # on its way out: this cell is for the next one
            self.end([program], header, lambda: self.do_cell(header, body))
            return
        fresh = program is None
        if program is None:
            begun = program = self._sessions[header["session"]] = self.start(header, header["session"])
            self.after(START_S, begun, lambda: None if begun.ready else self._kill(begun))
        call = Call(header, fresh)
        self.begin(program, call, body)
        if program.ready:
            self.after(call.timeout, program, lambda: self.overdue(program, call))

    def do_end(self, header: Header, body: bytes) -> None:
        program = self._sessions.get(header["session"])
        doomed = [] if program is None else [program]
        self.end(doomed, header, lambda: self.reply({"id": header["id"]}))

    def do_cancel(self, header: Header, body: bytes) -> None:
        for program in list(self.programs.values()):
            if program.call is not None and program.call.id == header["target"]:
                self._kill(program)

    def do_reset(self, header: Header, body: bytes) -> None:
        def wipe() -> None:
            # in a container as root: a session's folder in one of a command's is closed to commands
            with self._ground.all_files() if self._ground else contextlib.nullcontext():
                for folder, mode in self._modes.items():
                    files.empty(folder, mode)
            self.reply({"id": header["id"]})

        self.end(list(self.programs.values()), header, wipe)

    def do_read(self, header: Header, body: bytes) -> None:
        data = files.read(header["path"], header["max"], self._folders)
        self.reply({"id": header["id"]}, data)

    def do_list(self, header: Header, body: bytes) -> None:
        entries = files.list_folder(header["path"], self._folders)
        self.reply({"id": header["id"]}, json.dumps(entries).encode())

    def do_write(self, header: Header, body: bytes) -> None:
        files.write(header["path"], body, header["mode"], self._folders)
        self.reply({"id": header["id"]})

    # -- programs ---------------------------------------------------------------------------------------

    def start(self, header: Header, session: str | None, stream: bool = False) -> Program:
        """A program that has begun; `begin` gives it its first call."""
        self._next_key += 1
        program = Program(self._next_key, session, stream, beside=bool(self.programs))
        self.programs[program.key] = program
        job = {
            "op": "spawn", "key": program.key, "argv": header.get("argv"), "env": header["env"],
            "cwd": header["cwd"], "limits": header["limits"], "cgroup": header["cgroup"],
            "private": session is not None, "uid": 0, "guard_uid": 0,
        }  # fmt: skip
        if self._ground:
            job["uid"] = self._ground.uid_for(session, list(self._sessions))
            job["guard_uid"] = self._ground.guard_uid(program.key)
        self._jobs(program).send(job, program.theirs)
        program.hand_over()
        if program.marks >= 0:
            self._serve(program, program.marks, lambda: self._on_marks(program))
        return program

    def _no_start(self, *, beside: bool = False) -> str:
        """What a failed start is called: other programs that run, or ran then, may be the reason."""
        closed = not os.access(self._settings["writable"][0], os.X_OK)
        return "hindered" if beside or closed or self.programs else "start"

    def _out_of_memory(self, program: Program, number: int | None) -> bool:
        """Whether the kernel killed for memory meanwhile, and nobody but this program can have been meant."""
        if self._memory is None or not self._memory.end(program.key):
            return False
        if number == signal.SIGKILL and not program.killed:
            return True
        return all(other is program or other.call is None for other in self.programs.values())

    def begin(self, program: Program, call: Call, body: bytes) -> None:
        """It works on this call from now on."""
        if self._memory:
            self._memory.begin(program.key)
        program.begin(call, body)
        for fd in (program.out, program.err):
            self.listen(program, fd)
        self.feed(program)

    def listen(self, program: Program, fd: int) -> None:
        """Take what it writes there."""
        if fd not in self._selector.get_map():
            self._serve(program, fd, lambda: self._on_output(program, fd))

    def feed(self, program: Program) -> None:
        """Give it of its waiting input what it takes."""
        done = program.feed()
        watched = program.input in self._selector.get_map()
        if done and watched:
            self._forget(program.input)
        elif not done and not watched:
            self._serve(program, program.input, lambda: self.feed(program), WRITE)
        if done:
            while program.acks:
                self.reply({"id": program.acks.pop()})
            if program.input_ends:
                os.close(program.input)
                program.input = -1

    def _on_output(self, program: Program, fd: int) -> None:
        # between cells output stays in the pipe, which in the end stops the writer
        if program.call is None or not program.absorb(fd):
            self._forget(fd)
        elif program.over_limit() and not program.call.flooded:
            program.call.flooded = True
            self._stop(program, program.call)
        elif program.stream:
            if program.full(fd):
                self._forget(fd)
            self._streams.hand_out(program)

    def _on_marks(self, program: Program) -> None:
        was_ready = program.ready
        code, ended = program.read_marks()
        call = program.call
        if ended or program.talks_too_much():
            self._forget(program.marks)
        if program.talks_too_much():
            self._kill(program)
            if call is not None:
                call.flooded = True
            return
        if program.ready and not was_ready and call is not None:
            call.begun = time.monotonic()
            self.after(call.timeout, program, lambda: self.overdue(program, call))
        if code is not None and call is not None:
            program.drain()
            header, output = call.result(code, None, died=False)
            self.reply(header | {"oom": self._out_of_memory(program, None)}, output)
            program.call = None

    def overdue(self, program: Program, call: Call) -> None:
        """The call's deadline: stop it, unless it has ended."""
        if program.call is call:
            call.timed_out = True
            self._stop(program, call)

    def _stop(self, program: Program, call: Call) -> None:
        """A command is killed; a cell is interrupted first, which keeps its session's state."""
        if program.session is None:
            self._kill(program)
        elif not call.interrupted:
            call.interrupted = True
            self._jobs(program).send({"op": "interrupt", "key": program.key})
            self.after(GRACE_S, program, lambda: self._kill(program) if program.call is call else None)

    def _kill(self, program: Program) -> None:
        if not program.killed and program.key in self.programs:
            program.killed = True
            self._jobs(program).send({"op": "kill", "key": program.key})

    def end(self, programs: list[Program], header: Header, then: Callable[[], None]) -> None:
        """Kill programs for a request; `then` once all of them are gone."""
        keys = {program.key for program in programs if program.key in self.programs}
        if not keys:
            self._answered(header, then)
            return
        self._after_exit.append((keys, header, then))
        for program in programs:
            self._kill(program)

    def _jobs(self, program: Program) -> Jobs:
        """Of the spawner that started it."""
        return self._commands if program.session is None else self._session_starts

    def _on_reports(self, jobs: Jobs) -> None:
        for message in jobs.reports():
            if "failed" in message:
                raise RuntimeError(f"the spawner ended: {message['failed']}")
            program = self.programs.pop(message["key"], None)
            if program is not None:
                program.ready = program.ready and message["begun"]
                self._gone(program, message["status"])

    def _gone(self, program: Program, status: int) -> None:
        """Everything of this program has ended; answer whoever waits for it."""
        self._guarded(program, lambda: self._hear_out(program))
        told = signal.SIGKILL if program.killed else program.status()
        for fd in program.descriptors():
            self._forget(fd)
        program.close()
        if program.session is not None and self._sessions.get(program.session) is program:
            del self._sessions[program.session]
        if (call := program.call) is not None:
            end = status if told is None else told
            self._answered(call.header, lambda: self._answer_gone(program, call, end))
        for waiting in list(self._after_exit):
            keys, header, then = waiting
            keys.discard(program.key)
            if not keys:
                self._after_exit.remove(waiting)
                self._answered(header, then)

    def _hear_out(self, program: Program) -> None:
        """Take what it has left in its pipes."""
        self._streams.hand_out(program)
        program.read_marks()
        program.drain()
        for ack in program.acks:
            self.reply({"id": ack})

    def _answer_gone(self, program: Program, call: Call, status: int) -> None:
        # whoever runs the programs in its way reads that in a command's result
        failure = "" if program.ready else self._no_start(beside=program.beside)
        if failure == "start" or (failure and program.session is not None):
            message = call.err.value().decode("utf-8", "replace").strip() or "not ready in time"
            self.reply({"id": call.id, "error": failure, "message": message})
            return
        number = status & 127 or None
        header, output = call.result(exit_code(status), number, died=program.session is not None)
        self.reply(header | {"oom": self._out_of_memory(program, number)}, output)


def _prepare(settings: Header) -> Ground | None:
    """What this process has to be before it starts another one."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C is for the harness
    confine.prctl(confine.PR_SET_DUMPABLE, 0)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 65536)), hard))
    if settings["isolation"] == "namespaces":
        confine.shared_files(settings["disk_mb"])
    for fd in settings["join"]:
        os.write(fd, b"0")
        os.close(fd)
    owned = settings.get("owned", ())
    return Ground(settings["writable"], owned) if settings["isolation"] == "container" else None


def main() -> NoReturn:
    """Entry: `argv[1]` names the channel's descriptors; the first frame holds the settings."""
    control = Control.of(sys.argv[1])
    settings, _ = control.first()
    ground = _prepare(settings)
    rules = confine.syscall_filter(guarded=ground is not None)
    commands, sessions = spawners.start(settings, control, rules)
    for fd in settings["cgroups"]:
        os.close(fd)
    if ground:
        ground.use_files_like_programs()
    hello = {**spawners.greeting(commands, sessions), "id": 0, "syscall_filter": rules is not None}
    control.greet(hello)
    if "failed" in hello:
        os._exit(1)
    Supervisor(control, commands, sessions, settings, ground).run()
