"""Starts untrusted programs in the sandbox: a small interpreter that only ever forks; warm for sessions.

    supervisor --spawn, descriptors--> spawner --fork--> init (PID 1 of a new namespace) --fork--> program
    supervisor <--key, wait status---- spawner           reaps, forwards SIGINT, dies with all below it

    "namespaces"   the init is PID 1 of a namespace
    "container"    the init is a guard (`container.py`)
    "none"         no init: the program is a plain child in its own process group

Invariant: a program inherits nothing but the descriptors made for it and this process's warm modules:
the spawner never holds another program's bytes. It ends when the supervisor's socket does.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import gc
import importlib
import os
import resource
import select
import signal
import site
import socket
import sys
import time
from typing import NoReturn

from . import confine, container, session
from .jobs import Job, Reports, receive_job
from .wire import NOT_PRELOADED


def place(fds: list[int]) -> None:
    """Make `fds` the descriptors 0, 1, 2, ... of this process and close every other one."""
    high = [fcntl.fcntl(fd, fcntl.F_DUPFD, 256) for fd in fds]
    for number, fd in enumerate(high):
        os.dup2(fd, number)
    os.closerange(len(fds), resource.getrlimit(resource.RLIMIT_NOFILE)[0])


def _keep(fd: int) -> int:
    """Close every descriptor but this one; its number from now on."""
    place([fd])
    return 0


def exit_code(status: int) -> int:
    """A wait status as a shell shows it."""
    return os.waitstatus_to_exitcode(status) if status & 127 == 0 else 128 + (status & 127)


def _give_up(errors: int, error: BaseException) -> NoReturn:
    """End a half-made program: it must never return into the spawner's loop."""
    try:
        os.write(errors, f"sandbox: cannot start: {error}\n".encode())
    finally:
        os._exit(126)


def _others(program: int) -> list[int]:
    """In the init: the living processes of its namespace besides itself and the program."""
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit() and int(name) not in (1, program):
            try:
                with open(f"/proc/{name}/stat") as handle:
                    if handle.read().rpartition(")")[2].split()[0] not in "ZX":
                        found.append(int(name))
            except OSError:
                continue
    return found


def _interrupt(program: int) -> None:
    """In the init: SIGKILL for all that the program started, then SIGINT for itself.

    All of them stand still meanwhile: a fork bomb would outrun the list.
    """
    try:
        os.kill(-1, signal.SIGSTOP)
        for _ in range(50):
            others = _others(program)
            for pid in others:  # none can vanish: only this process reaps, and it is here
                os.kill(pid, signal.SIGKILL)
            if not others:
                break
            time.sleep(0.01)
        os.kill(program, signal.SIGINT)
        os.kill(program, signal.SIGCONT)
    except ProcessLookupError:
        pass  # the program itself has just ended, and all else with it


def _posix_spawn(argv: list[str], env: dict[str, str]) -> int:
    """Start what `os.execvpe` would become; its pid. Ends this process where nothing can run."""
    refused: OSError | None = None
    for folder in [""] if "/" in argv[0] else env.get("PATH", os.defpath).split(os.pathsep):
        try:
            path = os.path.join(folder, argv[0])
            os.stat(path)  # cheaper than a process that finds nothing there
            return os.posix_spawn(path, argv, env, setsigdef=[signal.SIGPIPE, signal.SIGINT])
        except OSError as error:
            if refused is None or isinstance(refused, (FileNotFoundError, NotADirectoryError)):
                refused = error
    _cannot_run(argv, refused or FileNotFoundError(errno.ENOENT, "an empty PATH"))


def _cannot_run(argv: list[str], error: OSError) -> NoReturn:
    os.write(2, f"sandbox: cannot run {argv[0]}: {error.strerror}\n".encode())
    os._exit(126 if isinstance(error, PermissionError) else 127)


def _wait_for(program: int, marks: int) -> NoReturn:
    """In the init: reap until the program ends, then tell its status and end all else with it."""
    while True:
        pid, status = os.wait()
        if pid == program:
            os.write(marks, b"exit %d\n" % status)
            os._exit(exit_code(status))


class Spawner:
    """The loop of the spawner process."""

    def __init__(self, channel: socket.socket, settings: Job, rules: bytes | None, *, sessions: bool) -> None:
        self._channel, self._reports, self._of_sessions = channel, Reports(channel), sessions
        self._isolated: bool = settings["isolation"] == "namespaces"
        self._guarded: bool = settings["isolation"] == "container"
        self._cgroups: list[int] = settings["cgroups"]
        self._preload: list[str] = settings["preload"]
        self._bundle: str = settings["bundle"]
        self._filter = None if rules is None else confine.Filter.of(rules)
        self._pids: dict[int, int] = {}  # program key -> its init
        self._own_pids = os.open("/proc/self/ns/pid", os.O_RDONLY) if self._isolated else -1
        # once, for all commands: they see these folders. A session makes its own, over which it has mounted
        self._rules = confine.all_but_proc() if self._isolated else -1

    def run(self) -> None:
        """Until the supervisor is gone."""
        self._warm_up()
        ended, wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self._reports.add({"ready": True})
        try:
            while True:
                ready, room, _ = select.select([self._channel.fileno(), ended], self._reports.waiting, [])
                if room:
                    self._reports.send()
                if ended in ready:
                    os.read(ended, 4096)
                    self._reap()
                if self._channel.fileno() in ready:
                    self._handle(*receive_job(self._channel))
        except (EOFError, ConnectionError):
            for pid in self._pids.values():
                self._signal(pid, signal.SIGKILL)
            self._kill_orphans()

    def _warm_up(self) -> None:
        if not self._isolated:
            confine.prctl(confine.PR_SET_CHILD_SUBREAPER, 1)
        if self._of_sessions:
            self._import_for_sessions()
            gc.collect()
            gc.freeze()

    def _import_for_sessions(self) -> None:
        if self._bundle:
            sys.path.remove(self._bundle)
        site.main()
        for name in self._preload:
            try:
                importlib.import_module(name)
            except Exception as error:
                raise ImportError(f"{NOT_PRELOADED}{name!r}, {error!r}") from error

    def _handle(self, job: Job, fds: list[int]) -> None:
        pid = self._pids.get(job["key"])
        if job["op"] == "spawn":
            self._spawn(job, fds)
        elif pid is not None:
            self._signal(pid, signal.SIGKILL if job["op"] == "kill" else signal.SIGINT)

    def _signal(self, pid: int, number: int) -> None:
        try:
            if self._guarded and number == signal.SIGKILL:
                os.kill(pid, signal.SIGTERM)  # which the guard makes the end of the program
            elif self._isolated or number == signal.SIGINT:
                os.kill(pid, number)
            else:
                os.killpg(pid, number)
        except (ProcessLookupError, PermissionError):
            pass  # it has just ended: SIGCHLD tells the supervisor

    def _kill_orphans(self) -> None:
        """Isolation "none": what left its process group was re-parented to this process; end it too."""
        if self._isolated:
            return
        for name in os.listdir("/proc"):
            try:
                with open(f"/proc/{name}/stat") as handle:
                    parent = int(handle.read().rpartition(")")[2].split()[1])
                if parent == os.getpid():
                    os.kill(int(name), signal.SIGKILL)
            except (OSError, ValueError):
                continue

    def _spawn(self, job: Job, fds: list[int]) -> None:
        if self._guarded:
            signal.pthread_sigmask(signal.SIG_BLOCK, container.STOPS)
        try:
            if self._isolated:
                confine.unshare(confine.CLONE_NEWPID)
            pid = os.fork()
        except OSError as error:  # programs of this sandbox hold all the processes that it has
            os.write(fds[2], f"sandbox: cannot start: {error}\n".encode())
            pid = -1
        if pid == 0:
            self._child(job, fds)
        if self._isolated:
            confine.setns(self._own_pids, confine.CLONE_NEWPID)
        elif self._guarded:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, container.STOPS)
        elif pid > 0:
            self._lead_a_group(pid)
        for fd in fds:
            os.close(fd)
        if pid > 0:
            self._pids[job["key"]] = pid
        else:
            self._reports.add({"key": job["key"], "status": 126 << 8, "begun": False})

    def _lead_a_group(self, pid: int) -> None:
        """This process does it, or the child: once that runs its command, the kernel refuses it here."""
        with contextlib.suppress(PermissionError, ProcessLookupError):
            os.setpgid(pid, pid)

    def _reap(self) -> None:
        keys = {pid: key for key, pid in self._pids.items()}
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid in keys:
                del self._pids[keys[pid]]
                if not self._isolated and not self._guarded:
                    self._signal(pid, signal.SIGKILL)  # the rest of its group
                self._reports.add({"key": keys[pid], "status": status, "begun": True})

    def _child(self, job: Job, fds: list[int]) -> NoReturn:
        try:
            signal.set_wakeup_fd(-1)
            if job["argv"] is None or not self._isolated:
                # dear, as it makes enum members; SIGCHLD interrupts no work of a command's init
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            if self._isolated:
                self._init(job, fds)
            if self._guarded:
                container.guard(job, lambda: _keep(fds[3]), lambda: self._program(job, fds))
            os.setpgid(0, 0)
            if job["cgroup"]:
                confine.join_cgroups(self._cgroups, job["cgroup"])
            self._program(job, fds)
        except BaseException as error:
            _give_up(fds[2], error)

    def _init(self, job: Job, fds: list[int]) -> NoReturn:
        """PID 1 of the program's namespace: prepares it, starts the program, reaps, ends with it."""
        if job["cgroup"]:
            confine.join_cgroups(self._cgroups, job["cgroup"])
        confine.first_victim()
        # commands share the sandbox's network as they do its files: one of each costs a fifth of a short one
        confine.private_mounts(network=job["private"])
        if job["private"]:
            confine.raise_loopback()
            confine.private_files(job["limits"]["disk_mb"])
        os.setsid()
        if job["argv"] is not None:
            self._command(job, fds)
        program = os.fork()
        if program == 0:
            self._program(job, fds)
        place([fds[3]])
        signal.signal(signal.SIGINT, lambda *_: _interrupt(program))
        confine.drop_capabilities()
        _wait_for(program, 0)

    def _command(self, job: Job, fds: list[int]) -> NoReturn:
        """The init of a command confines itself first, so that the command needs no fork of this interpreter.

        A fork copies its page tables, and the exec after it throws the copy away: a fifth of what a short
        command costs. The command has this process's uid then, but can neither signal it (PID 1) nor look
        into it (not dumpable).
        """
        rules = -1 if self._rules < 0 else len(fds)
        place([*fds, self._rules] if self._rules >= 0 else fds)
        try:
            os.set_inheritable(3, False)
            os.chdir(job["cwd"])
            self._confine(job, rules)
            confine.prctl(confine.PR_SET_DUMPABLE, 0)
            program = _posix_spawn(job["argv"], job["env"])
        except BaseException as error:
            _give_up(2, error)
        os.closerange(0, 3)
        _wait_for(program, 3)

    def _program(self, job: Job, fds: list[int]) -> NoReturn:
        """The untrusted program's own process."""
        try:
            self._start(job, fds)
        except BaseException as error:
            _give_up(2, error)

    def _start(self, job: Job, fds: list[int]) -> NoReturn:
        argv: list[str] | None = job["argv"]
        if argv is None:
            place([os.open(os.devnull, os.O_RDONLY), fds[1], fds[2], fds[0], fds[4]])
            os.set_inheritable(3, False)
            os.set_inheritable(4, False)
        else:
            place(fds[:3])
        os.chdir(job["cwd"])
        self._confine(job)
        if argv is None:
            os.environ.clear()
            os.environ.update(job["env"])
            session.serve(3, 4)
        else:
            self._execute(argv, job["env"])

    def _execute(self, argv: list[str], env: dict[str, str]) -> NoReturn:
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        try:
            os.execvpe(argv[0], argv, env)
        except OSError as error:
            _cannot_run(argv, error)

    def _confine(self, job: Job, rules: int | None = None) -> None:
        if self._isolated:
            confine.become_user()
        elif self._guarded:
            confine.first_victim()
            confine.drop_bounding_set()
            confine.become(job["uid"])
        confine.set_limits(job["limits"])
        if self._isolated or self._guarded:
            confine.drop_capabilities()
        confine.no_new_privileges()
        if self._isolated or self._guarded:
            confine.only_read_proc(confine.all_but_proc() if rules is None else rules)
            if self._filter is not None:
                confine.install(self._filter)
