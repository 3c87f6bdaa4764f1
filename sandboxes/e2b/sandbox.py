"""One E2B sandbox: an agent in it as root of the virtual machine, at the other end of the service.

What it does is `agent.sandbox`; here is how it is reached, kept alive and ended.
Invariant: the service is told never more than `ttl_s`; a heartbeat prolongs that until it is closed or its
lifetime is over, so a dead harness leaves nothing for longer than the TTL.
Waits: `close` for the service to say that it is gone; if the service cannot be reached, the TTL ends it.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

from ..agent.boot import WRITABLE, settings, sources
from ..agent.sandbox import EXPIRED, AgentSandbox
from ..errors import CreateError, DeathCause, Died, Misconfigured, SandboxError
from ..exec_result import ExecResult
from ..heartbeat import Heartbeat
from ..sandbox import Snapshot
from ..spec import SandboxSpec
from . import sdk
from .agent import AgentProcess
from .failures import explain, words
from .sdk import PROVIDER
from .sessions import Sessions

Answer = TypeVar("Answer")
_START_S = 60.0
_CLOSE_TRIES = 3
_ASK_S = 10.0
# $1 signal, $2 the kernel's pid; it leads its process group
_SIGNAL = 'kill -s "$1" -- "-$2" 2>/dev/null || kill -s "$1" "$2" 2>/dev/null'


class E2bSandbox(AgentSandbox):
    """See `sandbox.Sandbox`. Made by `E2bProvider.create`, which also calls `open`."""

    def __init__(
        self, made: Any, spec: SandboxSpec, *, template: str, preload: Sequence[str], ttl_s: float,
        born: float, kernels: bool, on_close: Callable[[E2bSandbox], None],
    ) -> None:  # fmt: skip
        super().__init__(
            str(made.sandbox_id), provider=PROVIDER, limits=spec.limits, folders=WRITABLE,
            environment={"LANG": "C.UTF-8", **spec.env}, bounded=False, own_uid=True,
            lifetime_s=spec.lifetime_s,
        )  # fmt: skip
        self._made, self._spec, self._template, self._ttl_s = made, spec, template, ttl_s
        self._preload, self._on_close = preload, on_close
        self._until = born + ttl_s  # on the monotonic clock, as far as is known here
        self._agent = AgentProcess(made)
        self._heartbeat: Heartbeat | None = None
        self._kernels = self._of_interpreter() if kernels else None

    async def open(self) -> None:
        """Bring the agent to life, and keep the sandbox alive from now on."""
        self._heartbeat = Heartbeat(self._beat, self._ttl_s, name=self.id)
        writer = await self._asked(self._agent.start("python3"))
        try:
            writer.write(sources())
            await self.channel.open(self._agent, writer, settings(self._spec, self._preload), _START_S)
        except (EOFError, TimeoutError, ValueError) as error:
            failure = await self._not_opened(error)
        else:
            self._environment.setdefault("PATH", self._agent.path)
            return
        raise failure

    async def _not_opened(self, error: Exception) -> SandboxError:
        if self._agent.failure is not None:
            return explain(self._agent.failure, key=self._key, sandbox_id=self.id, making=True)
        if self._agent.error_text:
            return Misconfigured(
                f"template {self._template!r} cannot run the agent: {self._agent.error_text}\n"
                "  It needs Python of at least 3.9 as python3, and unshare of util-linux; put them there, or "
                "name another sandbox.e2b.template.",
                provider=PROVIDER, sandbox_id=self.id,
            )  # fmt: skip
        return CreateError(f"its agent does not answer ({error!r})", provider=PROVIDER, sandbox_id=self.id)

    # -- sessions of the code interpreter, where they are asked for -------------------------------------

    def _of_interpreter(self) -> Sessions:
        return Sessions(
            sandbox=self._made, limits=self._spec.limits, cwd=self.box, env=dict(self._spec.env),
            template=self._template, signal=self._signal, explain=self._explain,
        )  # fmt: skip

    async def python(self, code: str, *, session: str, timeout_s: float | None = None) -> ExecResult:
        """Run one cell; see `sandbox.Sandbox.python`, and `sessions` for those of the code interpreter."""
        if self._kernels is None:
            return await super().python(code, session=session, timeout_s=timeout_s)
        self._require_life()
        seconds = self._limits.timeout_s if timeout_s is None else timeout_s
        return await self._kernels.run(code, session=session, timeout_s=seconds)

    async def end_session(self, session: str) -> None:
        """Stop a session; see `sandbox.Sandbox.end_session`."""
        if self._kernels is None:
            await super().end_session(session)
        else:
            await self._kernels.end(session)

    async def reset(self, *, to: Snapshot | None = None) -> None:
        """As new, or with the files of `to`; see `sandbox.Sandbox.reset`."""
        if self._kernels is not None:
            await self._kernels.end_all()
        await super().reset(to=to)

    async def _signal(self, name: str, pid: int) -> bool:
        async def send() -> bool:
            try:
                command = f"set -- {name} {pid}; {_SIGNAL}"
                await self._made.commands.run(command, user="root", timeout=_ASK_S)
            except sdk.CommandExitException:
                return False
            return True

        return await self._asked(send())

    # -- life -------------------------------------------------------------------------------------------

    async def _prolong(self, seconds: float) -> None:
        now = time.monotonic()
        seconds = math.ceil(max(seconds, self._until - now))  # the service would also shorten a life
        await self._asked(self._made.set_timeout(seconds))
        self._until = now + seconds

    async def _beat(self, ttl_s: float) -> None:
        """The service's clock, until its lifetime is over: that is its agent's to keep."""
        if not self._expired:
            try:
                await self._prolong(ttl_s)
            except Died as error:
                self.channel.fail(error.cause, "it is gone", error)
                raise

    @property
    def _key(self) -> str:
        return str(self._made.connection_config.api_key)

    async def _asked(self, request: Coroutine[Any, Any, Answer]) -> Answer:
        """What the service answers about this sandbox; errors of ours."""
        try:
            return await request
        except sdk.SDK_ERRORS as error:
            failure = explain(error, key=self._key, sandbox_id=self.id)
        raise self._dated(failure)

    def _dated(self, failure: SandboxError) -> SandboxError:
        """The service does not say whether a sandbox was killed or has expired; the clock does."""
        if not isinstance(failure, Died):
            return failure
        if self._closing is not None:
            return Died("it was closed", provider=PROVIDER, sandbox_id=self.id, cause="closed")
        if failure.cause == "killed" and time.monotonic() >= self._until - 1.0:
            return Died("it is gone", provider=PROVIDER, sandbox_id=self.id, cause="expired")
        return failure

    async def _explain(self, error: BaseException) -> SandboxError:
        """The error of ours. Where the SDK's does not say that the sandbox is gone, the service is asked."""
        failure = explain(error, key=self._key, sandbox_id=self.id)
        if not isinstance(failure, Died):
            with contextlib.suppress(SandboxError):
                await self._asked(self._made.get_info(request_timeout=_ASK_S))
                return failure
        return self._dated(failure)

    async def _why_dead(self) -> tuple[DeathCause, str]:
        if self._closing is not None:
            return "closed", "it was closed"
        if self._expired:
            return EXPIRED
        said = words(self._agent.failure, self._key) if self._agent.failure else self._agent.error_text
        try:
            await self._asked(self._made.get_info(request_timeout=_ASK_S))
        except Died as gone:
            return gone.cause, f"it is gone: {said}"
        except SandboxError as error:
            return "lost", f"its agent cannot be reached ({said}), nor the service ({error})"
        return "lost", f"its agent cannot be reached: {said}"

    # -- its end ----------------------------------------------------------------------------------------

    async def _release(self, steps: contextlib.AsyncExitStack) -> None:
        steps.callback(self._on_close, self)
        steps.push_async_callback(self._end)
        steps.push_async_callback(self._agent.forget)
        if self._heartbeat is not None:
            steps.callback(self._heartbeat.stop)

    async def _end(self) -> None:
        """Tell the service; if it does not answer after some tries, the TTL ends the sandbox."""
        for attempt in range(_CLOSE_TRIES):
            try:
                await self._made.kill()
                return
            except sdk.SDK_ERRORS:
                await asyncio.sleep(0.2 * 2**attempt)
