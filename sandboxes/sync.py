"""Sandboxes without `await`, for notebooks and scripts.

    with SyncSandbox.create("local") as box:
        box.exec(["echo", "hello"]).stdout
        box.python("x = 41")
        box.python("x + 1").text

Invariant: each has a thread of its own with an event loop, which ends with `close`; an interrupted call
(Ctrl-C, the notebook's stop button) stops its program and leaves the sandbox usable. One that is forgotten
is closed when the interpreter ends, as far as that can be done then, or by its provider's own switch.
Waits: the caller for its own call.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import threading
from collections.abc import Coroutine, Mapping, Sequence
from concurrent.futures import Future
from types import TracebackType
from typing import Any, Self, TypeVar

from .config import SandboxConfig
from .exec_result import ExecResult
from .keeper import Keeper
from .sandbox import FileEntry, Output, Process, Sandbox, Snapshot

T = TypeVar("T")
AT_EXIT_S = 10.0


class _Loop:
    """A daemon thread that runs an event loop until it is stopped."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="sandbox", daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T], timeout_s: float | None = None) -> T:
        """Its result. A waiting thread that is interrupted cancels the work."""
        future: Future[T] = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result(timeout_s)
        except BaseException:
            future.cancel()
            raise

    def stop(self) -> None:
        """End the thread, and those of the loop's executor."""
        try:
            self.run(self._loop.shutdown_default_executor())
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()


class SyncProcess:
    """See `sandbox.Process`."""

    def __init__(self, process: Process, loop: _Loop) -> None:
        self._process, self._loop = process, loop

    def write(self, data: bytes) -> None:
        """To its stdin."""
        self._loop.run(self._process.write(data))

    def end_input(self) -> None:
        """Its stdin ends here."""
        self._loop.run(self._process.end_input())

    def read(self, *, timeout_s: float = 1.0) -> Output:
        """What it wrote since the last read; waits for some, for its end, or for `timeout_s`."""
        return self._loop.run(self._process.read(timeout_s=timeout_s))

    def wait(self) -> ExecResult:
        """Its end."""
        return self._loop.run(self._process.wait())

    def kill(self) -> None:
        """End it with all that it started."""
        self._loop.run(self._process.kill())


class SyncSandbox:
    """See `sandbox.Sandbox`. Made by `create`."""

    def __init__(self, loop: _Loop, keeper: Keeper, sandbox: Sandbox) -> None:
        self._loop, self._keeper, self._sandbox = loop, keeper, sandbox
        self._closed = False
        atexit.register(self._at_exit)

    @classmethod
    def create(cls, provider: str = "local", **table: Any) -> Self:
        """A new sandbox of a provider; `table` is what stands below `[sandbox]` in a recipe.

        SyncSandbox.create("local", limits={"memory_mb": 1024}, local={"isolation": "none"})
        """
        config = SandboxConfig.load({"provider": provider, **table}, source="SyncSandbox.create")
        loop = _Loop()
        try:
            keeper = Keeper.of(config)
            try:
                return cls(loop, keeper, loop.run(keeper.create(config.spec())))
            except BaseException:
                loop.run(keeper.aclose())
                raise
        except BaseException:
            loop.stop()
            raise

    @property
    def id(self) -> str:
        """Its name, unique for its provider."""
        return self._sandbox.id

    def exec(
        self,
        argv: Sequence[str],
        *,
        stdin: bytes = b"",
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        timeout_s: float | None = None,
        output_limit: int | None = None,
    ) -> ExecResult:
        """Run a command."""
        return self._loop.run(
            self._sandbox.exec(
                argv, stdin=stdin, env=env, cwd=cwd, timeout_s=timeout_s, output_limit=output_limit
            )
        )

    def start(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        timeout_s: float | None = None,
        output_limit: int | None = None,
    ) -> SyncProcess:
        """Start a command and talk with it."""
        starting = self._sandbox.start(argv, env=env, cwd=cwd, timeout_s=timeout_s, output_limit=output_limit)
        return SyncProcess(self._loop.run(starting), self._loop)

    def python(self, code: str, *, session: str = "notebook", timeout_s: float | None = None) -> ExecResult:
        """Run one cell of a stateful interpreter."""
        return self._loop.run(self._sandbox.python(code, session=session, timeout_s=timeout_s))

    def end_session(self, session: str = "notebook") -> None:
        """Stop an interpreter."""
        self._loop.run(self._sandbox.end_session(session))

    def read(self, path: str, *, max_bytes: int = 8 << 20) -> bytes:
        """A file of its writable folders."""
        return self._loop.run(self._sandbox.read(path, max_bytes=max_bytes))

    def write(self, path: str, data: bytes, *, mode: int = 0o644) -> None:
        """Replace a file."""
        self._loop.run(self._sandbox.write(path, data, mode=mode))

    def list_dir(self, path: str = ".") -> list[FileEntry]:
        """What lies in a folder."""
        return self._loop.run(self._sandbox.list_dir(path))

    def snapshot(self) -> Snapshot:
        """Its files as they are now."""
        return self._loop.run(self._sandbox.snapshot())

    def reset(self, *, to: Snapshot | None = None) -> None:
        """As new, or with the files of a snapshot."""
        self._loop.run(self._sandbox.reset(to=to))

    def alive(self) -> bool:
        """Whether it answers now."""
        return not self._closed and self._loop.run(self._sandbox.alive())

    def close(self) -> None:
        """Stop everything and leave nothing. May be called twice."""
        self._close(None)

    def _close(self, timeout_s: float | None) -> None:
        if self._closed:
            return
        self._closed = True
        atexit.unregister(self._at_exit)
        try:
            self._loop.run(self._keeper.aclose(), timeout_s)
        finally:
            self._loop.stop()

    def _at_exit(self) -> None:
        with contextlib.suppress(Exception):
            self._close(AT_EXIT_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
