"""A sandbox that stands before another one: every call goes to `inner`, and a subclass does more with some.

Waits: as the inner one does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import Self

from .exec_result import ExecResult
from .sandbox import FileEntry, Process, Sandbox, Snapshot


class ForwardingSandbox:
    """See `sandbox.Sandbox`."""

    def __init__(self, inner: Sandbox) -> None:
        self._inner = inner

    @property
    def inner(self) -> Sandbox:
        """The one that does the work."""
        return self._inner

    @property
    def id(self) -> str:
        """Its name, unique for its provider."""
        return self._inner.id

    def _asked(self) -> AbstractContextManager[None]:
        """Around what is asked of its programs and files: a subclass may tell errors otherwise."""
        return nullcontext()

    async def exec(
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
        with self._asked():
            return await self._inner.exec(
                argv, stdin=stdin, env=env, cwd=cwd, timeout_s=timeout_s, output_limit=output_limit
            )

    async def start(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        timeout_s: float | None = None,
        output_limit: int | None = None,
    ) -> Process:
        """Start a command and talk with it."""
        with self._asked():
            return await self._inner.start(
                argv, env=env, cwd=cwd, timeout_s=timeout_s, output_limit=output_limit
            )

    async def python(self, code: str, *, session: str, timeout_s: float | None = None) -> ExecResult:
        """Run one cell of a stateful interpreter."""
        with self._asked():
            return await self._inner.python(code, session=session, timeout_s=timeout_s)

    async def end_session(self, session: str) -> None:
        """Stop an interpreter."""
        await self._inner.end_session(session)

    async def read(self, path: str, *, max_bytes: int = 8 << 20) -> bytes:
        """A file of its writable folders."""
        with self._asked():
            return await self._inner.read(path, max_bytes=max_bytes)

    async def write(self, path: str, data: bytes, *, mode: int = 0o644) -> None:
        """Replace a file."""
        with self._asked():
            await self._inner.write(path, data, mode=mode)

    async def list_dir(self, path: str) -> list[FileEntry]:
        """What lies in a folder."""
        with self._asked():
            return await self._inner.list_dir(path)

    async def snapshot(self) -> Snapshot:
        """Its files as they are now."""
        return await self._inner.snapshot()

    async def reset(self, *, to: Snapshot | None = None) -> None:
        """As new, or with the files of a snapshot."""
        with self._asked():
            await self._inner.reset(to=to)

    async def keepalive(self, ttl_s: float) -> None:
        """It lives for at least that long from now; Died when it does not live."""
        await self._inner.keepalive(ttl_s)

    async def alive(self) -> bool:
        """Whether it answers now."""
        return await self._inner.alive()

    async def close(self) -> None:
        """Stop everything and leave nothing."""
        await self._inner.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()
