"""One container: an agent as its first process, at the other end of a connection that the daemon passes on.

What it does is `agent.sandbox`; here is how it ends: with its connection, whoever closes that.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from ..agent.boot import WRITABLE, settings, sources
from ..agent.channel import Incoming
from ..agent.sandbox import EXPIRED, AgentSandbox
from ..errors import DeathCause, SandboxError, Unsupported
from ..sandbox import Snapshot
from ..spec import SandboxSpec
from .attach import Demultiplexer
from .daemon import PROVIDER, Daemon
from .death import cause_of

Remove = Callable[[str], Coroutine[Any, Any, bool]]


class DockerSandbox(AgentSandbox):
    """See `sandbox.Sandbox`. Made by `DockerProvider.create`."""

    def __init__(
        self, name: str, spec: SandboxSpec, daemon: Daemon, path: str, *, preload: Sequence[str],
        remove: Remove, on_close: Callable[[DockerSandbox], None],
    ) -> None:  # fmt: skip
        super().__init__(
            name, provider=PROVIDER, limits=spec.limits, folders=WRITABLE,
            environment={"PATH": path, "LANG": "C.UTF-8", **spec.env},
            # the container bounds memory as a whole: enough where one program may have all of it
            bounded=spec.limits.memory_mb >= spec.total.memory_mb, own_uid=True,
            lifetime_s=spec.lifetime_s,
        )  # fmt: skip
        self._spec, self._daemon, self._remove, self._on_close = spec, daemon, remove, on_close
        self._preload, self._made = preload, time.time()
        self._streams: Demultiplexer | None = None

    async def open(self, connection: socket.socket, timeout_s: float) -> None:
        """Bring the agent to life."""
        reader, writer = await asyncio.open_connection(sock=connection)
        self._streams = Demultiplexer(reader)
        writer.write(sources())
        incoming: Incoming = self._streams
        await self.channel.open(incoming, writer, settings(self._spec, self._preload), timeout_s)

    @property
    def error_text(self) -> str:
        """What the agent, or its Python, said."""
        return "" if self._streams is None else self._streams.error_text

    async def snapshot(self) -> Snapshot:
        """A tar of the writable folders. Unsupported where programs own folders of the image."""
        self._require_no_copies()
        return await super().snapshot()

    async def reset(self, *, to: Snapshot | None = None) -> None:
        """As new. Unsupported where programs own folders of the image: nobody knows what was in them."""
        self._require_no_copies()
        await super().reset(to=to)

    def _require_no_copies(self) -> None:
        if self._spec.owned:
            message = f"its programs own {', '.join(self._spec.owned)}, of which it keeps no other copy"
            raise Unsupported(f"{message}\n  Make a new sandbox.", provider=PROVIDER, sandbox_id=self.id)

    async def _why_dead(self) -> tuple[DeathCause, str]:
        if self._closing is not None:
            return "closed", "it was closed"
        if self._expired:
            return EXPIRED
        try:
            cause, message = await self._daemon.call(cause_of(self.id, self._made))
        except SandboxError as error:
            return "lost", f"its connection ended, and {error}"
        return cause, f"{message} {self.error_text}".strip()

    async def _release(self, steps: contextlib.AsyncExitStack) -> None:
        steps.callback(self._on_close, self)
        steps.push_async_callback(self._remove, self.id)
