"""Local sandboxes where two things happen at once or something runs out.

What was asked has an answer that says who is to blame, and nothing is left behind.
"""

from __future__ import annotations

import asyncio
import json
import os
import resource
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from rz_agent.sandboxes.agent import sandbox as agent_sandbox
from rz_agent.sandboxes.conformance import PROMISES
from rz_agent.sandboxes.errors import CallTimeout, CreateError, Died, FileError, Hindered, SandboxError
from rz_agent.sandboxes.inside.jobs import Reports
from rz_agent.sandboxes.keeper import Keeper
from rz_agent.sandboxes.ledger import Ledger
from rz_agent.sandboxes.limiter import Limiter
from rz_agent.sandboxes.local import census
from rz_agent.sandboxes.local.hierarchy import find_hierarchies
from rz_agent.sandboxes.local.provider import LocalProvider
from rz_agent.sandboxes.local.sandbox import LocalSandbox
from rz_agent.sandboxes.pool import SandboxPool
from rz_agent.sandboxes.shared import SharedSandbox
from rz_agent.sandboxes.spec import Limits, SandboxSpec, Total
from rz_agent.sandboxes.tables import LocalTable

pytestmark = pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not installed")
SPEC = SandboxSpec(limits=Limits(disk_mb=8))


@dataclass(frozen=True)
class Box:
    runner: asyncio.Runner
    provider: LocalProvider
    sandbox: LocalSandbox


@pytest.fixture(scope="module")
def box() -> Iterator[Box]:
    with asyncio.Runner() as runner:
        provider = LocalProvider(LocalTable())
        yield Box(runner, provider, runner.run(provider.create(SPEC)))
        runner.run(provider.aclose())


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


# -- files ------------------------------------------------------------------------------------------------


def test_a_link_through_proc_does_not_lead_into_a_sessions_own_files(box: Box) -> None:
    async def scenario() -> None:
        await box.sandbox.python("open('secret', 'w').write('its own')", session="owner")
        links = "import os\nfor pid in range(1, 64): os.symlink(f'/proc/{pid}/root/box/secret', f'link{pid}')"
        await box.sandbox.exec(["python3", "-I", "-c", links])
        for pid in range(1, 64):
            with pytest.raises(FileError):
                await box.sandbox.read(f"link{pid}")
        await box.sandbox.reset()

    box.runner.run(scenario())


def test_a_name_may_be_as_long_as_the_file_system_takes(box: Box) -> None:
    async def scenario() -> None:
        await box.sandbox.write("n" * 255, b"long")
        assert await box.sandbox.read("n" * 255) == b"long"
        await box.sandbox.reset()

    box.runner.run(scenario())


def test_a_write_that_fails_leaves_nothing_and_takes_no_room(box: Box) -> None:
    async def scenario() -> None:
        with pytest.raises(FileError, match="No space left"):
            await box.sandbox.write("large", bytes(9 << 20))
        with pytest.raises(FileError):
            await box.sandbox.write(".", b"a folder is there")
        assert await box.sandbox.list_dir(".") == []

    box.runner.run(scenario())


def test_a_folder_is_listed_while_a_program_removes_files_in_it(box: Box) -> None:
    churn = (
        "import os\nos.mkdir('busy')\nwhile True:\n"
        "  for i in range(300): open(f'busy/{i}', 'w').close()\n  for i in range(300): os.unlink(f'busy/{i}')"
    )

    async def scenario() -> None:
        program = await box.sandbox.start(["python3", "-I", "-c", churn])
        await asyncio.sleep(0.3)  # until it has made the folder
        for _ in range(300):
            await box.sandbox.list_dir("busy")
        await program.kill()
        await box.sandbox.reset()

    box.runner.run(scenario())


def test_folders_too_deep_to_be_unpacked_are_the_programs_doing(box: Box) -> None:
    dig = "import os\nfor _ in range(30): os.mkdir('d' * 200); os.chdir('d' * 200)\nopen('leaf', 'w')"

    async def scenario() -> None:
        await box.sandbox.exec(["python3", "-I", "-c", dig])
        taken = await box.sandbox.snapshot()
        with pytest.raises(FileError, match="could not be unpacked"):
            await box.sandbox.reset(to=taken)
        await box.sandbox.reset()

    box.runner.run(scenario())


def test_a_snapshot_is_late_for_a_program_beside_it_or_else_for_the_machine(
    box: Box, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agent_sandbox, "PACK_S", 0.0)

    async def scenario() -> None:
        await box.sandbox.reset()
        with pytest.raises(CallTimeout) as alone:
            await box.sandbox.snapshot()
        await box.sandbox.python("1", session="beside")
        with pytest.raises(FileError) as beside:
            await box.sandbox.snapshot()
        assert (alone.value.blame, beside.value.blame) == ("infra", "program")

    box.runner.run(scenario())


# -- sessions and commands --------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["end_session", "reset"])
def test_a_session_that_is_ended_during_a_cell_starts_anew(box: Box, how: str) -> None:
    async def scenario() -> None:
        await box.sandbox.python("1", session="ended")
        cell = asyncio.create_task(box.sandbox.python("import time; time.sleep(60)", session="ended"))
        await asyncio.sleep(0.1)
        await (box.sandbox.end_session("ended") if how == "end_session" else box.sandbox.reset())
        assert (await cell).state_lost
        again = await box.sandbox.python("6 * 7", session="ended")
        assert (again.stdout, again.fresh) == (b"42\n", True)

    box.runner.run(scenario())


def test_a_session_without_its_streams_ends_and_says_so(box: Box) -> None:
    close = "import sys\nsys.stdout.close(); sys.stderr.close()\nprint('unheard')"
    result = box.runner.run(box.sandbox.python(close, session="deaf"))
    assert (result.state_lost, result.exit_code, result.stderr) == (True, 1, b"")


def test_a_deadline_that_is_no_number_is_refused(box: Box) -> None:
    with pytest.raises(ValueError, match="timeout_s = nan"):
        box.runner.run(box.sandbox.exec(["sleep", "60"], timeout_s=float("nan")))


@pytest.mark.skipif(not find_hierarchies(), reason="no cgroups here")
def test_the_cgroup_of_a_cancelled_command_goes_with_the_next_one(box: Box) -> None:
    async def scenario() -> None:
        await box.sandbox.reset()
        for _ in range(3):
            call = asyncio.create_task(box.sandbox.exec(["sleep", "60"]))
            await asyncio.sleep(0.1)
            call.cancel()
            await asyncio.wait([call])
        await asyncio.sleep(0.3)
        await box.sandbox.exec(["true"])

    box.runner.run(scenario())
    tops = [hierarchy.path / box.provider.owner / box.sandbox.id for hierarchy in find_hierarchies()]
    assert [path for top in tops for path in top.glob("p*") if path.is_dir()] == []


def test_a_call_at_the_moment_of_its_sandboxes_end_is_a_sandbox_error(box: Box) -> None:
    async def scenario() -> None:
        sandbox = await box.provider.create(SPEC)
        census.end(sandbox.id)  # and no turn of the loop in which its end could be heard of
        with pytest.raises(SandboxError) as caught:
            await sandbox.exec(["true"])
        assert caught.value.blame == "infra"
        await sandbox.close()

    box.runner.run(scenario())


# -- making one -------------------------------------------------------------------------------------------


def test_a_create_cancelled_at_any_moment_leaves_no_process_and_no_descriptor(box: Box) -> None:
    before = set(census.take_census())

    def left() -> set[str]:
        return {name for name in set(census.take_census()) - before if name.startswith(f"{os.getpid()}-")}

    async def scenario() -> None:
        held = descriptors()
        for pause in (0.001, 0.003, 0.005, 0.007, 0.009, 0.012, 0.016, 0.02):
            making = asyncio.create_task(box.provider.create(SPEC))
            await asyncio.sleep(pause)
            making.cancel()
            await asyncio.wait([making])
            if not making.cancelled():
                await making.result().close()
        assert descriptors() == held

    box.runner.run(scenario())
    end = time.monotonic() + 5
    while left() and time.monotonic() < end:
        time.sleep(0.1)
    assert left() == set()


def test_a_create_without_descriptors_to_spare_is_refused_and_keeps_none(box: Box) -> None:
    async def scenario() -> None:
        held, (soft, hard) = descriptors(), resource.getrlimit(resource.RLIMIT_NOFILE)
        used = {int(name) for name in os.listdir("/proc/self/fd")}
        free = [number for number in range(max(used) + 20) if number not in used]
        for few in (2, 6, 10, 14):
            resource.setrlimit(resource.RLIMIT_NOFILE, (free[few], hard))
            try:
                with pytest.raises(CreateError, match="Too many open files"):
                    await box.provider.create(SPEC)
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            assert descriptors() == held

    box.runner.run(scenario())


@pytest.mark.parametrize("file", ["live/0", "starting/0", "rate"])
def test_a_limit_that_cannot_be_written_down_is_an_infrastructure_failure(
    box: Box, tmp_path: Path, file: str
) -> None:
    limiter = Limiter("local", max_live=1, max_starting=1, creates_per_s=9.0, folder=tmp_path / "limits")
    (tmp_path / "limits" / "local" / file).mkdir()  # as good as a full disk
    keeper = Keeper(box.provider, limiter=limiter, ledger=Ledger(tmp_path / "ledger"))
    with pytest.raises(CreateError, match="cannot be written down") as caught:
        box.runner.run(keeper.create(SPEC))
    assert caught.value.blame == "infra"
    assert list((tmp_path / "ledger").glob("*")) == []


# -- the ends of others -----------------------------------------------------------------------------------


def test_an_agent_whose_harness_has_gone_before_its_greeting_ends_without_a_word() -> None:
    code = (
        "import socket\nfrom rz_agent.sandboxes.inside.control import Control\n"
        "ours, theirs = socket.socketpair()\ncontrol = Control.of(str(ours.detach()))\n"
        "theirs.close()\ncontrol.greet({'ready': True})"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (0, "")


def test_a_trial_of_promises_ends_when_it_is_told_to_while_it_cancels_another_task() -> None:
    promise = next(p for p in PROMISES if p.name == "a create that is cancelled leaves nothing")

    class Slow:
        spec = SPEC

        @property
        def provider(self) -> Slow:
            return self

        async def mine(self) -> set[str]:
            return set()

        async def create(self, spec: SandboxSpec) -> None:
            try:
                await asyncio.sleep(60)
            finally:
                await asyncio.sleep(0.2)  # to undo what was begun

    async def scenario() -> bool:
        trial = asyncio.ensure_future(promise.body(Slow()))  # type: ignore[arg-type]
        await asyncio.sleep(0.1)
        trial.cancel()
        await asyncio.wait([trial])
        return trial.cancelled()

    assert asyncio.run(scenario())


# -- the spawner ------------------------------------------------------------------------------------------


HOLD = (
    "import threading, time\n"
    "try:\n"
    "  for _ in range(70): threading.Thread(target=time.sleep, args=(30,), daemon=True).start()\n"
    "except RuntimeError: pass\n"
)


def test_a_start_that_finds_no_process_is_the_doing_of_programs_that_run_or_else_of_the_place(
    box: Box,
) -> None:
    async def scenario() -> None:
        spec = SandboxSpec(limits=Limits(disk_mb=8, pids=64), total=Total(pids=64))
        async with await box.provider.create(spec) as sandbox:
            await sandbox.python(HOLD, session="a")
            refused = await sandbox.exec(["true"])
            assert refused.exit_code == 126
            assert b"cannot start" in refused.stderr
            with pytest.raises(Hindered, match="programs are in the way") as own:
                await sandbox.python("1", session="b")
            assert (own.value.blame, own.value.retryable) == ("program", False)
            await sandbox.end_session("a")
            assert (await sandbox.exec(["true"])).exit_code == 0
            assert (await sandbox.python("1", session="b")).stdout == b"1\n"
        async with await box.provider.create(replace(spec, total=Total(pids=3))) as full:  # of its agent
            for call in (full.exec(["true"]), full.python("1", session="a")):
                with pytest.raises(CreateError, match="cannot start") as places:
                    await call
                assert places.value.blame == "infra"

    box.runner.run(scenario())


def test_programs_that_removed_the_folder_of_a_session_are_in_its_way() -> None:
    async def scenario() -> None:
        provider = LocalProvider(LocalTable(isolation="none"))
        sandbox = await provider.create(SPEC)
        await sandbox.exec(["sh", "-c", 'rmdir "$PWD"'])
        with pytest.raises(Hindered, match="No such file"):
            await sandbox.python("1", session="a")
        await provider.aclose()

    asyncio.run(scenario())


def test_what_one_episode_does_to_a_sandbox_of_many_is_the_places_failure(tmp_path: Path) -> None:
    async def scenario() -> None:
        limiter = Limiter("local", max_live=1, max_starting=1, creates_per_s=9.0, folder=tmp_path / "limits")
        keeper = Keeper(LocalProvider(LocalTable()), limiter=limiter, ledger=Ledger(tmp_path / "ledger"))
        spec = SandboxSpec(limits=Limits(disk_mb=8, pids=64), total=Total(pids=64))
        async with SandboxPool(keeper, spec, size=1) as pool:
            sandbox = await pool.acquire()
            await sandbox.python(HOLD, session="one episode")
            with pytest.raises(CreateError) as caught:
                await sandbox.python("1", session="another")
            assert caught.value.blame == "infra"

    asyncio.run(scenario())


@pytest.mark.skipif(not find_hierarchies(), reason="no cgroups here")
def test_an_agent_that_the_kernel_killed_for_memory_is_the_doing_of_its_programs(box: Box) -> None:
    async def scenario() -> None:
        tight = SandboxSpec(limits=Limits(disk_mb=8, memory_mb=48), total=Total(memory_mb=48))
        async with await box.provider.create(tight) as sandbox:
            with pytest.raises(Died) as own:  # it holds what the program has not taken yet
                await sandbox.exec(["sleep", "30"], stdin=bytes(64 << 20), timeout_s=30)
            assert (own.value.cause, own.value.blame) == ("oom", "program")
            shared = SharedSandbox(sandbox)  # of many episodes
            for call in (
                shared.python("1", session="a"), shared.exec(["true"]), shared.start(["true"]),
                shared.write("f", b""), shared.read("f"), shared.list_dir("."), shared.reset(),
            ):  # fmt: skip
                with pytest.raises(Died) as anybodys:
                    await call
                assert (anybodys.value.cause, anybodys.value.blame) == ("oom", "infra")

    box.runner.run(scenario())


@pytest.mark.parametrize("mark", [b"99 0\n" * 100, b"x"], ids=["marks", "no end of a line"])
def test_a_session_that_says_without_end_that_it_has_ended_is_ended(box: Box, mark: bytes) -> None:
    flood = f"import os\nwhile True: os.write(4, {mark!r})"

    async def scenario() -> None:
        result = await box.sandbox.python(flood, session="talker")
        assert (result.flooded, result.state_lost, result.timed_out) == (True, True, False)
        between = f"import threading, os\ndef talk():\n  while True: os.write(4, {mark!r})\n"
        await box.sandbox.python(
            f"import time\n{between}threading.Timer(0.1, talk).start()", session="talker"
        )
        async with asyncio.timeout(20):
            while not (await box.sandbox.python("time.sleep(0.1)", session="talker")).fresh:
                pass

    box.runner.run(scenario())


def test_reports_wait_for_a_supervisor_that_does_not_read_and_keep_their_order() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        reports = Reports(ours)
        for key in range(5000):
            reports.add({"key": key})
        assert reports.waiting == [ours.fileno()]
        theirs.settimeout(10)
        lines = theirs.makefile("r")
        for key in range(5000):
            while reports.waiting and not key % 100:
                before = reports.waiting
                reports.send()
                if reports.waiting == before:
                    break
            assert json.loads(lines.readline()) == {"key": key}
        assert reports.waiting == []
