"""The docker daemon, or podman's socket: every call in a thread, every failure with its remedy.

Invariants: each request ends by its own timeout. One that was begun is waited for even when its caller is
cancelled, since only then is it known what there is to be undone.
Waits: a caller for its own request, and for one of `_THREADS` threads.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from ..errors import CallTimeout, CreateError, Misconfigured, SandboxError, Unavailable

PROVIDER = "docker"
REQUEST_S = 60.0
REFUSED = 400  # HTTP's "bad request"
_THREADS = 16
_START_IT = (
    '  Start docker, or write where it is: sandbox.docker.host = "unix:///path/to.sock". podman\'s socket\n'
    '  (systemctl --user start podman.socket) is "unix:///run/user/1000/podman/podman.sock".'
)
Answer = TypeVar("Answer")


class Daemon:
    """One daemon. Connects with the first call."""

    def __init__(self, host: str) -> None:
        self.host = host
        self._client: Any = None
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix=PROVIDER)

    async def call(self, work: Callable[[Any], Answer]) -> Answer:
        """`work(client)` in a thread, its failures as `SandboxError`."""
        running = asyncio.get_running_loop().run_in_executor(self._threads, self._work, work)
        try:
            return await asyncio.shield(running)
        except asyncio.CancelledError:
            await asyncio.wait([running])
            raise

    def close(self) -> None:
        """Drop connections and threads; what still runs ends first."""
        self._threads.shutdown(wait=False)
        if self._client is not None:
            self._client.close()

    def _work(self, work: Callable[[Any], Answer]) -> Answer:
        try:
            if self._client is None:
                self._client = connect(self.host, REQUEST_S)
            return work(self._client)
        except SandboxError:
            raise
        except Exception as error:
            raise self.explained(error) from error

    def explained(self, error: Exception) -> SandboxError:
        """What a failure of the SDK means for who uses sandboxes."""
        import docker.errors
        import requests.exceptions

        text = said(error)
        if isinstance(error, requests.exceptions.Timeout):
            return CallTimeout(f"{self.host} did not answer in {REQUEST_S:g} s", provider=PROVIDER)
        if isinstance(error, docker.errors.APIError):
            if error.status_code == 429 or "toomanyrequests" in text:
                return rate_limited(text)
            if error.status_code == REFUSED:
                return refusal(self.host, text)
            return CreateError(f"{self.host} answered {error.status_code}: {text}", provider=PROVIDER)
        if self._client is not None:  # it has answered before: nobody has to change anything
            return CreateError(f"{self.host} answers no more: {text}", provider=PROVIDER)
        return self.unreachable(text)

    def unreachable(self, text: str) -> Unavailable:
        """Nobody answers there, or nobody who may be asked."""
        if "Permission denied" in text:
            remedy = f"  Join the group that owns the socket, or be root.\n{_START_IT}"
        else:
            remedy = _START_IT
        message = f"no daemon answers at sandbox.docker.host = {self.host!r}: {text}\n{remedy}"
        return Unavailable(message, provider=PROVIDER)


def connect(host: str, timeout_s: float) -> Any:
    """The SDK's client. Unavailable without the SDK, Misconfigured for an address that is no channel."""
    try:
        import docker
    except ImportError:
        raise Unavailable(
            "the docker SDK is not installed\n  pip install 'rz-agent[docker]'", provider=PROVIDER
        ) from None
    if not re.match(r"(unix|tcp|http)://", host):
        raise Misconfigured(
            f"sandbox.docker.host = {host!r} is not unix:///path or tcp://host:port\n"
            "  For another machine's daemon bring its socket here,\n"
            "  ssh -N -L /tmp/docker.sock:/var/run/docker.sock user@host, and write\n"
            '  host = "unix:///tmp/docker.sock".',
            provider=PROVIDER,
        )
    return docker.APIClient(base_url=host, version="auto", timeout=timeout_s)


def said(error: Exception) -> str:
    """The daemon's own words, without the SDK's around them."""
    explanation = getattr(error, "explanation", None)
    return str(explanation or error).strip()[:1000]


def refusal(host: str, text: str) -> Misconfigured:
    """What it was asked for cannot be, now or later."""
    message = (
        f"{host} refuses what it is asked for: {text}\n  Correct that in [sandbox.docker] or [sandbox.total]."
    )
    return Misconfigured(message, provider=PROVIDER)


def rate_limited(text: str) -> SandboxError:
    """A registry that wants fewer pulls."""
    from ..errors import RateLimited

    return RateLimited(f"the registry asks for fewer pulls: {text}", provider=PROVIDER, retry_after=60.0)
