"""Local sandboxes: commands, sessions side by side, files, the end of a sandbox, an agent, a harness."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from rz_agent.sandboxes.config import SandboxConfig
from rz_agent.sandboxes.errors import Died, FileError, Misconfigured, Unavailable
from rz_agent.sandboxes.exec_result import ExecResult
from rz_agent.sandboxes.inside.files import MAX_ENTRIES
from rz_agent.sandboxes.keeper import Keeper, Reaped
from rz_agent.sandboxes.kept import KeptSandbox
from rz_agent.sandboxes.local import census
from rz_agent.sandboxes.local.hierarchy import find_hierarchies
from rz_agent.sandboxes.local.provider import LocalProvider
from rz_agent.sandboxes.local.sandbox import LocalSandbox
from rz_agent.sandboxes.owner import Owner
from rz_agent.sandboxes.pool import SandboxPool
from rz_agent.sandboxes.provider import Provider
from rz_agent.sandboxes.sandbox import Sandbox
from rz_agent.sandboxes.shared import SharedSandbox
from rz_agent.sandboxes.tables import LocalTable

needs_bubblewrap = pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not installed")
ISOLATIONS = [pytest.param("namespaces", marks=needs_bubblewrap), "none"]
Run = Callable[[Coroutine[Any, Any, Any]], Any]


@asynccontextmanager
async def one(isolation: str = "namespaces", **limits: float) -> AsyncIterator[LocalSandbox]:
    table = {"limits": limits, "local": {"isolation": isolation}}
    config = SandboxConfig.load(table, source="test")
    provider = LocalProvider(config.local)
    try:
        yield await provider.create(config.spec())
    finally:
        await provider.aclose()


@asynccontextmanager
async def one_of(provider: Provider) -> AsyncIterator[Sandbox]:
    try:
        yield await provider.create(SandboxConfig.load({"limits": {"timeout_s": 20}}, source="test").spec())
    finally:
        await provider.aclose()


class Place:
    def __init__(self, runner: asyncio.Runner, sandbox: Sandbox) -> None:
        self.run, self.sandbox = runner.run, sandbox

    def cell(self, code: str, session: str, timeout_s: float | None = None) -> ExecResult:
        return self.run(self.sandbox.python(code, session=session, timeout_s=timeout_s))

    def command(self, *argv: str, **options: Any) -> ExecResult:
        return self.run(self.sandbox.exec(argv, **options))


@pytest.fixture(scope="module", params=[*ISOLATIONS, "docker"])
def place(request: pytest.FixtureRequest) -> Iterator[Place]:
    """What is the same for every sandbox with an agent in it."""
    with asyncio.Runner() as runner:
        if request.param == "docker":
            manager = one_of(request.getfixturevalue("dockerd").provider())
        else:
            manager = one_of(LocalProvider(LocalTable(isolation=request.param)))
        yield Place(runner, runner.run(manager.__aenter__()))
        runner.run(manager.__aexit__(None, None, None))


# -- commands ---------------------------------------------------------------------------------------------


def test_a_command_gets_its_stdin_environment_and_folder(place: Place) -> None:
    result = place.command("sh", "-c", "cat; echo $WORD; pwd", stdin=b"in ", env={"WORD": "here"}, cwd="/usr")
    assert result.stdout == b"in here\n/usr\n"
    assert (result.exit_code, result.stderr, result.signal) == (0, b"", None)


def test_an_exit_code_is_told_apart_from_a_signal(place: Place) -> None:
    left = place.command("sh", "-c", "exit 137")
    assert left.exit_code == 137
    killed = place.command("sh", "-c", "kill -9 $$")
    assert (killed.exit_code, killed.signal) == (137, 9)


def test_a_command_that_does_not_exist_is_a_result(place: Place) -> None:
    result = place.command("no-such-program")
    assert result.exit_code == 127
    assert b"no-such-program" in result.stderr


def test_a_large_stdin_and_a_large_output_do_not_block_each_other(place: Place) -> None:
    data = bytes(range(256)) * 4096
    result = place.command("cat", stdin=data, output_limit=len(data))
    assert result.stdout == data
    assert not result.truncated


def test_a_program_that_closes_its_stdin_early_is_fine(place: Place) -> None:
    assert place.command("true", stdin=b"x" * (1 << 20)).exit_code == 0


def test_output_over_the_limit_keeps_head_and_tail_and_counts_all(place: Place) -> None:
    result = place.command("seq", "1", "5000", output_limit=100)
    assert result.stdout.startswith(b"1\n2\n3\n")
    assert result.stdout.endswith(b"4999\n5000\n")
    assert result.truncated
    assert result.stdout_bytes == 23893


def test_a_command_past_its_deadline_is_killed(place: Place) -> None:
    result = place.command("sleep", "60", timeout_s=0.3)
    assert (result.timed_out, result.signal) == (True, 9)


def test_commands_run_side_by_side(place: Place) -> None:
    async def many() -> list[ExecResult]:
        return await asyncio.gather(*(place.sandbox.exec(["sleep", "1"]) for _ in range(8)))

    begun = time.monotonic()
    assert all(result.exit_code == 0 for result in place.run(many()))
    assert time.monotonic() - begun < 6


# -- sessions ---------------------------------------------------------------------------------------------


def test_a_session_keeps_its_state_and_echoes_the_last_expression(place: Place) -> None:
    first = place.cell("x = 41\nprint('said')\nx + 1", "state")
    assert (first.stdout, first.fresh, first.exit_code) == (b"said\n42\n", True, 0)
    second = place.cell("x", "state")
    assert (second.stdout, second.fresh) == (b"41\n", False)
    assert place.cell("None", "state").stdout == b""


def test_an_exception_is_a_traceback_of_the_cell_alone(place: Place) -> None:
    result = place.cell("def f():\n    return 1 / 0\nf()", "error")
    assert result.exit_code == 1
    text = result.stderr.decode()
    assert text.startswith('Traceback (most recent call last):\n  File "<cell 1>", line 3, in <module>')
    assert "    return 1 / 0" in text
    assert text.endswith("ZeroDivisionError: division by zero\n")
    assert place.cell("def broken(:", "error").stderr.rstrip().endswith(b"SyntaxError: invalid syntax")


def test_leaving_a_cell_by_exit_keeps_the_session(place: Place) -> None:
    place.cell("kept = 1", "leave")
    assert place.cell("import sys; sys.exit(3)", "leave").exit_code == 3
    assert place.cell("kept", "leave").stdout == b"1\n"


def test_a_timeout_interrupts_first_and_keeps_the_state(place: Place) -> None:
    place.cell("x = 7", "slow")
    result = place.cell("while True: pass", "slow", timeout_s=0.5)
    assert (result.timed_out, result.state_lost) == (True, False)
    assert b"KeyboardInterrupt" in result.stderr
    assert place.cell("x", "slow").stdout == b"7\n"


def test_a_cell_that_swallows_the_interrupt_is_killed_and_the_next_one_is_fresh(place: Place) -> None:
    stubborn = "import time\nx = 1\nwhile True:\n  try:\n    time.sleep(60)\n  except KeyboardInterrupt: pass"
    result = place.cell(stubborn, "stubborn", timeout_s=0.3)
    assert (result.timed_out, result.state_lost) == (True, True)
    after = place.cell("'x' in globals()", "stubborn")
    assert (after.stdout, after.fresh) == (b"False\n", True)


def test_a_session_that_ends_itself_says_so_and_starts_anew(place: Place) -> None:
    result = place.cell("import os; os._exit(7)", "gone")
    assert (result.exit_code, result.state_lost) == (7, True)
    assert place.cell("1", "gone").fresh


def test_a_forged_end_mark_does_not_shift_later_cells(place: Place) -> None:
    forge = (
        "import os\nfor fd in range(3, 16):\n"
        "  try: os.write(fd, b'1 0\\n2 0\\n3 0\\n99 0\\nexit 0\\nnonsense\\n')\n  except OSError: pass"
    )
    place.cell(forge, "forger")
    for number in range(10, 15):
        assert (
            place.cell(f"print({number})\n{number} * 2", "forger").stdout
            == f"{number}\n{number * 2}\n".encode()
        )


def test_a_child_that_returns_from_a_cell_does_not_answer_for_its_parent(place: Place) -> None:
    place.cell("import os\npid = os.fork()", "forker")
    assert place.cell("pid > 0", "forker").stdout == b"True\n"
    assert place.cell("'next'", "forker").stdout == b"'next'\n"


def test_sessions_do_not_share_names_or_random_numbers(place: Place) -> None:
    place.cell("secret = 'of a'", "a")
    assert b"NameError" in place.cell("secret", "b").stderr
    draw = "import random; random.random()"
    assert place.cell(draw, "a").stdout != place.cell(draw, "b").stdout


def test_pickled_classes_of_a_cell_find_their_module(place: Place) -> None:
    code = "import pickle\nclass Point: pass\ntype(pickle.loads(pickle.dumps(Point()))).__name__"
    assert place.cell(code, "pickle").stdout == b"'Point'\n"


def test_many_sessions_run_at_once_and_keep_apart(place: Place) -> None:
    async def episode(number: int) -> None:
        name = f"episode {number}"
        for turn in range(3):
            result = await place.sandbox.python(
                f"x = {number}\nimport time; time.sleep(0.05)\nx * {turn}", session=name
            )
            assert result.stdout == f"{number * turn}\n".encode()
            assert result.fresh == (turn == 0)
        await place.sandbox.end_session(name)

    async def all_of_them() -> None:
        await asyncio.gather(*(episode(number) for number in range(40)))

    place.run(all_of_them())


def test_an_ended_session_is_forgotten_and_ending_an_unknown_one_is_fine(place: Place) -> None:
    place.cell("x = 1", "ended")
    place.run(place.sandbox.end_session("ended"))
    place.run(place.sandbox.end_session("ended"))
    assert place.cell("'x' in globals()", "ended").fresh


def test_a_cancelled_cell_is_stopped_and_the_sandbox_goes_on(place: Place) -> None:
    async def give_up() -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.5):
                await place.sandbox.python("while True: pass", session="cancelled")

    place.run(give_up())
    assert place.cell("1", "cancelled").fresh


# -- what sessions of one sandbox cannot see of each other ---------------------------------------------------


@needs_bubblewrap
def test_sessions_have_their_own_files_processes_and_loopback() -> None:
    async def scenario() -> None:
        async with one() as sandbox:
            await sandbox.python(
                "import socket, subprocess\n"
                "for folder in ('/box', '/tmp', '/dev/shm'): open(folder + '/note', 'w').write('a')\n"
                "server = socket.create_server(('127.0.0.1', 8000))\n"
                "child = subprocess.Popen(['sleep', '60'])",
                session="a",
            )
            seen = await sandbox.python(
                "import os, socket\n"
                "print([os.path.exists(f + '/note') for f in ('/box', '/tmp', '/dev/shm')])\n"
                "print(len([p for p in os.listdir('/proc') if p.isdigit()]))\n"
                "print(socket.socket().connect_ex(('127.0.0.1', 8000)) != 0)",
                session="b",
            )
            assert seen.stdout == b"[False, False, False]\n2\nTrue\n"
            own = await sandbox.python(
                "socket.create_connection(('127.0.0.1', 8000)).close(); 'reached'", session="a"
            )
            assert own.stdout == b"'reached'\n"

    asyncio.run(scenario())


@needs_bubblewrap
def test_commands_share_a_loopback_and_abstract_sockets_which_no_session_sees() -> None:
    serve = (
        "import socket, time\n"
        "servers = socket.create_server(('127.0.0.1', 8000)), socket.socket(socket.AF_UNIX)\n"
        "servers[1].bind('\\0name'), servers[1].listen()\n"
        "print('up', flush=True), time.sleep(60)"
    )
    reach = (
        "import socket\n"
        "tcp, unix = socket.socket(), socket.socket(socket.AF_UNIX)\n"
        "print(tcp.connect_ex(('127.0.0.1', 8000)) == 0, unix.connect_ex('\\0name') == 0)"
    )

    async def scenario() -> None:
        async with one() as sandbox:
            server = await sandbox.start(["python3", "-I", "-c", serve])
            assert (await server.read(timeout_s=20)).stdout == b"up\n"
            assert (await sandbox.exec(["python3", "-I", "-c", reach])).stdout == b"True True\n"
            assert (await sandbox.python(reach, session="a")).stdout == b"False False\n"

    asyncio.run(scenario())


@needs_bubblewrap
def test_one_session_at_its_process_limit_leaves_the_others_theirs() -> None:
    async def scenario() -> None:
        async with one(pids=8) as sandbox:
            fill = (
                "import os, time\ntry:\n  while True:\n    if os.fork() == 0: time.sleep(60)\n"
                "except OSError: print('full')"
            )
            assert (await sandbox.python(fill, session="a")).stdout == b"full\n"
            more = "import os\nif os.fork() == 0: os._exit(0)\nos.wait()[1]"
            assert (await sandbox.python(more, session="b")).stdout == b"0\n"

    asyncio.run(scenario())


@needs_bubblewrap
def test_a_fork_bomb_that_runs_out_of_memory_before_its_deadline_is_told_so_and_contained() -> None:
    async def scenario() -> None:
        async with one(pids=64, memory_mb=20) as sandbox:
            if not any("memory" in hierarchy.controllers for hierarchy in find_hierarchies()):
                pytest.skip("no memory cgroup")
            bomb = "import os\nwhile True:\n  try: os.fork()\n  except OSError: pass"
            result = await sandbox.exec(["python3", "-I", "-c", bomb], timeout_s=2)
            assert (result.oom, result.signal) == (True, 9)
            cell = await sandbox.python(bomb, session="a", timeout_s=2)
            assert cell.oom
            again = await sandbox.python("1 + 1", session="a")
            assert (again.stdout, again.oom) == (b"2\n", False)

    asyncio.run(scenario())


# -- files ------------------------------------------------------------------------------------------------


def test_a_written_file_is_read_back_and_seen_by_commands(place: Place) -> None:
    place.run(place.sandbox.write("deep/folder/data.bin", b"\0\xff", mode=0o755))
    assert place.run(place.sandbox.read("deep/folder/data.bin")) == b"\0\xff"
    assert (
        place.command("sh", "-c", "test -x deep/folder/data.bin && wc -c < deep/folder/data.bin").stdout
        == b"2\n"
    )


def test_a_file_larger_than_asked_for_is_an_error(place: Place) -> None:
    place.run(place.sandbox.write("large", b"x" * 100))
    with pytest.raises(FileError, match="more than 99"):
        place.run(place.sandbox.read("large", max_bytes=99))


def test_a_folder_of_more_entries_than_a_listing_may_have_is_an_error(place: Place) -> None:
    count = str(MAX_ENTRIES + 1)
    assert place.command("sh", "-c", f"mkdir many; cd many; seq {count} | xargs touch").exit_code == 0
    with pytest.raises(FileError, match=f"more than {MAX_ENTRIES} entries"):
        place.run(place.sandbox.list_dir("many"))
    assert place.command("rm", "-r", "many").exit_code == 0


def test_reset_stops_programs_and_drops_files_and_sessions(place: Place) -> None:
    async def scenario() -> None:
        await place.sandbox.write("old", b"x")
        await place.sandbox.python("x = 1", session="old")
        running = asyncio.create_task(place.sandbox.exec(["sleep", "60"]))
        await asyncio.sleep(0.5)
        await place.sandbox.reset()
        assert (await running).signal == 9
        assert (await place.sandbox.python("1", session="old")).fresh
        with pytest.raises(FileError):
            await place.sandbox.read("old")

    place.run(scenario())


def test_a_snapshot_is_bounded_by_the_disk_and_not_by_what_a_program_may_say() -> None:
    async def scenario() -> None:
        async with one("none", flood_bytes=100_000, output_bytes=1000) as sandbox:
            then = os.urandom(300_000)
            await sandbox.write("large", then)
            await sandbox.reset(to=await sandbox.snapshot())
            assert await sandbox.read("large") == then

    asyncio.run(scenario())


# -- the end of a sandbox -----------------------------------------------------------------------------------


def processes_of(sandbox: LocalSandbox) -> set[int]:
    """Host pids of everything below the sandbox's first process."""
    parents: dict[int, int] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                fields = Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if fields[0] != "Z":
                parents[int(name)] = int(fields[1])
    assert sandbox.pid is not None
    found, wave = {sandbox.pid} & parents.keys(), {sandbox.pid}
    while wave:
        wave = {pid for pid, parent in parents.items() if parent in wave}
        found |= wave
    return found


def agent_of(sandbox: LocalSandbox) -> int:
    """Host pid of the supervisor: the first Python below the sandbox's first process, or that one."""
    pid = sandbox.pid or 0
    while "python" not in Path(f"/proc/{pid}/comm").read_text():
        pid = int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])
    return pid


def running(pids: set[int]) -> set[int]:
    """Those of them that have not ended (a zombie has)."""
    left = set()
    for pid in pids:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
                left.add(pid)
        except OSError:
            continue
    return left


def wait_until(condition: Callable[[], bool], seconds: float) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.05)
    return condition()


def groups_of(owner: str) -> list[Path]:
    return [path for h in find_hierarchies() if (path := h.path / owner).exists()]


def scratch_of(owner: str) -> list[Path]:
    return list(Path(tempfile.gettempdir()).glob(f"rz-agent-scratch-{owner}-*"))


@pytest.mark.parametrize("isolation", ISOLATIONS)
def test_close_leaves_no_process_no_group_and_no_folder(isolation: str) -> None:
    async def scenario() -> None:
        provider = LocalProvider(LocalTable.model_validate({"isolation": isolation}))
        sandbox = await provider.create(SandboxConfig().spec())
        await sandbox.python("import subprocess; subprocess.Popen(['sleep', '600'])", session="a")
        task = asyncio.create_task(sandbox.exec(["sleep", "600"]))
        await asyncio.sleep(0.5)
        pids = processes_of(sandbox)
        assert len(pids) >= 4
        await asyncio.gather(sandbox.close(), sandbox.close())
        await sandbox.close()
        for call in (task, sandbox.exec(["true"]), sandbox.python("1", session="a"), sandbox.read("x")):
            with pytest.raises(Died) as caught:
                await call
            assert caught.value.cause == "closed"
        assert not await sandbox.alive()
        assert wait_until(lambda: not running(pids), 2)
        assert not [left for group in groups_of(provider.owner) for left in group.glob(sandbox.id)]
        await provider.aclose()
        assert groups_of(provider.owner) == []
        assert scratch_of(provider.owner) == []

    asyncio.run(scenario())


def test_close_runs_to_its_end_when_its_caller_is_cancelled() -> None:
    async def scenario() -> None:
        async with one("none") as sandbox:
            pids = processes_of(sandbox)
            closing = asyncio.create_task(sandbox.close())
            await asyncio.sleep(0)
            closing.cancel()
            await asyncio.gather(closing, return_exceptions=True)
            await sandbox.close()
            assert not running(pids)

    asyncio.run(scenario())


@pytest.mark.parametrize("isolation", ISOLATIONS)
def test_a_killed_agent_is_an_infrastructure_error_to_every_waiter(isolation: str) -> None:
    async def scenario() -> None:
        async with one(isolation) as sandbox:
            tasks = [asyncio.create_task(sandbox.exec(["sleep", "600"])) for _ in range(3)]
            tasks += [
                asyncio.create_task(sandbox.python("while True: pass", session=f"{n}")) for n in range(3)
            ]
            await asyncio.sleep(1)
            pids = processes_of(sandbox)
            os.kill(agent_of(sandbox), signal.SIGKILL)
            answers = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 10)
            assert [type(answer) for answer in answers] == [Died] * 6
            assert {(a.blame, a.retryable, a.cause) for a in answers if isinstance(a, Died)} == {
                ("infra", True, "killed")
            }
            assert not await sandbox.alive()
            await sandbox.close()
            assert wait_until(lambda: not running(pids), 5)

    asyncio.run(scenario())


@pytest.mark.parametrize("isolation", ISOLATIONS)
def test_its_lifetime_ends_it_with_all_it_started_unless_it_is_kept_alive(isolation: str) -> None:
    async def scenario() -> None:
        provider = LocalProvider(LocalTable.model_validate({"isolation": isolation}))
        spec = SandboxConfig(lifetime_s=2.0).spec()
        forgotten, kept = [await provider.create(spec) for _ in range(2)]
        await kept.keepalive(60)
        await kept.keepalive(0.1)  # shortens nothing
        await forgotten.python("import subprocess; subprocess.Popen(['sleep', '600'])", session="a")
        pids = processes_of(forgotten)
        with pytest.raises(Died) as caught:
            await asyncio.wait_for(forgotten.exec(["sleep", "60"], timeout_s=30), 15)
        assert (caught.value.cause, caught.value.blame, caught.value.retryable) == ("expired", "infra", True)
        with pytest.raises(Died, match="its lifetime was over"):
            await forgotten.keepalive(60)
        assert wait_until(lambda: not running(pids), 5)
        assert (await kept.exec(["echo", "on"])).stdout == b"on\n"
        await provider.aclose()

    asyncio.run(scenario())


HARNESS = """
import asyncio, os, sys
from rz_agent.sandboxes.config import SandboxConfig
from rz_agent.sandboxes.local.provider import LocalProvider

async def main():
    config = SandboxConfig.load({"local": {"isolation": sys.argv[1]}}, source="test")
    provider = LocalProvider(config.local)
    sandboxes = [await provider.create(config.spec()) for _ in range(5)]
    for sandbox in sandboxes:
        await sandbox.python("import subprocess; subprocess.Popen(['sleep', '987'])", session="a")
        asyncio.create_task(sandbox.python("while True: pass", session="b", timeout_s=600))
    if os.fork() == 0:  # a forked worker holds copies of every descriptor, the sockets among them
        import time
        time.sleep(30)
        os._exit(0)
    await asyncio.sleep(0.5)
    print(provider.owner, *(sandbox.pid for sandbox in sandboxes), flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


@pytest.mark.parametrize("isolation", ISOLATIONS)
def test_when_the_harness_is_killed_its_sandboxes_are_gone_within_five_seconds(isolation: str) -> None:
    harness = subprocess.Popen([sys.executable, "-c", HARNESS, isolation], stdout=subprocess.PIPE, text=True)
    assert harness.stdout is not None
    owner, *roots = harness.stdout.readline().split()

    class Root:
        def __init__(self, pid: int) -> None:
            self.pid = pid

    pids = {pid for root in roots for pid in processes_of(Root(int(root)))}  # type: ignore[arg-type]
    assert len(pids) >= 5 * 4
    harness.kill()
    harness.wait()
    assert wait_until(lambda: not running(pids), 5), running(pids)
    for path in Path("/proc").iterdir():  # the forked worker: it keeps the janitor's pipe open
        if path.name.isdigit() and path.joinpath("cmdline").exists():
            try:
                if b"sandbox.pid for sandbox" in path.joinpath("cmdline").read_bytes():
                    os.kill(int(path.name), signal.SIGKILL)
            except OSError:
                continue
    assert wait_until(lambda: groups_of(owner) == [], 10)
    assert wait_until(lambda: scratch_of(owner) == [], 10)


FIFTY = """
import asyncio, sys
from rz_agent.sandboxes.config import SandboxConfig
from rz_agent.sandboxes.keeper import Keeper

async def main():
    config = SandboxConfig.load({"max_live": 50}, source="test")
    keeper = Keeper.of(config, run_id="fifty")
    made = await asyncio.gather(*(keeper.create(config.spec()) for _ in range(50)))
    await asyncio.gather(*(box.python("import subprocess; subprocess.Popen(['sleep', '988'])", session="a")
                           for box in made))
    print(*(box.id for box in made), flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


def members(names: set[str]) -> set[int]:
    return {pid for name, found in census.take_census().items() if name in names for pid in found.pids}


@needs_bubblewrap
def test_fifty_sandboxes_of_a_killed_harness_are_gone_within_five_seconds_and_reap_reports_them() -> None:
    with subprocess.Popen([sys.executable, "-c", FIFTY], stdout=subprocess.PIPE, text=True) as harness:
        assert harness.stdout is not None
        names = set(harness.stdout.readline().split())
        everyone = members(names)
        assert len(names) == 50
        assert len(everyone) >= 50 * 4
        harness.kill()
    assert wait_until(lambda: not running(everyone) and not members(names), 5), running(everyone)
    assert wait_until(lambda: not names & census.take_census().keys(), 10)

    async def next_start() -> list[Reaped]:
        async with Keeper.of(SandboxConfig()) as keeper:
            return await keeper.reap(run_id="fifty")

    assert {(one.id, one.what) for one in asyncio.run(next_start())} == {
        (name, "had ended") for name in names
    }
    assert asyncio.run(next_start()) == []


@pytest.mark.parametrize("isolation", ISOLATIONS)
def test_a_sandbox_is_found_and_killed_with_all_it_started_by_another_provider(isolation: str) -> None:
    async def scenario() -> None:
        async with one(isolation) as sandbox:
            waiting = asyncio.create_task(sandbox.exec(["sleep", "600"], timeout_s=600))
            await sandbox.python("import subprocess; subprocess.Popen(['sleep', '600'])", session="a")
            pids = processes_of(sandbox)
            other = LocalProvider(LocalTable(isolation="none"))
            (info,) = [info for info in await other.live() if info.id == sandbox.id]
            assert (info.state, info.owner) == ("running", str(Owner.here()))
            assert sandbox.id not in await other.reap()
            assert await other.kill(sandbox.id)
            assert wait_until(lambda: not running(pids), 5)
            with pytest.raises(Died):
                await waiting
            assert not await other.kill(sandbox.id)

    asyncio.run(scenario())


def test_a_later_harness_sweeps_what_a_dead_one_left() -> None:
    provider = LocalProvider(LocalTable(isolation="none"))
    left = Path(tempfile.gettempdir()) / f"rz-agent-scratch-1-0-test-{os.getpid()}"
    left.mkdir()
    groups = [h.path / "1-0-test" for h in find_hierarchies()]
    for group in groups:
        group.mkdir()
    removed = asyncio.run(provider.reap())
    assert left.name in removed
    assert not left.exists()
    assert not any(group.exists() for group in groups)


# -- the pool, and what is said beforehand ------------------------------------------------------------------


@needs_bubblewrap
def test_the_pool_replaces_a_dead_sandbox_for_the_next_episode() -> None:
    async def scenario() -> None:
        config = SandboxConfig.load({"shared": 2}, source="test")
        async with SandboxPool.of(config) as pool:
            first, second, third = [await pool.acquire() for _ in range(3)]
            assert len({first.id, second.id, third.id}) == 2
            assert isinstance(first, SharedSandbox)
            assert isinstance(first.inner, KeptSandbox)
            assert isinstance(first.inner.inner, LocalSandbox)
            os.kill(agent_of(first.inner.inner), signal.SIGKILL)
            assert await first.alive() is False
            for sandbox in (first, second, third):
                await pool.release(sandbox)
            fresh = [await pool.acquire() for _ in range(2)]
            assert first.id not in {sandbox.id for sandbox in fresh}
            assert pool.replaced == 1
            assert (await fresh[1].python("1 + 1", session="x")).stdout == b"2\n"

    asyncio.run(scenario())


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that every uid can read, outside /tmp."""
    folder = Path(tempfile.mkdtemp(dir="/var/tmp"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


@needs_bubblewrap
def test_another_python_is_shown_with_its_own_packages_and_preloaded_modules(open_folder: Path) -> None:
    subprocess.run(["/usr/bin/python3", "-m", "venv", "--without-pip", str(open_folder)], check=True)
    packages = next(open_folder.glob("lib/python3*/site-packages"))
    (packages / "only_here.py").write_text("answer = 42")

    async def scenario() -> None:
        table = LocalTable(python=str(open_folder / "bin" / "python3"), preload=("only_here",))
        provider = LocalProvider(table)
        sandbox = await provider.create(SandboxConfig().spec())
        result = await sandbox.python("import sys\nprint('only_here' in sys.modules)\n", session="a")
        assert result.stdout == b"True\n"
        missing = LocalProvider(LocalTable(preload=("no_such_module",)))
        with pytest.raises(Misconfigured, match=r"sandbox\.local\.preload .*'no_such_module'"):
            await missing.create(SandboxConfig().spec())
        await missing.aclose()
        await provider.aclose()

    asyncio.run(scenario())


PLAIN_USER = """
import asyncio, concurrent.futures.thread, ctypes, encodings.idna, os, zipfile
import rz_agent.sandboxes.local.provider as local
from rz_agent.sandboxes.config import SandboxConfig

async def main():
    config = SandboxConfig.load({"limits": {"memory_mb": 128}}, source="test")
    provider = local.LocalProvider(config.local)
    sandbox = await provider.create(config.spec())
    print((await sandbox.python("import os; os.getuid()", session="a")).text.strip())
    bomb = await sandbox.python("held = []\\nwhile True: held.append(bytearray(8 << 20))", session="b")
    print(bomb.stderr.decode().split()[-1], provider.capabilities().bounds_session_memory)
    print((await sandbox.exec(["echo", "ran"])).text.strip())
    await provider.aclose()

if os.geteuid() == 0:
    os.setgroups([])
    os.setgid(54321)
    os.setuid(54321)
    ctypes.CDLL(None).prctl(4, 1, 0, 0, 0)
asyncio.run(main())
"""


@needs_bubblewrap
def test_a_plain_user_without_cgroups_is_isolated_and_bounded_by_address_space() -> None:
    ran = subprocess.run([sys.executable, "-c", PLAIN_USER], capture_output=True, text=True, timeout=60)
    lines = ran.stdout.splitlines()
    assert lines[:1] + lines[2:] == ["1000", "ran"], ran.stderr
    assert lines[1] in ("MemoryError False", "True")


@needs_bubblewrap
@pytest.mark.skipif(os.geteuid() != 0, reason="only a root harness drops to another uid")
def test_a_python_behind_a_closed_folder_is_refused_with_the_folders_name(tmp_path: Path) -> None:
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o700)
    python = closed / "bin" / "python3"
    subprocess.run(["/usr/bin/python3", "-m", "venv", "--without-pip", "--copies", closed], check=True)
    provider = LocalProvider(LocalTable(python=str(python)))
    with pytest.raises(Misconfigured, match="closed to other users") as caught:
        asyncio.run(provider.create(SandboxConfig().spec()))
    assert caught.value.blame == "config"


def test_a_missing_python_is_refused_with_a_remedy() -> None:
    provider = LocalProvider(LocalTable(isolation="none", python="/nowhere/python3"))
    with pytest.raises(Misconfigured, match="/usr/bin/python3"):
        asyncio.run(provider.create(SandboxConfig().spec()))


def test_without_bubblewrap_the_doctor_and_the_error_name_the_package(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    provider = LocalProvider(LocalTable())
    failed = [result for result in asyncio.run(provider.check()) if result.status == "failed"]
    assert [result.name for result in failed] == ["bubblewrap"]
    assert "apt-get install -y bubblewrap" in failed[0].remedy
    with pytest.raises(Unavailable, match="apt-get install"):
        asyncio.run(provider.create(SandboxConfig().spec()))


@needs_bubblewrap
def test_the_doctor_makes_a_trial_sandbox() -> None:
    async def scenario() -> None:
        provider = LocalProvider(LocalTable())
        results = {result.name: result for result in await provider.check()}
        await provider.aclose()
        assert results["trial sandbox"].status == "ok"

    asyncio.run(scenario())


def test_isolation_none_says_what_it_does_not_bound() -> None:
    can = LocalProvider(LocalTable(isolation="none")).capabilities()
    kept = (can.isolates_files, can.isolates_network, can.isolates_processes, can.filters_syscalls)
    assert kept == (False, False, False, False)
    for what in ("files:", "network:", "processes:", "the sandbox's own life:", "disk:"):
        assert any(line.startswith(what) for line in can.not_bounded)
