"""E2B: the real client against a loopback server of ours (`e2b_loopback.py`), never against E2B."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
import traceback
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from e2b_loopback import KEY, Loopback
from rz_agent.errors import ConfigError
from rz_agent.sandboxes.conformance import PROMISES, Outcome, try_all
from rz_agent.sandboxes.e2b.provider import E2bProvider
from rz_agent.sandboxes.e2b.sandbox import E2bSandbox
from rz_agent.sandboxes.errors import (
    CallTimeout,
    CreateError,
    Died,
    Misconfigured,
    QuotaExceeded,
    RateLimited,
    SandboxError,
)
from rz_agent.sandboxes.owner import LABEL, Owner
from rz_agent.sandboxes.provider import Provider
from rz_agent.sandboxes.secret import Secret
from rz_agent.sandboxes.spec import SandboxSpec
from rz_agent.sandboxes.tables import E2bTable

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.skipif(os.geteuid() != 0, reason="the stand-in for E2B's machines needs root for namespaces"),
]
CREATE, LIST = "POST /v2/sandboxes", "GET /v2/sandboxes"
PROLONG = "POST /sandboxes/ID/timeout"


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def service() -> Iterator[Loopback]:
    with Loopback() as running:
        yield running
        assert not running.machines, "sandboxes were left"


@pytest.fixture
def table(service: Loopback, monkeypatch: pytest.MonkeyPatch) -> E2bTable:
    monkeypatch.setenv("RZ_TEST_KEY", KEY)
    return E2bTable(
        api_key=Secret(env="RZ_TEST_KEY"), api_url=service.url, sandbox_url=service.url, request_s=5
    )


@pytest.fixture
async def provider(table: E2bTable) -> AsyncIterator[E2bProvider]:
    made = E2bProvider(table)
    yield made
    await made.aclose()


@pytest.fixture
async def sandbox(provider: E2bProvider) -> AsyncIterator[E2bSandbox]:
    async with await provider.create(SandboxSpec(labels={"rz.run": "r1"})) as made:
        yield made


async def refused(provider: E2bProvider, spec: SandboxSpec | None = None) -> SandboxError:
    """What `create` raises, in which the key must not be."""
    with pytest.raises(SandboxError) as caught:
        await provider.create(spec or SandboxSpec())
    shown = "".join(traceback.format_exception(caught.value)) + repr(caught.value) + repr(vars(caught.value))
    assert KEY not in shown
    return caught.value


async def dead(call: Any) -> Died:
    with pytest.raises(Died) as caught:
        await asyncio.wait_for(call, 20)
    assert (caught.value.blame, caught.value.retryable) == ("infra", True)
    return caught.value


# -- what it does ---------------------------------------------------------------------------------------


async def test_commands_files_and_state_work_and_bytes_stay_as_they_are(sandbox: E2bSandbox) -> None:
    ran = await sandbox.exec(["sh", "-c", "cat; echo $WORD >&2; exit 3"], stdin=b"\xff\0", env={"WORD": "w"})
    assert (ran.exit_code, ran.stdout, ran.stderr) == (3, b"\xff\0", b"w\n")
    await sandbox.write("a/b.bin", bytes(range(256)))
    assert await sandbox.read("a/b.bin") == bytes(range(256))
    assert [(entry.name, entry.size) for entry in await sandbox.list_dir("a")] == [("b.bin", 256)]
    first = await sandbox.python("x = 41", session="s")
    second = await sandbox.python("x + 1", session="s")
    assert (first.fresh, second.fresh, second.stdout) == (True, False, b"42\n")


async def test_a_started_program_is_talked_with_and_killed_with_what_it_started(sandbox: E2bSandbox) -> None:
    process = await sandbox.start(["sh", "-c", "setsid sleep 61 & cat"])
    await process.write(b"line\n")
    assert (await process.read(timeout_s=10)).stdout == b"line\n"
    await process.kill()
    assert (await process.wait()).signal == 9
    assert b"sleep\x0061" not in (await sandbox.exec(["sh", "-c", "cat /proc/[0-9]*/cmdline"])).stdout


async def test_a_command_past_its_deadline_is_killed_in_the_sandbox(sandbox: E2bSandbox) -> None:
    result = await sandbox.exec(["sh", "-c", "setsid sleep 62 & sleep 63"], timeout_s=0.3)
    assert (result.timed_out, result.signal) == (True, 9)
    assert b"sleep\x0062" not in (await sandbox.exec(["sh", "-c", "cat /proc/[0-9]*/cmdline"])).stdout


async def test_eight_sandboxes_are_made_and_used_side_by_side(provider: E2bProvider) -> None:
    made = await asyncio.gather(*(provider.create(SandboxSpec()) for _ in range(8)))
    results = await asyncio.gather(*(one.exec(["echo", one.id]) for one in made))
    assert [result.stdout.decode().strip() for result in results] == [one.id for one in made]


@pytest.mark.slow
async def test_it_keeps_every_promise_of_a_provider(provider: E2bProvider) -> None:
    outcomes: list[Outcome] = [outcome async for outcome in try_all(provider, PROMISES)]
    assert [f"{o.promise.name}: {o.detail}" for o in outcomes if o.status == "broken"] == []
    assert sum(outcome.status == "kept" for outcome in outcomes) > 60


# -- what the service refuses ---------------------------------------------------------------------------


async def test_a_missing_key_is_said_before_any_request(
    service: Loopback, provider: E2bProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RZ_TEST_KEY")
    monkeypatch.setenv("E2B_API_KEY", KEY)  # which the client would find by itself
    with pytest.raises(ConfigError, match="export RZ_TEST_KEY=") as caught:
        await provider.create(SandboxSpec())
    assert (caught.value.key, service.requests) == ("sandbox.e2b.api_key", [])


async def test_a_refused_key_is_named_by_its_place_and_not_shown(
    service: Loopback, table: E2bTable, tmp_path: Path
) -> None:
    (tmp_path / "key").write_text("e2b_0bad0bad")
    error = await refused(
        E2bProvider(table.model_copy(update={"api_key": Secret(file=str(tmp_path / "key"))}))
    )
    assert (type(error), error.blame) == (Misconfigured, "config")
    assert "sandbox.e2b.api_key" in str(error)
    assert "e2b_0bad0bad" not in "".join(traceback.format_exception(error))


async def test_the_key_is_in_no_attribute_or_label(
    service: Loopback, provider: E2bProvider, sandbox: E2bSandbox
) -> None:
    shown = repr(provider) + repr(vars(provider)) + repr(sandbox) + repr(await provider.live())
    assert KEY not in shown
    assert KEY not in json.dumps(service.machines[sandbox.id].labels)


async def test_too_many_requests_are_tried_again_and_then_an_error_with_the_wait(
    service: Loopback, provider: E2bProvider
) -> None:
    service.fail(CREATE, status=429, headers={"Retry-After": "0"}, times=2)
    async with await provider.create(SandboxSpec()):
        assert service.requests.count(CREATE) == 3
    service.fail(CREATE, status=429, headers={"Retry-After": "77"}, times=9)
    error = await refused(provider)
    assert (type(error), error.retryable, error.retry_after) == (RateLimited, True, 77.0)


async def test_a_full_account_is_told_apart_from_too_many_requests(
    service: Loopback, provider: E2bProvider
) -> None:
    service.most = 0
    assert type(await refused(provider)) is QuotaExceeded


async def test_an_unknown_template_is_a_mistake_of_the_recipe(provider: E2bProvider) -> None:
    error = await refused(provider, SandboxSpec(image="missing"))
    assert (type(error), error.blame) == (Misconfigured, "config")
    assert "sandbox.e2b.template" in str(error)


@pytest.mark.parametrize("fault", [{"status": 502, "times": 9}, {"drop": True}], ids=["502", "dropped"])
async def test_a_create_without_an_answer_can_be_tried_again(
    service: Loopback, provider: E2bProvider, fault: dict[str, Any]
) -> None:
    service.fail(CREATE, **fault)
    error = await refused(provider)
    assert (type(error), error.blame, error.retryable) == (CreateError, "infra", True)


async def test_what_was_made_behind_a_lost_answer_is_found_and_killed(
    service: Loopback, provider: E2bProvider
) -> None:
    service.fail(CREATE, drop=True, after=True)
    assert type(await refused(provider)) is CreateError
    assert "DELETE /sandboxes/ID" in service.requests


START, INPUT = "POST /process.Process/Start", "POST /process.Process/SendInput"


@pytest.mark.parametrize("after", [False, True], ids=["before it is made", "after"])
@pytest.mark.parametrize("step", [CREATE, START, INPUT])
async def test_a_create_cancelled_half_way_leaves_nothing(
    service: Loopback, provider: E2bProvider, step: str, after: bool
) -> None:
    service.fail(step, delay_s=0.5, after=after and step != START)  # its answer has no end
    making = asyncio.create_task(provider.create(SandboxSpec()))
    await asyncio.to_thread(service.wait_until, lambda: step in service.requests)
    making.cancel()
    with pytest.raises(asyncio.CancelledError):
        await making
    assert CREATE in service.requests
    assert not service.machines


async def test_a_create_cancelled_twice_is_undone_by_the_end_of_the_provider(
    service: Loopback, provider: E2bProvider
) -> None:
    service.fail(CREATE, delay_s=0.5, after=True)
    making = asyncio.create_task(provider.create(SandboxSpec()))
    await asyncio.to_thread(service.wait_until, lambda: CREATE in service.requests)
    for _ in range(2):
        making.cancel()
        await asyncio.sleep(0)
    with pytest.raises(asyncio.CancelledError):
        await making
    await provider.aclose()
    assert not service.machines


ODD = {
    "half an answer": {"status": 201, "body": b'{"sandboxID": "i0123'},
    "a page for people": {"body": b"<html><body>Service unavailable</body></html>"},
    "an error's page for people": {"status": 503, "body": b"<html>Service unavailable</html>"},
    "other types": {"status": 201, "body": b'{"sandboxID": 7, "metadata": "none", "startedAt": []}'},
    "a list": {"body": b"[1, null]"},
    "nothing": {"status": 201, "body": b""},
    "nothing after the headers": {"status": 201, "body": b"{", "missing": 9},
}


@pytest.mark.parametrize("fault", ODD.values(), ids=ODD.keys())
async def test_an_answer_that_says_nothing_is_an_infrastructure_failure_and_leaves_nothing(
    service: Loopback, table: E2bTable, fault: dict[str, Any]
) -> None:
    provider = E2bProvider(table.model_copy(update={"request_s": 1}))
    service.fail(CREATE, **fault, times=9, after=True)
    error = await refused(provider)
    assert (type(error), error.blame, error.retryable) == (CreateError, "infra", True)
    assert not service.machines
    await provider.aclose()


async def test_a_list_that_cannot_be_read_is_no_answer(service: Loopback, provider: E2bProvider) -> None:
    for body in (b"<html>", b'[{"sandboxID"', b'[{"sandboxID": 7, "metadata": "none", "startedAt": []}]'):
        service.fail(LIST, body=body)
        with pytest.raises(CallTimeout):
            await provider.live()


# -- how a sandbox ends ---------------------------------------------------------------------------------


async def test_a_sandbox_killed_elsewhere_is_dead_to_every_waiter(
    provider: E2bProvider, sandbox: E2bSandbox
) -> None:
    waiting = [asyncio.create_task(sandbox.exec(["sleep", "60"], timeout_s=60)) for _ in range(3)]
    await asyncio.sleep(0.3)
    assert await provider.kill(sandbox.id)
    assert {(await dead(task)).cause for task in waiting} == {"killed"}
    assert (await dead(sandbox.exec(["true"]))).cause == "killed"
    assert not await sandbox.alive()
    assert not await provider.kill(sandbox.id)


async def test_a_broken_connection_is_a_lost_sandbox_and_it_is_ended(
    service: Loopback, provider: E2bProvider
) -> None:
    async with await provider.create(SandboxSpec()) as sandbox:
        waiting = asyncio.create_task(sandbox.exec(["sleep", "60"], timeout_s=60))
        await asyncio.sleep(0.3)
        service.cut(service.machines[sandbox.id])
        assert (await dead(waiting)).cause == "lost"
    assert not service.machines


async def test_a_gateway_that_does_not_pass_input_on_is_a_lost_sandbox(
    service: Loopback, sandbox: E2bSandbox
) -> None:
    service.fail(INPUT, status=502, message="bad gateway", times=99)
    assert (await dead(sandbox.exec(["true"]))).cause == "lost"


async def test_it_lives_as_long_as_it_is_kept_alive_and_no_longer(service: Loopback, table: E2bTable) -> None:
    provider = E2bProvider(table.model_copy(update={"ttl_s": 2.0}))
    async with await provider.create(SandboxSpec()) as sandbox:
        await asyncio.sleep(2.5)
        assert await sandbox.alive()
        service.fail(PROLONG, status=500, times=99)
        waiting = sandbox.exec(["sleep", "60"], timeout_s=60)
        assert (await dead(waiting)).cause == "expired"


async def test_after_its_lifetime_nothing_prolongs_it(service: Loopback, table: E2bTable) -> None:
    provider = E2bProvider(table.model_copy(update={"ttl_s": 3.0}))
    async with await provider.create(SandboxSpec(lifetime_s=4.0)) as sandbox:
        assert (await dead(sandbox.exec(["sleep", "60"], timeout_s=60))).cause == "expired"


async def test_keeping_it_alive_for_long_does_not_leave_it_for_long(
    service: Loopback, table: E2bTable
) -> None:
    provider = E2bProvider(table.model_copy(update={"ttl_s": 2.0}))
    async with await provider.create(SandboxSpec(lifetime_s=1.0)) as sandbox:
        await sandbox.keepalive(500)
        await asyncio.sleep(2.5)
        assert await sandbox.alive()
        assert service.machines[sandbox.id].ends < time.time() + 4


HARNESS = """
import asyncio, sys
from rz_agent.sandboxes.config import SandboxConfig
from rz_agent.sandboxes.e2b.provider import E2bProvider
from rz_agent.sandboxes.keeper import Keeper
from rz_agent.sandboxes.ledger import Ledger
from rz_agent.sandboxes.limiter import Limiter
from rz_agent.sandboxes.tables import E2bTable

async def main():
    table = E2bTable.model_validate_json(sys.argv[1]).model_copy(update={"ttl_s": 2.0})
    limiter = Limiter("e2b", max_live=1, max_starting=1, creates_per_s=None)
    keeper = Keeper(E2bProvider(table), limiter=limiter, ledger=Ledger())
    made = await keeper.create(SandboxConfig(lifetime_s=2.0).spec())
    await asyncio.sleep(2.5)
    print(await made.alive(), flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


def test_what_a_living_harness_holds_is_kept_alive_and_ends_with_its_ttl_when_that_is_killed(
    service: Loopback, table: E2bTable
) -> None:
    command = [sys.executable, "-c", HARNESS, table.model_dump_json()]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as harness:
        assert harness.stdout is not None
        still_alive = harness.stdout.readline()
        held = len(service.machines)
        harness.kill()
    assert (still_alive, held) == ("True\n", 1)
    begun = time.monotonic()
    service.wait_until(lambda: not service.machines)
    assert time.monotonic() - begun < 4


async def test_a_place_tells_accounts_apart_and_does_not_hold_the_key(
    table: E2bTable, tmp_path: Path
) -> None:
    (tmp_path / "key").write_text("e2b_another")
    ours = E2bProvider(table).place
    theirs = E2bProvider(table.model_copy(update={"api_key": Secret(file=str(tmp_path / "key"))})).place
    assert ours != theirs
    assert ours == E2bProvider(table).place
    assert KEY not in ours
    assert str(table.api_url) in ours


async def test_closing_is_one_end_however_often_and_cancelled(
    service: Loopback, provider: E2bProvider
) -> None:
    sandbox = await provider.create(SandboxSpec())
    service.fail("DELETE /sandboxes/ID", status=502, times=1)
    closing = [asyncio.create_task(sandbox.close()) for _ in range(3)]
    await asyncio.sleep(0)
    closing[0].cancel()
    await asyncio.gather(*closing, return_exceptions=True)
    await sandbox.close()
    assert not service.machines
    assert (await dead(sandbox.exec(["true"]))).cause == "closed"


# -- whose they are -------------------------------------------------------------------------------------


async def test_they_are_listed_by_run_over_all_pages(service: Loopback, provider: E2bProvider) -> None:
    service.page = 2
    for run in ("a", "a", "a", "b"):
        await provider.create(SandboxSpec(labels={"rz.run": run}))
    assert len(await provider.live()) == 4
    infos = await provider.live(run_id="a")
    assert [(info.run_id, info.owner, info.state) for info in infos] == [
        ("a", str(Owner.here()), "running")
    ] * 3


async def test_those_of_dead_owners_are_reaped_and_no_others(
    service: Loopback, provider: E2bProvider
) -> None:
    ours, orphan, foreign = [await provider.create(SandboxSpec()) for _ in range(3)]
    here = Owner.here()
    service.machines[orphan.id].labels[LABEL] = str(Owner(here.host, here.boot, here.pid, "1"))
    service.machines[foreign.id].labels[LABEL] = str(Owner("elsewhere", "00000000", 1, "1"))
    assert await provider.reap() == [orphan.id]
    assert set(service.machines) == {ours.id, foreign.id}
    assert set(await provider.reap(dead_owners=False)) == {ours.id, foreign.id}


async def test_the_check_looks_at_key_service_and_template(service: Loopback, provider: E2bProvider) -> None:
    results = await provider.check()
    assert [(result.name, result.status) for result in results] == [
        ("key", "ok"), ("service", "ok"), ("trial sandbox", "ok"), ("python", "ok"),
    ]  # fmt: skip


async def test_a_check_without_a_key_ends_there_with_the_remedy(
    provider: E2bProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RZ_TEST_KEY")
    (result,) = await provider.check()
    assert (result.name, result.status) == ("key", "failed")
    assert "export RZ_TEST_KEY" in result.remedy


def test_it_is_a_provider_and_says_what_the_template_bounds(table: E2bTable) -> None:
    provider: Provider = E2bProvider(table)
    can = provider.capabilities()
    assert (can.isolates_sessions, can.bounds_total_memory, can.snapshots) == (False, False, True)
    assert any("sandbox.total" in line for line in can.not_bounded)


def test_without_the_packages_it_says_how_to_install_them() -> None:
    code = (
        "import sys; sys.modules['e2b'] = None\n"
        "from rz_agent.sandboxes.errors import Unavailable\n"
        "try: import rz_agent.sandboxes.e2b.provider\n"
        "except Unavailable as error: print(error)"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert 'pip install "rz-agent[e2b]"' in shown.stdout
