"""Grades answers in processes that can be killed, so that no answer can hold up a run.

    await grader.math(gold, answer) -> bool
    await grader.reasoning_gym(dataset, entry, answer) -> float

Invariants: a verdict comes within `deadline_s` and a grace; an answer on which the comparison does not end is
wrong; a worker that dies otherwise is replaced and its job tried once more, and a job that finds no living
worker is an `InfraFailure` (the episode is masked), never a verdict; a library that is missing is an error of
the run. Worker starts do not count as grading.
Waits: a job for an idle worker; a thread for each worker reads its pipe, so no event loop is blocked, and one
grader serves any number of loops.
"""

from __future__ import annotations

import asyncio
import json
import os
import queue
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from ...errors import ConfigError
from ..failure import InfraFailure
from ..hooks import in_thread
from .answers import equal_integers

_WORKER = Path(__file__).with_name("grader_worker.py")
_START_S = 120.0
_GRACE_S = 1.0


class _Died(Exception):
    """The worker ended by itself, or never became ready."""


class _TimedOut(Exception):
    """The job's deadline passed; the worker is gone."""


class Grader:
    """A pool of `workers` processes, started when first needed, or all at once by `warm`.

    deadline_s   wall seconds of one comparison
    """

    def __init__(self, *, workers: int = 2, deadline_s: float = 5.0) -> None:
        self._deadline_s = deadline_s
        self._threads = ThreadPoolExecutor(workers, thread_name_prefix="rz-grader")
        self._slots: queue.SimpleQueue[_Worker] = queue.SimpleQueue()
        self._all = [_Worker() for _ in range(workers)]
        for worker in self._all:
            self._slots.put(worker)

    async def math(self, gold: str, answer: str) -> bool:
        """Whether the answer is the gold answer, written another way."""
        plain = equal_integers(gold.strip(), answer.strip())
        if plain is not None:
            return plain
        return await self._grade({"kind": "math", "gold": gold, "answer": answer}) == 1.0

    async def reasoning_gym(self, dataset: str, entry: Mapping[str, Any], answer: str) -> float:
        """The score that the dataset's own scorer gives, 0 to 1."""
        job = {"kind": "reasoning_gym", "dataset": dataset, "entry": dict(entry), "answer": answer}
        return await self._grade(job)

    async def warm(self) -> None:
        """Start every worker; returns when all are ready."""
        await asyncio.gather(*(asyncio.wrap_future(self._threads.submit(w.start)) for w in self._all))

    async def aclose(self) -> None:
        """End every worker. Idempotent."""
        for worker in self._all:
            worker.stop()
        await in_thread(self._threads.shutdown, cancel_futures=True)
        for worker in self._all:
            worker.bury()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def _grade(self, job: dict[str, Any]) -> float:
        line = json.dumps({**job, "deadline_s": self._deadline_s}).encode() + b"\n"
        # A cancelled caller withdraws a waiting job; a running one ends by its deadline and is not missed.
        return await asyncio.wrap_future(self._threads.submit(self._on_a_worker, line))

    def _on_a_worker(self, line: bytes) -> float:
        worker = self._slots.get()
        try:
            for _ in range(2):
                try:
                    return worker.score(line, self._deadline_s)
                except _TimedOut:
                    return 0.0
                except _Died as error:
                    death = error
            raise InfraFailure(f"the grader died twice on one answer: {death}")
        finally:
            self._slots.put(worker)


class _Worker:
    """One process, started on demand. Used by one thread at a time; `stop` may come from any."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._buffer = b""
        self._stopped = False

    def start(self) -> None:
        """Have a living, warm process; _Died where none can be had, ConfigError without its libraries."""
        if self._process is not None and self._process.poll() is None:
            return
        self.bury()
        if self._stopped:
            raise _Died("the grader is closed")
        threads = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "LANG": "C.UTF-8"}
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(_WORKER)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            # It imports what this process can: libraries need not lie where its interpreter looks.
            env={"PATH": os.defpath, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **threads},
            bufsize=0,
        )
        self._buffer = b""
        self._warm(self._process)

    def score(self, line: bytes, deadline_s: float) -> float:
        """The score of one job. Raises _TimedOut or _Died, with the process killed and reaped."""
        self.start()
        process = self._process
        assert process is not None
        assert process.stdin is not None
        try:
            process.stdin.write(line)
        except OSError as error:
            self.bury()
            raise _Died(str(error)) from error
        self._warm(process)
        return float(json.loads(self._read(process, deadline_s + _GRACE_S))["score"])

    def stop(self) -> None:
        """No more jobs: whoever reads from the process sees its end."""
        self._stopped = True
        if self._process is not None:
            self._process.kill()

    def bury(self) -> None:
        """Kill and reap the process, and close its pipes."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    pipe.close()

    def _warm(self, process: subprocess.Popen[bytes]) -> None:
        """Wait for a line that says that imports are done; their time is nobody's."""
        try:
            said = json.loads(self._read(process, _START_S))
        except _TimedOut as error:
            raise _Died(f"it was not ready within {_START_S:g} s") from error
        if "failed" in said:  # on every answer alike: no episode's bad luck
            self.bury()
            raise ConfigError(
                source="grader",
                key="math-verify",
                value=None,
                why=f"cannot be loaded: {said['failed']}",
                remedy=f"Install the project's requirements for {sys.executable}.",
            )

    def _read(self, process: subprocess.Popen[bytes], limit_s: float) -> bytes:
        """One line of the process's answer."""
        assert process.stdout is not None
        until = time.monotonic() + limit_s
        while b"\n" not in self._buffer:
            ready, _, _ = select.select([process.stdout], [], [], max(0.0, until - time.monotonic()))
            if not ready:
                self.bury()
                raise _TimedOut
            chunk = os.read(process.stdout.fileno(), 65536)
            if not chunk:
                self.bury()
                if process.returncode == -signal.SIGALRM:  # its own alarm is the deadline
                    raise _TimedOut
                raise _Died(f"exit code {process.returncode}")  # memory, a crash
            self._buffer += chunk
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line
