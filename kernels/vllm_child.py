"""What the engine's own process owes the one that started it, where there are two.

vLLM starts that process as a fresh interpreter, which reads its arguments before it does anything else. Among
them is the class of our executor, so this module is imported there before the engine begins, and ties it to
its parent first. Later would be too late: the engine's first act is to shake hands with whoever started it,
and for one who is gone it waits minutes.

Invariants: Ctrl-C on a terminal reaches the run and not its engine, so that the run can still finish its
update; an engine of ours never outlives its run, however and whenever that ended. One that is still importing
vLLM ends when it has.
"""

from __future__ import annotations

import functools
import multiprocessing
import os
import threading
from multiprocessing.connection import wait
from typing import Any

from vllm.v1.engine.core import EngineCoreProc
from vllm.v1.executor.uniproc_executor import UniProcExecutor

from .vllm_settings import kernels_of


class RzExecutor(UniProcExecutor):  # type: ignore[misc]
    """vLLM's executor for one worker in the engine's own process; only its module is ours."""


def belong_to_parent() -> None:
    """Leave the terminal's process group and end with the parent. Nothing in a process without one."""
    parent: Any = multiprocessing.parent_process()
    if parent is None:
        return
    os.setpgid(0, 0)
    threading.Thread(target=_end_with, args=(parent.sentinel,), name="rz-parent", daemon=True).start()


def _end_with(sentinel: int) -> None:
    wait([sentinel])
    os._exit(1)  # no clean-up: whoever would wait for it is gone


def leave_launcher() -> None:
    """Forget torchrun, whose environment this process inherits; nothing in a process without a parent.

    torch would take the engine's own store for torchrun's, which is served by another process: on CUDA, where
    vLLM's world of one meets at a port, the engine would wait there for a server that nobody starts.
    """
    if multiprocessing.parent_process() is not None:
        os.environ.pop("TORCHELASTIC_USE_AGENT_STORE", None)


def _tie_engines() -> None:
    """Each engine of ours in a process of its own belongs to its parent before it begins."""
    begin = EngineCoreProc.__init__

    @functools.wraps(begin)
    def begin_tied(core: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        if kernels_of(vllm_config) is not None:
            belong_to_parent()
            leave_launcher()
        begin(core, vllm_config, *args, **kwargs)

    EngineCoreProc.__init__ = begin_tied


_tie_engines()
