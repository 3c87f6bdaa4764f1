"""Sandboxes of E2B's service, or of one's own installation of it, through E2B's own packages.

    create(): request with a token of ours as label and idempotency key -> agent says hello -> kept alive

Invariant: a request that was cancelled or went unanswered leaves nothing: it is let finish and undone, or
what carries its token is found and killed; what escapes even that ends with its TTL, as nobody prolongs it.
The key is read for each request and handed to the SDK; it is in no attribute, message or label of ours.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import math
import time
import uuid
from collections.abc import Coroutine, Mapping
from datetime import UTC, datetime
from typing import Any, TypeVar

from ..errors import RateLimited, SandboxError, Unsupported
from ..owner import EXPIRES_LABEL, LABEL, RUN_LABEL, Owner
from ..provider import Capabilities, CheckResult, SandboxInfo
from ..spec import SandboxSpec
from ..tables import E2bTable
from . import sdk
from .failures import explain
from .sandbox import E2bSandbox
from .sdk import PROVIDER, AsyncSandbox
from .undo import Undoing

Answer = TypeVar("Answer")
DOMAIN = "e2b.app"
MARK = {"rz.provider": PROVIDER}  # what is ours among all that the account has
TOKEN_LABEL = "rz.token"
NOT_BOUNDED = (
    "the whole: memory, processes, cores and disk are the template's; sandbox.total is not passed on",
    "memory of a program: the address space of each process, not their sum",
    "disk: only the size of each file; sandbox.limits.disk_mb bounds no folder",
    "files: programs see the template's whole file system as an unprivileged user",
    "sessions: each has a uid and a closed folder of its own, but /tmp, /dev/shm, the loopback network and "
    "the list of processes are the sandbox's; those of the code interpreter share all of that",
)


class E2bProvider:
    """See `provider.Provider`."""

    name = PROVIDER

    def __init__(self, config: E2bTable) -> None:
        self._config = config
        self._owner = Owner.here()
        self._open: dict[str, E2bSandbox] = {}
        self._undoing = Undoing()

    @property
    def place(self) -> str:
        """Its service, and a hash that tells one key from another. ConfigError when there is no key."""
        options = self._options()
        key = hashlib.sha256(options["api_key"].encode()).hexdigest()[:12]
        return f"{options['api_url']} with key {key}"

    def _options(self) -> dict[str, Any]:
        """Of every request. All that the SDK would otherwise take from the environment is said here."""
        config, domain = self._config, self._config.domain or DOMAIN
        options: dict[str, Any] = {
            "api_key": config.api_key.read(source="sandbox", key="sandbox.e2b.api_key"),
            "domain": domain,
            "api_url": config.api_url or f"https://api.{domain}",
            "debug": False,
            "http_version": "2",
            "request_timeout": config.request_s,
        }
        return options | ({"sandbox_url": config.sandbox_url} if config.sandbox_url else {})

    async def _asked(self, request: Coroutine[Any, Any, Answer], key: str, *, making: bool = False) -> Answer:
        try:
            return await request
        except sdk.SDK_ERRORS as error:
            failure = explain(error, key=key, making=making)
        raise failure

    # -- making one -------------------------------------------------------------------------------------

    async def create(self, spec: SandboxSpec) -> E2bSandbox:
        """A new sandbox of `spec.image`, or else of the configured template."""
        if spec.screen is not None:
            raise Unsupported("has no desktops; use the desktop provider", provider=PROVIDER)
        options = self._options()
        return await self._undoing.make(self._make(spec, options), E2bSandbox.close)

    async def _make(self, spec: SandboxSpec, options: Mapping[str, Any]) -> E2bSandbox:
        token = uuid.uuid4().hex
        template = spec.image or self._config.template
        born = time.monotonic()
        request = AsyncSandbox.create(
            template=template,
            timeout=math.ceil(self._config.ttl_s),
            metadata=self._labels(spec, token),
            envs=dict(spec.env),
            allow_internet_access=spec.network == "open",
            idempotency_key=token,
            **options,
        )
        try:
            made = await self._asked(request, options["api_key"], making=True)
        except SandboxError as error:
            if error.retryable and not isinstance(error, RateLimited):  # it may have been made all the same
                with contextlib.suppress(SandboxError):
                    await self._kill_marked({TOKEN_LABEL: token})
            raise
        sandbox = E2bSandbox(
            made, spec, template=template, preload=self._config.preload, ttl_s=self._config.ttl_s, born=born,
            kernels=self._config.sessions == "interpreter", on_close=self._forget,
        )  # fmt: skip
        self._open[sandbox.id] = sandbox
        try:
            await sandbox.open()
        except BaseException:
            await sandbox.close()
            raise
        return sandbox

    def _labels(self, spec: SandboxSpec, token: str) -> dict[str, str]:
        expires = str(int(time.time() + spec.lifetime_s))
        return {
            **spec.labels, **MARK, LABEL: str(self._owner), EXPIRES_LABEL: expires, TOKEN_LABEL: token,
        }  # fmt: skip

    def _forget(self, sandbox: E2bSandbox) -> None:
        self._open.pop(sandbox.id, None)

    # -- those that exist -------------------------------------------------------------------------------

    async def live(self, *, run_id: str | None = None) -> list[SandboxInfo]:
        """Those of the account that carry our mark."""
        return await self._marked(MARK if run_id is None else {**MARK, RUN_LABEL: run_id})

    async def _marked(self, labels: Mapping[str, str]) -> list[SandboxInfo]:
        options = self._options()
        pages = AsyncSandbox.list(query=sdk.SandboxQuery(metadata=dict(labels)), **options)
        found: list[SandboxInfo] = []
        while pages.has_next:
            page = await self._asked(pages.next_items(), options["api_key"])
            found += [_described(info) for info in page]
        return found

    async def _kill_marked(self, labels: Mapping[str, str]) -> list[str]:
        found = await self._marked(labels)
        return [info.id for info in found if await self.kill(info.id)]

    async def kill(self, sandbox_id: str) -> bool:
        """End one, whoever made it."""
        options = self._options()
        return bool(await self._asked(AsyncSandbox.kill(sandbox_id, **options), options["api_key"]))

    async def reap(self, *, run_id: str | None = None, dead_owners: bool = True) -> list[str]:
        """Those whose owner is known to be dead. Of an unknown owner its TTL is the end."""
        removed = []
        for info in await self.live(run_id=run_id):
            owner = Owner.parse(info.owner)
            if (not dead_owners or (owner is not None and owner.is_dead)) and await self.kill(info.id):
                removed.append(info.id)
        return removed

    # -- about it ---------------------------------------------------------------------------------------

    def capabilities(self) -> Capabilities:
        """What holds for every template: kernels of the code interpreter are not confined by the agent."""
        agent = self._config.sessions == "agent"
        return Capabilities(
            isolates_files=True,
            isolates_network=True,
            isolates_processes=agent,
            isolates_sessions=False,
            bounds_total_memory=False,
            bounds_session_memory=False,
            bounds_pids=agent,
            filters_syscalls=agent,
            images=True,
            snapshots=True,
            open_network=True,
            not_bounded=NOT_BOUNDED,
        )

    async def check(self) -> list[CheckResult]:
        """Look at the key, the service (by listing), and the template (by a trial sandbox)."""
        from .check import check

        return await check(self, self._config)

    async def aclose(self) -> None:
        """Close every sandbox, also those whose making was cancelled."""
        await self._undoing.finish()
        await asyncio.gather(*(sandbox.close() for sandbox in list(self._open.values())))


def _described(info: Any) -> SandboxInfo:
    labels = dict(info.metadata)
    return SandboxInfo(
        id=info.sandbox_id,
        provider=PROVIDER,
        state="paused" if info.state.value == "paused" else "running",
        owner=labels.get(LABEL, ""),
        run_id=labels.get(RUN_LABEL, ""),
        age_s=max(0.0, (datetime.now(UTC) - info.started_at).total_seconds()),
        labels=labels,
    )
