"""The processes of one program, as its guard sees them: all that descend from the guard.

A process may leave its group, its session and its parent, but not its guard, which adopts every orphan below
it. While they are looked for they stand still, since a fork bomb would outrun the list; a chain of processes
that fork and end faster than that is ended by its uid, in one call of the kernel.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator

_ROUNDS = 100
_PAUSE_S = 0.005


def _parents() -> dict[int, int]:
    """Of each living process."""
    parents = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError), open(f"/proc/{name}/stat") as handle:
                state, parent = handle.read().rpartition(")")[2].split()[:2]
                if state not in "ZX":
                    parents[int(name)] = int(parent)
    return parents


def below(top: int) -> set[int]:
    """Living processes that descend from `top`."""
    children: dict[int, list[int]] = {}
    for pid, parent in _parents().items():
        children.setdefault(parent, []).append(pid)
    found: set[int] = set()
    wave = children.get(top, [])
    while wave:
        found.update(wave)
        wave = [child for pid in wave for child in children.get(pid, [])]
    return found


class Family:
    """All that descends from this process, of one uid.

    alone     nobody else has that uid
    own_uid   one that no other process has
    """

    def __init__(self, uid: int, *, alone: bool, own_uid: int) -> None:
        self._uid, self._alone, self._own_uid = uid, alone, own_uid

    def end(self) -> None:
        """Kill everything; returns when it is gone."""
        with self._power_over_them_only():
            if not self._killed(spare=0):
                _signal(-1, signal.SIGKILL)  # commands of this sandbox that run now go as well
                self._killed(spare=0)

    def interrupt(self, program: int) -> None:
        """Kill everything but `program`, then interrupt that."""
        with self._power_over_them_only():
            self._killed(spare=program)
            _signal(program, signal.SIGINT)
            _signal(program, signal.SIGCONT)

    @contextlib.contextmanager
    def _power_over_them_only(self) -> Iterator[None]:
        """Signals of this process reach those of their uid and nobody else, and theirs do not reach it.

        A pid that was given away meanwhile may be anybody's. The kernel compares the sender's real and
        effective uid with the receiver's real and saved one.
        """
        os.setresuid(self._own_uid, self._uid, 0)
        try:
            yield
        finally:
            os.setresuid(0, 0, 0)

    def _killed(self, spare: int) -> bool:
        """Whether all but `spare` have ended."""
        for _ in range(_ROUNDS):
            others = self._frozen() - {spare}
            if not others:
                return True
            for pid in others:
                _signal(pid, signal.SIGKILL)
            if self._alone and not spare:
                _signal(-1, signal.SIGKILL)
            time.sleep(_PAUSE_S)
        return False

    def _frozen(self) -> set[int]:
        """All of them, standing still; or as many as could be made to, when new ones come all the time."""
        if self._alone:
            _signal(-1, signal.SIGSTOP)
            return below(os.getpid())
        frozen: set[int] = set()
        for _ in range(_ROUNDS):
            living = below(os.getpid())
            if living <= frozen:
                return living
            for pid in living - frozen:
                _signal(pid, signal.SIGSTOP)
            frozen |= living
        return frozen


def _signal(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)
