"""Everything that is used of E2B's packages, in one place: what an upgrade has to be read against.

Of `e2b.envd` no promise is made by E2B; it is what its own `commands.run` is built on (see `agent.py`).
"""

from __future__ import annotations

from ..errors import Unavailable

PROVIDER = "e2b"

try:
    import httpx
    from connectrpc.errors import ConnectError
    from e2b import (
        AuthenticationException,
        CommandExitException,
        InvalidArgumentException,
        RateLimitException,
        SandboxException,
        SandboxNotFoundException,
        SandboxQuery,
        TimeoutException,
    )
    from e2b.connection_config import KEEPALIVE_PING_HEADER, KEEPALIVE_PING_INTERVAL_SEC
    from e2b.envd.client_async import as_stream, create_rpc_client, first_event
    from e2b.envd.process import process_pb
    from e2b.envd.process.process_connect import ProcessClient
    from e2b.envd.rpc import handle_rpc_exception
    from e2b.envd.utils import authentication_header, extract_start_pid
    from e2b.exceptions import (
        SandboxNotRunningException,
        SandboxUnreachableException,
        is_sandbox_port_not_open_message,
    )
    from e2b_code_interpreter import AsyncSandbox
except ImportError as error:
    raise Unavailable(
        f"E2B's packages are not installed ({error})\n"
        '  pip install "rz-agent[e2b]", or requirements/install.sh cpu --with sandboxes.',
        provider=PROVIDER,
    ) from error

# All that a call of the SDK raises. Two of its own errors are no SandboxException, those of the connection
# are let through, and an answer that is not as it should be ends in any error of Python, `Exception` too.
SDK_ERRORS = (Exception,)

__all__ = [
    "KEEPALIVE_PING_HEADER",
    "KEEPALIVE_PING_INTERVAL_SEC",
    "PROVIDER",
    "SDK_ERRORS",
    "AsyncSandbox",
    "AuthenticationException",
    "CommandExitException",
    "ConnectError",
    "InvalidArgumentException",
    "ProcessClient",
    "RateLimitException",
    "SandboxException",
    "SandboxNotFoundException",
    "SandboxNotRunningException",
    "SandboxQuery",
    "SandboxUnreachableException",
    "TimeoutException",
    "as_stream",
    "authentication_header",
    "create_rpc_client",
    "extract_start_pid",
    "first_event",
    "handle_rpc_exception",
    "httpx",
    "is_sandbox_port_not_open_message",
    "process_pb",
]
