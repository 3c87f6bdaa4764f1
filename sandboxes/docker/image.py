"""The image of a sandbox: there, or pulled once, with progress in the log and a failure that says what to do.

Waits: every `create` for the one pull of its image. A cancelled pull stops at its next line of progress.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from dataclasses import dataclass
from typing import Any, Literal

from ..errors import CreateError, Misconfigured, SandboxError
from .daemon import PROVIDER, Daemon, rate_limited, said

Pull = Literal["missing", "never", "always"]
log = logging.getLogger(__name__)
_EVERY_S = 5.0
_NO_SUCH = (
    "not found", "does not exist", "access denied", "unauthorized", "manifest unknown", "invalid reference",
)  # fmt: skip
_PATH = "/usr/local/bin:/usr/bin:/bin"


@dataclass(frozen=True, slots=True, kw_only=True)
class Image:
    """`id` is what its name meant when it was looked at, `path` the PATH that it sets.

    has_healthcheck   it names a command that would be run again and again
    volumes           folders that it wants to be unbounded places on the daemon's disk
    """

    name: str
    id: str
    path: str
    has_healthcheck: bool
    volumes: tuple[str, ...] = ()


class Images:
    """Images of one daemon, each looked at or pulled once."""

    def __init__(self, daemon: Daemon, pull: Pull) -> None:
        self._daemon, self._pull = daemon, pull
        self._known: dict[str, Image] = {}
        self._locks: dict[str, asyncio.Lock] = {}

    async def get(self, name: str) -> Image:
        """The image; Misconfigured when it cannot be had, CreateError when the registry failed."""
        async with self._locks.setdefault(name, asyncio.Lock()):
            if name not in self._known:
                found = None if self._pull == "always" else await self._daemon.call(lambda c: _look(c, name))
                if found is None:
                    await self._fetch(name)
                    found = await self._daemon.call(lambda c: _look(c, name))
                if found is None:
                    raise CreateError(f"the image {name!r} was pulled and is not there", provider=PROVIDER)
                self._known[name] = found
            return self._known[name]

    def forget(self, name: str) -> None:
        """It has been removed behind our back: look again."""
        self._known.pop(name, None)

    async def _fetch(self, name: str) -> None:
        if self._pull == "never":
            raise Misconfigured(
                f'sandbox.docker.image = {name!r} is not on {self._daemon.host}, and pull = "never"\n'
                f'  docker pull {name}, or write sandbox.docker.pull = "missing".',
                provider=PROVIDER,
            )
        stop = threading.Event()
        pulling = asyncio.create_task(self._daemon.call(lambda client: _pull(client, name, stop)))
        try:
            await asyncio.shield(pulling)
        except asyncio.CancelledError:
            stop.set()
            await asyncio.wait([pulling])
            raise


def _look(client: Any, name: str) -> Image | None:
    from docker.errors import ImageNotFound

    try:
        facts = client.inspect_image(name)
    except ImageNotFound:
        return None
    config = facts.get("Config") or {}
    variables = [text.partition("=") for text in config.get("Env") or []]
    path = next((value for key, _, value in variables if key == "PATH"), _PATH)
    return Image(
        name=name, id=facts["Id"], path=path, has_healthcheck=bool(config.get("Healthcheck")),
        volumes=tuple(config.get("Volumes") or ()),
    )  # fmt: skip


def _pull(client: Any, name: str, stop: threading.Event) -> None:
    import docker.errors
    from docker.utils import parse_repository_tag

    repository, tag = parse_repository_tag(name)
    progress = _Progress(name)
    try:
        for line in client.pull(repository, tag=tag or "latest", stream=True, decode=True):
            if stop.is_set():
                return
            if "error" in line:
                raise _failed(name, line["error"])
            progress.take(line)
    except docker.errors.APIError as error:
        raise _failed(name, said(error)) from error
    log.info("docker image %s: pulled in %.0f s", name, progress.seconds)


class _Progress:
    """One line of the log in five seconds: how much of what is known by now has come."""

    def __init__(self, name: str) -> None:
        self._name, self._begun, self._told = name, time.monotonic(), 0.0
        self._layers: dict[str, tuple[int, int]] = {}
        log.info("docker image %s: pulling", name)

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._begun

    def take(self, line: dict[str, Any]) -> None:
        detail = line.get("progressDetail") or {}
        if line.get("status") == "Downloading" and detail.get("total"):
            self._layers[line.get("id", "")] = (detail["current"], detail["total"])
        if self.seconds - self._told >= _EVERY_S and self._layers:
            self._told = self.seconds
            come, total = (sum(layer[i] for layer in self._layers.values()) / 1e6 for i in (0, 1))
            log.info("docker image %s: %.0f of %.0f MB, %.0f s", self._name, come, total, self.seconds)


def _failed(name: str, text: str) -> SandboxError:
    lower = text.lower()
    if "toomanyrequests" in lower or "rate limit" in lower:
        return rate_limited(text)
    if any(word in lower for word in _NO_SUCH):
        return Misconfigured(
            f"sandbox.docker.image = {name!r} cannot be pulled: {text}\n"
            "  Correct the name, docker login on the daemon's machine, or build the image there and write "
            'sandbox.docker.pull = "never".',
            provider=PROVIDER,
        )
    return CreateError(f"pulling {name!r} failed: {text}", provider=PROVIDER)
