"""The two spawners of an agent, as it starts them.

    commands   from an interpreter that has imported no more than the agent itself
    sessions   from one that has imported all that sessions are to find

A command needs nothing of what sessions find imported, and would pay for it with every fork.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import socket
from collections.abc import Callable

from .control import Control
from .jobs import Jobs
from .spawner import Spawner
from .wire import Header


def _start(settings: Header, rules: bytes | None, not_its: Callable[[], None], *, sessions: bool) -> Jobs:
    """`not_its` closes what is of this process alone."""
    ours, theirs = socket.socketpair()
    if os.fork() == 0:
        try:
            ours.close()
            not_its()
            Spawner(theirs, settings, rules, sessions=sessions).run()
        except BaseException as error:
            theirs.sendall(json.dumps({"failed": f"{type(error).__name__}: {error}"}).encode() + b"\n")
        os._exit(1)
    theirs.close()
    return Jobs(ours)


def start(settings: Header, control: Control, rules: bytes | None) -> tuple[Jobs, Jobs]:
    """Of commands and of sessions. `rules` is the system call filter."""
    gc.collect()
    gc.freeze()  # the collector never writes to, and so copies, the pages that all of them share
    with contextlib.ExitStack() as mine:
        mine.callback(control.close)
        if settings["owner"] >= 0:
            mine.callback(os.close, settings["owner"])
        commands = _start(settings, rules, mine.close, sessions=False)
        mine.callback(commands.channel.close)
        sessions = _start(settings, rules, mine.close, sessions=True)
        mine.pop_all()
    return commands, sessions


def greeting(commands: Jobs, sessions: Jobs) -> Header:
    """Wait for both; what they say goes into the agent's greeting."""
    answer: Header = {}
    for jobs in (commands, sessions):
        said = jobs.channel.makefile("rb", buffering=0).readline()
        answer |= json.loads(said or b'{"failed": "spawner ended"}')
    return answer
