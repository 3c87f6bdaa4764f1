"""What the engine's own process owes the one that started it, where there are two.

Invariants: Ctrl-C on a terminal reaches the run and not its engine, so that the run can still finish its
update; an engine never outlives its run, however that ended.
"""

from __future__ import annotations

import multiprocessing
import os
import threading
from multiprocessing.connection import wait
from typing import Any

_ENGINE_PROCESS = "EngineCore"  # what vLLM calls the processes that it starts for engines


def belong_to_parent() -> None:
    """Leave the terminal's process group and end with the parent. Nothing for an engine without a process."""
    parent: Any = multiprocessing.parent_process()
    if parent is None or not multiprocessing.current_process().name.startswith(_ENGINE_PROCESS):
        return
    os.setpgid(0, 0)
    threading.Thread(target=_end_with, args=(parent.sentinel,), name="rz-parent", daemon=True).start()


def _end_with(sentinel: int) -> None:
    wait([sentinel])
    os._exit(1)  # no clean-up: whoever would wait for it is gone
