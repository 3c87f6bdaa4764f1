"""Sandboxes that are containers of a docker daemon, or of podman's socket.

    create(): image there, or pulled -> container made -> connection attached -> started -> agent says hello

Invariants: one connection holds one container, and its end is the container's (`attach.py`). What is made
before a failure, or a cancellation, is removed before the error leaves `create`.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import socket
import time
from typing import Any

from ..agent.boot import TOO_OLD
from ..errors import CreateError, Misconfigured, SandboxError, Unsupported
from ..owner import EXPIRES_LABEL, LABEL, RUN_LABEL, Owner
from ..provider import Capabilities, CheckResult, SandboxInfo
from ..spec import SandboxSpec
from ..tables import DockerTable
from .attach import Connections, attach
from .container import wish
from .daemon import PROVIDER, REFUSED, Daemon, refusal, said
from .image import Image, Images
from .sandbox import DockerSandbox

START_S = 60.0
_GONE_S = 20.0
_STATES: dict[str, Any] = {"created": "starting", "running": "running", "paused": "paused"}
_NOT_BOUNDED = (
    "memory of a program: the address space of each process, and the container's total for all of them; "
    "where sandbox.limits.memory_mb is not below sandbox.total.memory_mb only the latter",
    "sessions: each has a uid and a closed folder of its own, but /tmp, /dev/shm, the loopback network and "
    "the list of processes are the container's",
    "disk: programs share one sandbox.limits.disk_mb in each of /box, /tmp, /dev/shm and sessions' folders",
    "processes: commands that run at once share one sandbox.limits.pids",
)


class DockerProvider:
    """See `provider.Provider`."""

    name = PROVIDER

    def __init__(self, config: DockerTable) -> None:
        self._config = config
        self._daemon = Daemon(config.host)
        self._images = Images(self._daemon, config.pull)
        self._connections = Connections()
        self._open: dict[str, DockerSandbox] = {}
        self._tasks: set[asyncio.Task[Any]] = set()

    @property
    def place(self) -> str:
        """Its daemon's address; a socket's file means another daemon on each machine."""
        host = self._config.host
        return f"{host} of {socket.gethostname()}" if host.startswith("unix:") else host

    # -- making one -------------------------------------------------------------------------------------

    async def create(self, spec: SandboxSpec) -> DockerSandbox:
        """A new container whose agent answers."""
        image = await self._images.get(spec.image or self._config.image)
        making = self._task(self._make(spec, image))
        try:
            return await asyncio.shield(making)
        except asyncio.CancelledError:
            await asyncio.shield(self._task(_unmake(making)))
            raise

    def _task(self, work: Any) -> asyncio.Task[Any]:
        """One that `aclose` waits for, whoever has given it up."""
        task: asyncio.Task[Any] = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _make(self, spec: SandboxSpec, image: Image) -> DockerSandbox:
        sandbox = DockerSandbox(
            f"rz-{secrets.token_hex(6)}", spec, self._daemon, image.path,
            preload=self._config.preload, remove=self._remove, on_close=self._forget,
        )  # fmt: skip
        self._open[sandbox.id] = sandbox
        try:
            await self._start(sandbox, spec, image)
        except (OSError, EOFError, TimeoutError, ValueError) as error:
            text = sandbox.error_text
            await sandbox.close()
            raise self._explained(text or repr(error), image) from error
        except BaseException:
            await sandbox.close()
            raise
        return sandbox

    async def _start(self, sandbox: DockerSandbox, spec: SandboxSpec, image: Image) -> None:
        connection = await self._daemon.call(lambda client: self._begin(client, sandbox.id, spec, image))
        await sandbox.open(connection, START_S)

    def _begin(self, client: Any, name: str, spec: SandboxSpec, image: Image) -> socket.socket:
        """In a thread: make, attach, start."""
        import docker.errors

        connection = None
        try:
            client.create_container(**wish(client, name, image, spec, self._config))
            connection = attach(client, name)
            self._connections.add(connection)
            client.start(name)
        except docker.errors.APIError as error:
            if connection is not None:
                connection.close()
            if isinstance(error, docker.errors.ImageNotFound):
                self._images.forget(image.name)
            raise self._explained(said(error), image, refused=error.status_code == REFUSED) from error
        return connection

    def _explained(self, text: str, image: Image, *, refused: bool = False) -> SandboxError:
        """Why a container did not start, as far as a person can change it."""
        python = self._config.python
        if "executable file not found" in text or (python in text and "no such file" in text):
            return Misconfigured(
                f"the image sandbox.docker.image = {image.name!r} has no sandbox.docker.python = {python!r}\n"
                "  Name an image with Python of at least 3.9, or where in the image it is.",
                provider=PROVIDER,
            )
        if TOO_OLD in text:
            return Misconfigured(
                f"sandbox.docker.python = {python!r} in {image.name!r} is Python "
                f"{text.rpartition(TOO_OLD)[2]}\n"
                "  Name one of at least 3.9.",
                provider=PROVIDER,
            )
        if "network bridge not found" in text:
            return Unsupported(
                f'sandbox.network.mode = "open": {self._config.host} has no bridge network\n'
                '  Start the daemon with one (no --bridge=none), or write mode = "none".',
                provider=PROVIDER,
            )
        if "nknown runtime" in text or "unknown or invalid runtime" in text:
            return Misconfigured(
                f"sandbox.docker.runtime = {self._config.runtime!r}: {text}\n"
                "  Name one that docker info lists.",
                provider=PROVIDER,
            )
        if refused:
            return refusal(self._config.host, text)
        return CreateError(f"did not start: {text}", provider=PROVIDER)

    def _forget(self, sandbox: DockerSandbox) -> None:
        self._open.pop(sandbox.id, None)

    # -- about all of them ------------------------------------------------------------------------------

    async def live(self, *, run_id: str | None = None) -> list[SandboxInfo]:
        """Those of the daemon, whoever made them."""
        wanted = [LABEL] if run_id is None else [LABEL, f"{RUN_LABEL}={run_id}"]
        found = await self._daemon.call(lambda client: client.containers(all=True, filters={"label": wanted}))
        return [_info(facts) for facts in found]

    async def kill(self, sandbox_id: str) -> bool:
        """Remove its container; returns when it is gone."""
        if all(info.id != sandbox_id for info in await self.live()):
            return False
        return await self._remove(sandbox_id)

    async def reap(self, *, run_id: str | None = None, dead_owners: bool = True) -> list[str]:
        """Remove what dead owners left.

        Of an owner elsewhere nothing is known: its container ends itself in time, and is removed here only
        when that has passed and it has no agent to do so.
        """
        removed = []
        for info in await self.live(run_id=run_id):
            if (_is_orphan(info) or not dead_owners) and await self._remove(info.id):
                removed.append(info.id)
        return sorted(removed)

    async def _remove(self, name: str) -> bool:
        """Whether it was there; returns when it is not."""
        return await self._daemon.call(lambda client: _removed(client, name))

    def capabilities(self) -> Capabilities:
        """The same for every daemon."""
        return Capabilities(
            isolates_files=True,
            isolates_network=True,
            isolates_processes=True,
            isolates_sessions=False,
            bounds_total_memory=True,
            bounds_session_memory=False,
            bounds_pids=True,
            bounds_disk=True,
            filters_syscalls=True,
            images=True,
            snapshots=True,
            open_network=True,
            not_bounded=_NOT_BOUNDED,
        )

    async def check(self) -> list[CheckResult]:
        """The SDK, the daemon, what it bounds, the runtime, the image; then a trial sandbox."""
        from .check import check

        return await check(self, self._daemon, self._config)

    async def aclose(self) -> None:
        """Close every sandbox, and wait for what was being made."""
        try:
            await asyncio.gather(*self._tasks, return_exceptions=True)
            await asyncio.gather(*(sandbox.close() for sandbox in list(self._open.values())))
        finally:
            self._daemon.close()


async def _unmake(making: asyncio.Task[DockerSandbox]) -> None:
    with contextlib.suppress(SandboxError, asyncio.CancelledError):
        await (await making).close()


def _info(facts: dict[str, Any]) -> SandboxInfo:
    labels: dict[str, str] = facts.get("Labels") or {}
    return SandboxInfo(
        id=facts["Names"][0].lstrip("/"),
        provider=PROVIDER,
        state=_STATES.get(facts["State"], "ended"),
        owner=labels.get(LABEL, ""),
        run_id=labels.get(RUN_LABEL, ""),
        age_s=max(0.0, time.time() - float(facts["Created"])),
        labels=labels,
    )


def _is_orphan(info: SandboxInfo) -> bool:
    owner = Owner.parse(info.owner)
    if owner is not None and not owner.is_elsewhere:
        return owner.is_dead
    expires = info.labels.get(EXPIRES_LABEL, "")
    return info.state != "running" and expires.isdigit() and time.time() > int(expires)


def _removed(client: Any, name: str) -> bool:
    import docker.errors

    end = time.monotonic() + _GONE_S
    there = False
    while True:
        try:
            client.remove_container(name, force=True, v=True)
            return True
        except docker.errors.NotFound:
            return there
        except docker.errors.APIError as error:
            # its own end removes it already, which docker calls a conflict and podman an improper state
            if error.status_code not in (409, 500) or time.monotonic() > end:
                raise
            there = True
            time.sleep(0.05)
