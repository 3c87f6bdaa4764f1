"""A sandbox in which several episodes have a session each.

What programs did to it, they did to every episode there: so it is no episode's own failure, but the place's.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence

from .errors import CreateError, Died, Hindered
from .exec_result import ExecResult
from .forwarding import ForwardingSandbox
from .sandbox import FileEntry, Process, Snapshot


class SharedSandbox(ForwardingSandbox):
    """See `sandbox.Sandbox`."""

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
        with _the_places_failure():
            return await super().exec(
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
        with _the_places_failure():
            return await super().start(argv, env=env, cwd=cwd, timeout_s=timeout_s, output_limit=output_limit)

    async def python(self, code: str, *, session: str, timeout_s: float | None = None) -> ExecResult:
        """Run one cell of a stateful interpreter."""
        with _the_places_failure():
            return await super().python(code, session=session, timeout_s=timeout_s)

    async def read(self, path: str, *, max_bytes: int = 8 << 20) -> bytes:
        """A file of its writable folders."""
        with _the_places_failure():
            return await super().read(path, max_bytes=max_bytes)

    async def write(self, path: str, data: bytes, *, mode: int = 0o644) -> None:
        """Replace a file."""
        with _the_places_failure():
            await super().write(path, data, mode=mode)

    async def list_dir(self, path: str) -> list[FileEntry]:
        """What lies in a folder."""
        with _the_places_failure():
            return await super().list_dir(path)

    async def reset(self, *, to: Snapshot | None = None) -> None:
        """As new, or with the files of a snapshot."""
        with _the_places_failure():
            await super().reset(to=to)


@contextlib.contextmanager
def _the_places_failure() -> Iterator[None]:
    try:
        yield
    except Hindered as error:
        raise CreateError(error.message, provider=error.provider, sandbox_id=error.sandbox_id) from error
    except Died as error:
        raise error.again(blame="infra") from error
