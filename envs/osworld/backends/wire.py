"""Requests to OSWorld's server, with the standard library, in threads.

Invariants: only `get` tries again; every other request is sent exactly once. A request is over by the
deadline, however slowly an answer comes, well or not, and so is its thread once the headers are there; an
answer is at most MAX_ANSWER, of JSON MAX_JSON. No request waits for another's thread.
"""

from __future__ import annotations

import asyncio
import json
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from http.client import HTTPException, IncompleteRead
from typing import Any
from urllib.parse import urlencode
from uuid import uuid4

from ....sandboxes.errors import CallTimeout, Died
from ...threads import Threads

TRIES = 3
PAUSE_S = 0.5
MAX_ANSWER = 256 << 20  # bytes; a file of the policy's may be sparse and of any size
MAX_JSON = 16 << 20  # it is read where every other episode waits
MAX_SAID = 1 << 16
GATEWAY = (502, 503, 504)


class WireFault(Exception):
    """The server answered, and not well: `status`, and what it said; 413 for an answer over MAX_ANSWER."""

    def __init__(self, url: str, status: int, body: str) -> None:
        super().__init__(f"{url} answered {status}")
        self.status, self.body = status, body

    @property
    def told(self) -> bool:
        """Whether the server says in its own words, a JSON object, what it could not do."""
        try:
            return isinstance(json.loads(self.body), dict)
        except (ValueError, RecursionError):
            return False


def lost(message: str) -> Died:
    """The machine is gone, or what answers is no machine."""
    return Died(message, provider="http", sandbox_id="", cause="lost")


def parsed(body: bytes) -> dict[str, Any]:
    """The JSON object of an answer. Died where it is none, WireFault where it is too long to be read."""
    if len(body) > MAX_JSON:
        raise WireFault("the server", 413, f"more than {MAX_JSON >> 20} MiB of JSON")
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise lost(f"it does not answer as OSWorld's server does: {body[:200]!r}")
    return value


class Wire:
    """One server, `http://host:5000`."""

    def __init__(self, server: str) -> None:
        self._server, self._threads = server.rstrip("/"), Threads()
        # a machine of ours is never behind the proxy of the harness's own surroundings
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    async def get(self, path: str, *, timeout_s: float) -> bytes:
        """A look; once more where the connection or the server failed."""
        request = urllib.request.Request(self._server + path)
        for _ in range(TRIES - 1):
            try:
                return await self._send(request, timeout_s)
            except (Died, WireFault):
                await asyncio.sleep(PAUSE_S)
        return await self._send(request, timeout_s)

    async def post(self, path: str, value: object, *, timeout_s: float) -> bytes:
        """JSON there and back."""
        return await self._posted(path, json.dumps(value).encode(), "application/json", timeout_s)

    async def form(self, path: str, fields: Mapping[str, str], *, timeout_s: float) -> bytes:
        """A form's fields."""
        body = urlencode(fields).encode()
        return await self._posted(path, body, "application/x-www-form-urlencoded", timeout_s)

    async def upload(self, path: str, fields: Mapping[str, str], data: bytes, *, timeout_s: float) -> bytes:
        """A form with a file, `file_data`."""
        mark = uuid4().hex
        parts = [
            f'--{mark}\r\nContent-Disposition: form-data; name="{k}"\r\n\r\n{v}\r\n'
            for k, v in fields.items()
        ]
        head = f'--{mark}\r\nContent-Disposition: form-data; name="file_data"; filename="file"\r\n'
        kind = "Content-Type: application/octet-stream\r\n\r\n"
        body = "".join([*parts, head, kind]).encode() + data + f"\r\n--{mark}--\r\n".encode()
        return await self._posted(path, body, f"multipart/form-data; boundary={mark}", timeout_s)

    async def _posted(self, path: str, body: bytes, kind: str, timeout_s: float) -> bytes:
        request = urllib.request.Request(self._server + path, data=body, headers={"Content-Type": kind})
        return await self._send(request, timeout_s)

    async def _send(self, request: urllib.request.Request, timeout_s: float) -> bytes:
        url = request.full_url
        try:
            async with asyncio.timeout(timeout_s):
                return await asyncio.wrap_future(self._threads.started(self._answer, request, timeout_s))
        except TimeoutError:
            message = f"{url} did not answer in {timeout_s:g} s"
            raise CallTimeout(message, provider="http") from None
        except (OSError, HTTPException) as error:  # refused, reset, cut off
            if isinstance(error, urllib.error.URLError) and isinstance(error.reason, TimeoutError):
                message = f"{url} did not answer in {timeout_s:g} s"
                raise CallTimeout(message, provider="http") from error
            raise lost(f"{url}: {error}") from error

    def _answer(self, request: urllib.request.Request, timeout_s: float) -> bytes:
        url, until = request.full_url, time.monotonic() + timeout_s
        try:
            with self._opener.open(request, timeout=timeout_s) as response:
                body = _read(response, MAX_ANSWER, until)
                if len(body) > MAX_ANSWER:
                    raise WireFault(url, 413, f"more than {MAX_ANSWER >> 20} MiB")
                if response.length:
                    raise IncompleteRead(body[:200], response.length)
                return body
        except urllib.error.HTTPError as error:
            with error:
                said = _read(error, MAX_SAID, until)[:MAX_SAID].decode(errors="replace")
            if error.code in GATEWAY:  # said by what stands before the machine, and does not reach it
                raise lost(f"{url} answered {error.code}: {said[:200]}") from error
            raise WireFault(url, error.code, said) from error


def _read(response: Any, most: int, until: float) -> bytes:
    """The body, or a little more than `most` of it. TimeoutError at a time by the monotonic clock."""
    body = bytearray()
    while len(body) <= most and (piece := response.read1(1 << 16)):
        body += piece
        if time.monotonic() > until:
            raise TimeoutError
    return bytes(body)
