"""E2B's own code interpreter for sessions: the real client against a loopback server, never against E2B."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Iterator

import pytest
from e2b_loopback import KEY, Loopback
from rz_agent.sandboxes.e2b.provider import E2bProvider
from rz_agent.sandboxes.e2b.sandbox import E2bSandbox
from rz_agent.sandboxes.errors import Died, Misconfigured
from rz_agent.sandboxes.secret import Secret
from rz_agent.sandboxes.spec import Limits, SandboxSpec
from rz_agent.sandboxes.tables import E2bTable

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.skipif(os.geteuid() != 0, reason="the stand-in for E2B's machines needs root for namespaces"),
]


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> Iterator[E2bTable]:
    monkeypatch.setenv("RZ_TEST_KEY", KEY)
    with Loopback() as service:
        yield E2bTable(
            api_key=Secret(env="RZ_TEST_KEY"), api_url=service.url, sandbox_url=service.url,
            sessions="interpreter", template="code-interpreter-v1",
        )  # fmt: skip
        assert not service.machines, "sandboxes were left"


@pytest.fixture
async def kernels(table: E2bTable) -> AsyncIterator[E2bSandbox]:
    async with await E2bProvider(table).create(
        SandboxSpec(limits=Limits(flood_bytes=1 << 20), env={"W": "w"})
    ) as made:
        yield made


async def test_the_interpreter_keeps_state_echoes_and_shows_its_traceback(kernels: E2bSandbox) -> None:
    first = await kernels.python("import os\nx = 41\nprint('said')\nos.environ['W']", session="s")
    assert (first.stdout, first.fresh) == (b"said\n'w'\n", True)
    failed = await kernels.python("x / 0", session="s")
    assert (failed.exit_code, failed.fresh) == (1, False)
    assert failed.stderr.endswith(b"ZeroDivisionError: division by zero\n")
    assert (await kernels.python("x", session="other")).exit_code == 1


async def test_the_interpreter_is_interrupted_first_and_killed_a_second_later(kernels: E2bSandbox) -> None:
    await kernels.python("x = 1", session="s")
    slow = await kernels.python("import time; time.sleep(60)", session="s", timeout_s=0.3)
    assert (slow.timed_out, slow.state_lost, slow.exit_code) == (True, False, 130)
    assert (await kernels.python("x", session="s")).stdout == b"1\n"
    deaf = "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)\nwhile True: pass"
    lost = await kernels.python(deaf, session="s", timeout_s=0.3)
    assert (lost.timed_out, lost.state_lost, lost.signal) == (True, True, 9)
    assert (await kernels.python("'x' in globals()", session="s")).stdout == b"False\n"


async def test_a_kernel_that_dies_or_floods_is_said_to(kernels: E2bSandbox) -> None:
    died = await kernels.python("import os; os._exit(1)", session="a")
    assert (died.state_lost, died.timed_out) == (True, False)
    assert (await kernels.python("1", session="a")).fresh
    flood = await kernels.python("while True: print('y' * 1000)", session="b")
    assert (flood.flooded, flood.truncated, flood.timed_out) == (True, True, False)


async def test_the_end_of_the_sandbox_reaches_a_cell_of_the_interpreter(kernels: E2bSandbox) -> None:
    waiting = asyncio.create_task(kernels.python("import time; time.sleep(60)", session="s", timeout_s=60))
    await asyncio.sleep(0.5)
    await kernels.close()
    with pytest.raises(Died) as caught:
        await asyncio.wait_for(waiting, 20)
    assert caught.value.cause == "closed"


async def test_reset_forgets_the_interpreters_sessions(kernels: E2bSandbox) -> None:
    await kernels.python("x = 1", session="s")
    await kernels.reset()
    again = await kernels.python("'x' in globals()", session="s")
    assert (again.fresh, again.stdout) == (True, b"False\n")


async def test_a_template_without_the_interpreter_is_named_with_the_remedy(table: E2bTable) -> None:
    provider = E2bProvider(table.model_copy(update={"template": "base"}))
    async with await provider.create(SandboxSpec()) as sandbox:
        with pytest.raises(Misconfigured, match=r'sandbox\.e2b\.template = "code-interpreter-v1"'):
            await sandbox.python("1", session="s")
