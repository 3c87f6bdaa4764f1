"""A stand-in for E2B's service on this machine: its REST interface, the daemon in a sandbox, the interpreter.

    Loopback        the service: keys, sandboxes with an end of life, faults that a test asks for
    Machine         one sandbox: a bubblewrap namespace in which every command is a real process
    envd            the SDK's own generated server, so that the wire is theirs; see e2b_machine.py

It speaks to the real client and is never E2B: limits, images, timing and the words of errors are ours.
Runs in a thread of its own; needs root, for namespaces whose root is not the programs' user.
"""

from __future__ import annotations

import asyncio
import json
import re
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Self
from urllib.parse import parse_qsl, unquote

import uvicorn
from e2b_machine import Machine, Processes
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.types import Receive, Scope, Send

KEY = "e2b_7e57ab1e5ec2e7"
GONE = {"code": 502, "message": "The sandbox was not found"}
CLOSED_PORT = {"code": 502, "message": "The sandbox is running but port is not open"}


@dataclass(slots=True)
class Fault:
    """What happens to the next `times` requests of one kind: an error, a drop or this body, not the answer,
    `after` the deed or without it; or the deed late, or with `after` only its answer.

    missing   bytes that the headers of the body promise and that never come
    """

    status: int = 0
    message: str = "injected"
    headers: dict[str, str] = field(default_factory=dict)
    drop: bool = False
    body: bytes | None = None
    missing: int = 0
    after: bool = False
    delay_s: float = 0.0
    times: int = 1


class Loopback:
    """The service. `with Loopback() as service:` serves at `service.url` until the end."""

    def __init__(self) -> None:
        self.machines: dict[str, Machine] = {}
        self.requests: list[str] = []
        self.page = 100
        self.most = 100
        self._faults: dict[str, Fault] = {}
        self._made: dict[str, Machine] = {}  # by idempotency key
        self._server = uvicorn.Server(
            uvicorn.Config(self._app(), port=0, log_level="critical", http="h11", lifespan="off")
        )
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._up = threading.Event()
        self.url = ""

    # -- for the test -----------------------------------------------------------------------------------

    def fail(self, kind: str, **fault: Any) -> None:
        """The next requests of a kind ("POST /v2/sandboxes", ids as ID) end as `Fault` says."""
        self._faults[kind] = Fault(**fault)

    def cut(self, machine: Machine) -> None:
        """Break every connection to a sandbox, which lives on."""
        self._loop.call_soon_threadsafe(self._cut, machine)

    def wait_until(self, true: Callable[[], bool], seconds: float = 10.0) -> None:
        end = time.monotonic() + seconds
        while not true():
            assert time.monotonic() < end, "it did not come true"
            time.sleep(0.02)

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._up.wait(20)
        return self

    def __exit__(self, *_: object) -> None:
        self._server.should_exit = self._server.force_exit = True
        self._thread.join(20)
        for machine in list(self.machines.values()):
            machine.end()

    # -- serving ----------------------------------------------------------------------------------------

    def _serve(self) -> None:
        asyncio.run(self._main())

    async def _main(self) -> None:
        self._loop = asyncio.get_running_loop()
        expiring = asyncio.create_task(self._expire())
        serving = asyncio.create_task(self._server.serve())
        while not self._server.started:  # noqa: ASYNC110 - uvicorn has no event for it
            await asyncio.sleep(0.01)
        port = self._server.servers[0].sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self._up.set()
        await serving
        expiring.cancel()

    async def _expire(self) -> None:
        while True:
            await asyncio.sleep(0.05)
            for machine in [m for m in self.machines.values() if m.ends < time.time()]:
                self._end(machine)

    def _end(self, machine: Machine) -> None:
        self.machines.pop(machine.id, None)
        machine.end()
        self._cut(machine)

    def _cut(self, machine: Machine) -> None:
        for transport in list(machine.connections):
            transport.abort()

    def _app(self) -> Callable[..., Any]:
        processes = Processes(self._machine).application()
        rest = Starlette(
            routes=[
                Route("/v2/sandboxes", self._create, methods=["POST"]),
                Route("/v2/sandboxes", self._list),
                Route("/sandboxes/{id}", self._one, methods=["GET", "DELETE"]),
                Route("/sandboxes/{id}/timeout", self._timeout, methods=["POST"]),
                Route("/health", lambda _: Response(status_code=204)),
                Route("/contexts", self._new_context, methods=["POST"]),
                Route("/contexts/{context}", self._end_context, methods=["DELETE"]),
                Route("/execute", self._execute, methods=["POST"]),
                Mount(processes.path, app=_whole_path(processes)),
            ]
        )

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            kind = f"{scope['method']} {re.sub(r'/i[0-9a-f]{18}', '/ID', scope['path'])}"
            self.requests.append(kind)
            fault = self._faults.get(kind)
            if fault is not None and fault.times > 0:
                fault.times -= 1
                await self._faulty(fault, rest, scope, receive, send)
            else:
                await self._guarded(rest, scope, receive, send)

        return app

    async def _faulty(
        self, fault: Fault, app: Callable[..., Any], scope: Scope, receive: Receive, send: Send
    ) -> None:
        answer: Response = JSONResponse(
            {"code": fault.status, "message": fault.message}, fault.status or 200, fault.headers
        )
        held: list[Any] = []
        if fault.after:

            async def hold(message: Any) -> None:
                held.append(message)

            await self._guarded(app, scope, receive, hold, connection=_transport(send))
        await asyncio.sleep(fault.delay_s)
        if fault.drop:
            _transport(send).abort()
        elif fault.body is not None:
            await _odd_answer(fault, fault.body, receive, send)
        elif fault.status:
            await answer(scope, receive, send)
        elif fault.after:
            for message in held:
                await send(message)
        else:
            await self._guarded(app, scope, receive, send)

    async def _guarded(
        self, app: Callable[..., Any], scope: Scope, receive: Receive, send: Send, connection: Any = None
    ) -> None:
        """As the proxies do: the key for the service; for a sandbox that it lives, and its own token."""
        headers = {name.decode().lower(): value.decode() for name, value in scope["headers"]}
        if "sandboxes" in scope["path"]:
            if headers.get("x-api-key") != KEY:
                said = f"Invalid API key {headers.get('x-api-key')}"
                await JSONResponse({"code": 401, "message": said}, 401)(scope, receive, send)
                return
            await app(scope, receive, send)
            return
        machine = self.machines.get(headers.get("e2b-sandbox-id", ""))
        if machine is None:
            await JSONResponse(GONE, 502)(scope, receive, send)
        elif "context" not in scope["path"] and headers.get("x-access-token") != machine.token:
            await JSONResponse({"code": 401, "message": "bad token"}, 401)(scope, receive, send)
        else:
            transport = connection or _transport(send)
            machine.connections.append(transport)
            try:
                await app(scope, receive, send)
            finally:
                machine.connections.remove(transport)

    def _machine(self, headers: Any) -> Machine:
        return self.machines[headers["e2b-sandbox-id"]]

    # -- the service ------------------------------------------------------------------------------------

    async def _create(self, request: Request) -> Response:
        asked, key = await request.json(), request.headers["idempotency-key"]
        if asked["templateID"] == "missing":
            return JSONResponse({"code": 404, "message": "template 'missing' not found"}, 404)
        if len(self.machines) >= self.most and key not in self._made:
            said = f"you have reached the maximum number of concurrent E2B sandboxes ({self.most})"
            return JSONResponse({"code": 429, "message": said}, 429, {"Should-Retry": "false"})
        machine = self._made.get(key)
        if machine is None:
            machine = self._made[key] = await Machine.start(asked)
            self.machines[machine.id] = machine
        return JSONResponse({**machine.facts(), "domain": None}, 201)

    async def _list(self, request: Request) -> Response:
        wanted = {unquote(k): unquote(v) for k, v in parse_qsl(request.query_params.get("metadata", ""))}
        found = [m for m in self.machines.values() if wanted.items() <= m.labels.items()]
        begin = int(request.query_params.get("nextToken", 0))
        end = begin + self.page
        headers = {"X-Next-Token": str(end)} if end < len(found) else {}
        return JSONResponse([machine.facts() for machine in found[begin:end]], headers=headers)

    async def _one(self, request: Request) -> Response:
        machine = self.machines.get(request.path_params["id"])
        if machine is None:
            return JSONResponse({"code": 404, "message": "sandbox not found"}, 404)
        if request.method == "GET":
            return JSONResponse(machine.facts())
        self._end(machine)
        return Response(status_code=204)

    async def _timeout(self, request: Request) -> Response:
        machine = self.machines.get(request.path_params["id"])
        if machine is None:
            return JSONResponse({"code": 404, "message": "sandbox not found"}, 404)
        machine.ends = time.time() + (await request.json())["timeout"]
        return Response(status_code=204)

    # -- in a sandbox -----------------------------------------------------------------------------------

    async def _new_context(self, request: Request) -> Response:
        machine = self._machine(request.headers)
        if machine.template == "base":
            return JSONResponse(CLOSED_PORT, 502)
        cwd = (await request.json())["cwd"]
        context = await machine.new_kernel(cwd)
        return JSONResponse({"id": context, "language": "python", "cwd": cwd})

    async def _end_context(self, request: Request) -> Response:
        self._machine(request.headers).end_kernel(request.path_params["context"])
        return Response(status_code=204)

    async def _execute(self, request: Request) -> Response:
        asked = await request.json()
        kernel = self._machine(request.headers).kernels[asked["context_id"]]
        assert kernel.stdin is not None
        kernel.stdin.write(json.dumps(asked).encode() + b"\n")

        async def lines() -> Any:
            assert kernel.stdout is not None
            while line := await kernel.stdout.readline():
                yield line
                if b'"number_of_executions"' in line:
                    return

        return StreamingResponse(lines(), media_type="application/x-ndjson")


async def _odd_answer(fault: Fault, body: bytes, receive: Receive, send: Send) -> None:
    length = b"%d" % (len(body) + fault.missing)
    headers = [(b"content-type", b"application/json"), (b"content-length", length)]
    await send({"type": "http.response.start", "status": fault.status or 200, "headers": headers})
    await send({"type": "http.response.body", "body": body, "more_body": fault.missing > 0})
    while fault.missing and (await receive())["type"] != "http.disconnect":
        pass


def _whole_path(app: Callable[..., Any]) -> Callable[..., Any]:
    """Under a mount the application shall see the whole path, as it expects."""

    async def inner(scope: Scope, receive: Receive, send: Send) -> None:
        await app({**scope, "root_path": ""}, receive, send)

    return inner


def _transport(send: Any) -> Any:
    """The connection of a request, as uvicorn's own `send` knows it."""
    return send.__self__.transport
