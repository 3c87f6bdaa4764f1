"""The process of `judge.py`: loads what judges, then forks for each connection.

    python -m ....judge_process SOCKET       says READY once calls are taken; ends when its stdin does

One job a connection, {"module", "name", "values", "options", "seconds", "memory"} up to the end of the
stream, and one answer, {"value": ...} or {"error": type, "told": ...}. A child has its own alarm and limits,
and is killed by them without a word.
"""

from __future__ import annotations

import importlib
import json
import os
import resource
import select
import signal
import socket
import sys
from typing import Any

from ...errors import ConfigError
from .metrics.reading import Unreadable

READY = b"ready\n"
_SAID = 2000  # characters of an error
_FILE = 16 << 20  # bytes that a call may write into one file


def main(path: str) -> None:
    """Serve until stdin ends."""
    silent = os.open(os.devnull, os.O_RDWR)
    importlib.import_module(f"{__package__}.getters")
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # children are reaped as they end
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen(128)
        os.write(1, READY)
        while True:
            ready, _, _ = select.select([0, listener.fileno()], [], [])
            if 0 in ready:
                os.killpg(0, signal.SIGKILL)  # it leads a session of its own: its children end with it
            connection, _ = listener.accept()
            with connection:
                try:
                    child = os.fork()
                except OSError as error:
                    told = f"the judge cannot start a process: {error}"
                    connection.sendall(json.dumps({"error": "InfraFailure", "told": told}).encode())
                    continue
                if child == 0:
                    for stream in range(3):
                        os.dup2(silent, stream)
                    _serve(connection)


def _serve(connection: socket.socket) -> None:
    try:
        job = json.loads(b"".join(iter(lambda: connection.recv(1 << 20), b"")))
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, job["seconds"])
        resource.setrlimit(resource.RLIMIT_AS, (job["memory"], job["memory"]))
        resource.setrlimit(resource.RLIMIT_FSIZE, (_FILE, _FILE))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        connection.sendall(json.dumps(_answer(job)).encode())
    finally:
        os._exit(0)


def _answer(job: dict[str, Any]) -> dict[str, Any]:
    try:
        function: Any = importlib.import_module(job["module"])
        for part in job["name"].split("."):
            function = getattr(function, part)
        answer = {"value": function(*job["values"], **job["options"])}
        json.dumps(answer)
        return answer
    except ConfigError as error:
        told = {name: getattr(error, name) for name in ("source", "key", "remedy", "why")}
        return {"error": "ConfigError", "told": {**told, "value": _plain(error.value)}}
    except Unreadable as error:
        return {"error": "Unreadable", "told": {"path": error.path, "why": error.why[:_SAID]}}
    except Exception as error:
        return {"error": type(error).__name__, "told": str(error)[:_SAID]}


def _plain(value: object) -> object:
    return value if isinstance(value, str | int | float | None) else repr(value)


if __name__ == "__main__":
    main(sys.argv[1])
