"""Containers of a real daemon: what is bounded, how they end, and what is said when something is missing.

What they share with local sandboxes is tested there, for both: test_sandbox_local, _process, _hostile.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from dockerd import BARE, OLD_PYTHON, Dockerd, image_root
from rz_agent.sandboxes.docker.daemon import Daemon
from rz_agent.sandboxes.docker.provider import DockerProvider
from rz_agent.sandboxes.docker.sandbox import DockerSandbox
from rz_agent.sandboxes.errors import (
    CreateError,
    Died,
    Hindered,
    Misconfigured,
    RateLimited,
    SandboxError,
    Unavailable,
)
from rz_agent.sandboxes.owner import Owner, start_time
from rz_agent.sandboxes.spec import Limits, SandboxSpec, Total
from rz_agent.sandboxes.tables import DockerTable

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@asynccontextmanager
async def one(dockerd: Dockerd, **asked: Any) -> AsyncIterator[DockerSandbox]:
    provider = dockerd.provider()
    try:
        yield await provider.create(SandboxSpec(**asked))
    finally:
        await provider.aclose()


# -- what a container may do ------------------------------------------------------------------------------


async def test_a_program_is_an_unprivileged_user_in_a_read_only_image(dockerd: Dockerd) -> None:
    async with one(dockerd) as sandbox:
        touch = "id -u; pwd; touch /etc/x /usr/x /sessions/x; touch here && echo made"
        seen = await sandbox.exec(["sh", "-c", touch])
        uid, folder, made = seen.stdout.decode().split()
        assert int(uid) > 60000
        assert (folder, made) == ("/box", "made")
        assert seen.stderr.count(b"touch:") == 3


async def test_a_program_changes_the_scheduling_of_its_calling_thread_only(dockerd: Dockerd) -> None:
    # its guard has any pid, and while it ends the program, the program's uid
    async with one(dockerd) as sandbox:
        for whose, answer in (("0", b""), ("os.getpid()", b"PermissionError")):
            cell = f"import os\nos.setpriority(0, {whose}, 1); os.sched_setaffinity({whose}, {{0}})"
            assert answer in (seen := await sandbox.python(cell, session="a")).stderr
            assert bool(seen.exit_code) == bool(answer)


async def test_a_program_built_in_the_box_can_be_run(dockerd: Dockerd) -> None:
    async with one(dockerd) as sandbox:
        await sandbox.write("tool", b"#!/bin/sh\necho ran\n", mode=0o755)
        for folder in ("/box", "/tmp"):
            ran = await sandbox.exec(["sh", "-c", f"cp /box/tool {folder}/copy && {folder}/copy"])
            assert ran.stdout == b"ran\n"


async def test_the_only_network_is_its_own_loopback(dockerd: Dockerd) -> None:
    async with one(dockerd) as sandbox:
        assert (await sandbox.exec(["ls", "/sys/class/net"])).stdout == b"lo\n"


async def test_an_open_network_reaches_the_daemons_bridge(dockerd: Dockerd) -> None:
    async with one(dockerd, network="open") as sandbox:
        assert (await sandbox.exec(["ls", "/sys/class/net"])).stdout.split() == [b"eth0", b"lo"]


async def test_cores_are_bounded_for_the_whole_container(dockerd: Dockerd) -> None:
    spin = "import time\nend = time.time() + 2\nwhile time.time() < end: pass\nprint(time.process_time())"
    async with one(dockerd, total=Total(cpus=0.25)) as sandbox:
        assert float((await sandbox.exec(["python3", "-c", spin])).stdout) < 1.2


async def test_processes_of_all_programs_together_are_bounded(dockerd: Dockerd) -> None:
    hold = (
        "import os, time\ntry:\n  for n in range(99): os.fork() or time.sleep(60)\nexcept OSError: print(n)"
    )
    async with one(dockerd, total=Total(pids=40), limits=Limits(pids=1000)) as sandbox:
        assert int((await sandbox.exec(["python3", "-c", hold])).stdout) < 40
        assert (await sandbox.exec(["echo", "on"])).stdout == b"on\n"


async def test_a_session_may_neither_fill_up_the_next_ones_place_nor_stay_in_anothers(
    dockerd: Dockerd,
) -> None:
    fill = "for number in range(1 << 14): open(str(number), 'w').close()"
    stay = "import os\nos.makedirs('/tmp/theirs/mine/deep'); os.chmod('/tmp/theirs/mine', 0)"
    async with one(dockerd, limits=Limits(disk_mb=8)) as sandbox:
        assert b"No space left" in (await sandbox.python(fill, session="a")).stderr
        with pytest.raises(Hindered, match="No space left"):
            await sandbox.python("1", session="b")
        await sandbox.exec(["sh", "-c", "umask 0; mkdir /tmp/theirs"])
        assert (await sandbox.python(stay, session="a")).exit_code == 0
        await sandbox.reset()
        assert await sandbox.list_dir("/tmp") == []
        assert (await sandbox.python("1", session="b")).exit_code == 0


WRITE = """
import os
for line in open("/proc/self/mountinfo"):
    folder = line.split()[4]
    if os.path.isdir(folder):
        try:
            with open(folder + "/probe", "wb", buffering=0) as file: print(folder, file.write(b"x"))
        except OSError: pass
"""


async def test_whatever_a_program_can_write_to_is_bounded(dockerd: Dockerd) -> None:
    client = dockerd.client()
    volumes = ["VOLUME /srv", "VOLUME /tmp"]
    client.import_image_from_data(image_root(), repository="rz-agent-test", tag="volumes", changes=volumes)
    client.close()
    assert dockerd.provider().capabilities().bounds_disk
    async with one(dockerd, image="rz-agent-test:volumes", limits=Limits(disk_mb=3)) as sandbox:
        ran = await sandbox.exec(["python3", "-c", WRITE])
        folders = sorted(line.split()[0] for line in ran.text.splitlines())
        assert folders == ["/box", "/dev/shm", "/tmp"]
        sizes = await sandbox.exec(["df", "--output=size", "--block-size=1M", *folders])
        assert sizes.stdout.split()[1:] == [b"3"] * 3


async def test_sessions_find_modules_of_the_image_already_imported(dockerd: Dockerd) -> None:
    provider = dockerd.provider(preload=("colorsys",))
    async with await provider.create(SandboxSpec()) as sandbox:
        seen = await sandbox.python("import sys\n'colorsys' in sys.modules", session="a")
    assert seen.stdout == b"True\n"
    await provider.aclose()
    error = await fails(dockerd.provider(preload=("no_such_module",)))
    assert isinstance(error, Misconfigured)
    assert "sandbox.docker.preload" in str(error)
    assert dockerd.containers() == []


# -- memory: the kernel's own word ------------------------------------------------------------------------

BOMB = "held = []\nwhile True: held.append(b'x' * (8 << 20))"
TIGHT: dict[str, Any] = {"limits": Limits(memory_mb=128), "total": Total(memory_mb=128)}


async def test_a_program_killed_for_memory_is_told_and_the_container_goes_on(dockerd: Dockerd) -> None:
    async with one(dockerd, **TIGHT) as sandbox:
        result = await sandbox.exec(["python3", "-c", BOMB])
        assert (result.oom, result.signal, result.timed_out) == (True, 9, False)
        cell = await sandbox.python(BOMB, session="a")
        assert (cell.oom, cell.state_lost) == (True, True)
        again = await sandbox.exec(["echo", "on"])
        assert (again.stdout, again.oom) == (b"on\n", False)


async def test_a_child_killed_for_memory_is_told_of_a_parent_that_lives(dockerd: Dockerd) -> None:
    bomb = BOMB.replace("\n", "\n  ")
    code = f"import os\nif os.fork() == 0:\n  {bomb}\nprint(os.wait()[1] & 127)"
    async with one(dockerd, **TIGHT) as sandbox:
        result = await sandbox.exec(["python3", "-c", code])
        assert (result.stdout, result.exit_code, result.oom) == (b"9\n", 0, True)


async def test_a_killed_program_is_not_called_out_of_memory(dockerd: Dockerd) -> None:
    async with one(dockerd, **TIGHT) as sandbox:
        result = await sandbox.exec(["sh", "-c", "kill -9 $$"])
        assert (result.signal, result.oom) == (9, False)


HIDE = """
import os, sys
os.write(1, open("/proc/self/oom_score_adj", "rb").read())
try: open("/proc/self/oom_score_adj", "w").write("0")
except OSError: pass
for _ in range(8):
    held = os.memfd_create("held")  # of no process's own size
    for _ in range(32): os.write(held, bytes(1 << 20))
"""


async def test_a_program_that_hides_its_memory_goes_before_the_agent_does(dockerd: Dockerd) -> None:
    async with one(dockerd, **TIGHT) as sandbox:
        hidden = await sandbox.exec(["python3", "-ISc", HIDE])
        assert (hidden.stdout, hidden.signal, hidden.oom) == (b"1000\n", 9, True)
        assert (await sandbox.exec(["echo", "on"])).stdout == b"on\n"


# -- nothing of a program stays ---------------------------------------------------------------------------

LEAVE = """
import os, subprocess, sys, time
subprocess.Popen(["setsid", "sleep", "641"], stdin=0, stdout=subprocess.DEVNULL)
started, starting = os.pipe()  # closed by the exec, so the end of the pipe says that both run
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.execvp("sleep", ["sleep", "642"])
    os._exit(0)
os.close(starting)
os.read(started, 1)
print("left")
"""
RACE = """
import os
while True:  # a chain: each one forks the next and ends
    try:
        if os.fork(): os._exit(0)
    except OSError: pass
"""


async def sleepers(sandbox: DockerSandbox) -> int:
    seen = await sandbox.exec(["sh", "-c", "cat /proc/[0-9]*/cmdline | tr '\\0' ' '"])
    return seen.stdout.count(b"sleep 64")


async def test_daemons_of_a_command_end_with_it(dockerd: Dockerd) -> None:
    async with one(dockerd) as sandbox:
        assert (await sandbox.exec(["python3", "-c", LEAVE])).stdout == b"left\n"
        assert await sleepers(sandbox) == 0


async def test_daemons_of_a_session_end_with_its_interruption_or_with_it(dockerd: Dockerd) -> None:
    async with one(dockerd) as sandbox:
        await sandbox.python(LEAVE + "x = 1", session="a")
        assert await sleepers(sandbox) == 2
        assert (await sandbox.python("while True: pass", session="a", timeout_s=0.3)).timed_out
        assert await sleepers(sandbox) == 0
        await sandbox.python(LEAVE, session="a")
        await sandbox.end_session("a")
        assert await sleepers(sandbox) == 0


@pytest.mark.parametrize("how", ["command", "session"])
async def test_a_chain_of_forks_does_not_outrun_its_end(dockerd: Dockerd, how: str) -> None:
    async with one(dockerd) as sandbox:
        if how == "command":
            await sandbox.exec(["python3", "-c", f"import os\nif os.fork(): os._exit(0)\n{RACE}"])
        else:
            cell = f"import os\nif os.fork() == 0:\n  {RACE.replace(chr(10), chr(10) + '  ')}"
            await sandbox.python(cell, session="a")
            await sandbox.end_session("a")
        seen = await sandbox.exec(["sh", "-c", "stat -c %u /proc/[0-9]* | sort | uniq -c"])
        others = [line for line in seen.stdout.splitlines() if not line.endswith(b" 0")]
        assert len(others) == 1, seen  # this command itself


async def test_sessions_have_a_uid_and_a_closed_folder_each_and_leave_no_file(dockerd: Dockerd) -> None:
    async with one(dockerd) as sandbox:
        write = (
            "import os\nfor f in ('mine', '/tmp/mine', '/dev/shm/mine'): open(f, 'w').write('x')\nos.getcwd()"
        )
        folder = (await sandbox.python(write, session="a")).stdout.decode().strip().strip("'")
        peek = await sandbox.python(f"import os\nos.listdir({folder!r})", session="b")
        assert b"PermissionError" in peek.stderr
        assert b"PermissionError" in (await sandbox.python("os.kill(os.getppid(), 9)", session="b")).stderr
        await sandbox.end_session("a")
        left = await sandbox.exec(["sh", "-c", "ls /tmp /dev/shm; ls -d /sessions/*"])
        assert b"mine" not in left.stdout


STICKY = "d = {!r} + '/closed'; os.mkdir(d); open(d + '/x', 'w'); os.chmod(d, 0o1777)"
LEFT = {
    "a sticky folder of its own": "open('x', 'w'); os.chmod('.', 0o1700)",
    "sticky folders of everybody's": "\n".join(STICKY.format(top) for top in ("/tmp", "/dev/shm")),
    "a deep folder": "for _ in range(1500): os.mkdir('d'); os.chdir('d')",
    "a closed folder": "os.mkdir('d'); open('d/x', 'w'); os.chmod('d', 0); os.chmod('.', 0)",
}


async def test_whatever_a_session_makes_of_its_files_the_next_one_starts_and_finds_none(
    dockerd: Dockerd,
) -> None:
    uids = set()
    async with one(dockerd) as sandbox:
        for what, code in LEFT.items():
            cell = f"import os\nprint(os.getuid(), os.getcwd())\n{code}"
            made = await sandbox.python(cell, session="a")
            assert made.exit_code == 0, (what, made.text)
            uid, folder = made.stdout.decode().split()
            uids.add(uid)
            await sandbox.python("os._exit(1)", session="a")
            look = f"import os\n[os.path.exists({folder!r}), os.listdir('/tmp'), os.listdir('/dev/shm')]"
            seen = await sandbox.python(look, session="b")
            assert (seen.stdout, seen.stderr) == (b"[False, [], []]\n", b""), what
    assert len(uids) == len(LEFT)  # no new one is that of another shortly before


# -- the end of a container -------------------------------------------------------------------------------


async def test_close_removes_the_container_and_every_later_call_says_so(dockerd: Dockerd) -> None:
    async with one(dockerd) as sandbox:
        running = asyncio.create_task(sandbox.exec(["sleep", "600"]))
        await asyncio.sleep(0.3)
        assert dockerd.containers() == [sandbox.id]
        await asyncio.gather(sandbox.close(), sandbox.close())
        for call in (running, sandbox.exec(["true"]), sandbox.read("x"), sandbox.keepalive(10)):
            with pytest.raises(Died) as caught:
                await call
            assert caught.value.cause == "closed"
        assert not await sandbox.alive()
        assert dockerd.containers() == []


async def test_a_container_killed_from_outside_is_an_error_to_every_waiter(dockerd: Dockerd) -> None:
    async with one(dockerd) as sandbox:
        tasks = [asyncio.create_task(sandbox.exec(["sleep", "600"])) for _ in range(3)]
        await asyncio.sleep(0.3)
        dockerd.kill(sandbox.id)
        answers = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 15)
        assert [(type(a), getattr(a, "cause", "")) for a in answers] == [(Died, "killed")] * 3
        assert not await sandbox.alive()


async def test_an_agent_that_the_kernel_killed_for_memory_died_of_that(dockerd: Dockerd) -> None:
    async with one(dockerd, **TIGHT) as sandbox:
        with pytest.raises(Died) as caught:  # it holds what the program has not taken yet
            await sandbox.exec(["sleep", "30"], stdin=bytes(200 << 20), timeout_s=30)
        assert (caught.value.cause, caught.value.blame) == ("oom", "program")


async def test_its_lifetime_ends_it_unless_it_is_kept_alive(dockerd: Dockerd) -> None:
    async with one(dockerd, lifetime_s=4.0) as kept:
        provider = dockerd.provider()
        forgotten = await provider.create(SandboxSpec(lifetime_s=4.0))
        await kept.keepalive(60)
        await kept.keepalive(0.1)  # shortens nothing
        with pytest.raises(Died) as caught:
            await asyncio.wait_for(forgotten.exec(["sleep", "60"], timeout_s=30), 15)
        assert caught.value.cause == "expired"
        assert await kept.alive()
        await provider.aclose()


HARNESS = """
import asyncio, os, sys, time
from rz_agent.sandboxes.docker.provider import DockerProvider
from rz_agent.sandboxes.spec import SandboxSpec
from rz_agent.sandboxes.tables import DockerTable

async def main():
    provider = DockerProvider(DockerTable.model_validate_json(sys.argv[1]))
    sandboxes = []
    for _ in range(int(sys.argv[2]) // 5):
        sandboxes += await asyncio.gather(*(provider.create(SandboxSpec()) for _ in range(5)))
    for sandbox in sandboxes[:5]:
        await sandbox.python("import subprocess; subprocess.Popen(['setsid', 'sleep', '987'])", session="a")
        asyncio.create_task(sandbox.python("while True: pass", session="b", timeout_s=600))
    if os.fork() == 0:  # a forked worker, which outlives the harness for a while
        time.sleep(20)
        os._exit(0)
    print("made", flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


def harness(dockerd: Dockerd, count: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", HARNESS, dockerd.table().model_dump_json(), str(count)]
    started = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert started.stdout is not None
    assert started.stdout.readline() == "made\n"
    return started


@pytest.mark.slow
def test_when_the_harness_is_killed_its_containers_are_gone_within_five_seconds(dockerd: Dockerd) -> None:
    killed = harness(dockerd, 50)
    try:
        client = dockerd.client()
        pids = [client.inspect_container(name)["State"]["Pid"] for name in dockerd.containers()]
        client.close()
        assert len(pids) == 50
        killed.kill()
        end = time.monotonic() + 5
        while (left := [pid for pid in pids if start_time(pid)]) and time.monotonic() < end:
            time.sleep(0.05)
        assert left == []  # the first process of each, and with it all others
        assert dockerd.wait_until_empty(30) == []
    finally:
        os.killpg(killed.pid, signal.SIGKILL)
        killed.wait()


STARTING = """
import asyncio, sys
from rz_agent.sandboxes.docker.provider import DockerProvider
from rz_agent.sandboxes.spec import SandboxSpec
from rz_agent.sandboxes.tables import DockerTable

async def main():
    provider = DockerProvider(DockerTable.model_validate_json(sys.argv[1]))
    await provider.check()  # connected, image known
    print("begins", flush=True)
    sandbox = await provider.create(SandboxSpec())
    await sandbox.exec(["sleep", "600"], timeout_s=600)

asyncio.run(main())
"""


@pytest.mark.slow
async def test_a_harness_killed_while_it_creates_leaves_nothing_that_runs(dockerd: Dockerd) -> None:
    for number in range(12):
        command = [sys.executable, "-c", STARTING, dockerd.table().model_dump_json()]
        starting = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE)
        assert starting.stdout is not None
        assert await starting.stdout.readline() == b"begins\n"
        await asyncio.sleep(number * 0.05)
        starting.kill()
        await starting.wait()
    await asyncio.sleep(5)
    provider = dockerd.provider()
    left = await provider.live()
    assert [info for info in left if info.state == "running"] == []
    assert await provider.reap() == sorted(info.id for info in left)
    assert await provider.live() == []
    await provider.aclose()


# -- whoever made them ------------------------------------------------------------------------------------


def orphan(dockerd: Dockerd, name: str, labels: dict[str, str]) -> None:
    """A container that was made and never started, as by a harness that died in between."""
    client = dockerd.client()
    client.create_container("rz-agent-test:1", ["true"], name=name, labels=labels)
    client.close()


async def test_what_a_dead_owner_left_is_reaped_and_the_rest_stays(dockerd: Dockerd) -> None:
    here = Owner.here()
    dead = Owner.on_this_machine(here.pid, "1")
    away = Owner("elsewhere", "00000000", 1, "1")
    orphan(dockerd, "dead", {"rz.owner": str(dead), "rz.run": "old"})
    orphan(dockerd, "away-expired", {"rz.owner": str(away), "rz.expires": "1000"})
    orphan(dockerd, "away", {"rz.owner": str(away), "rz.expires": f"{time.time() + 600:.0f}"})
    orphan(dockerd, "somebody-elses", {})
    provider = dockerd.provider()
    mine = await provider.create(SandboxSpec(labels={"rz.run": "new"}))
    assert {info.id for info in await provider.live(run_id="old")} == {"dead"}
    (seen,) = await provider.live(run_id="new")
    assert (seen.id, seen.state, seen.owner) == (mine.id, "running", str(here))
    assert await provider.reap(run_id="new") == []
    assert await provider.reap() == ["away-expired", "dead"]
    assert await mine.alive()
    assert not await provider.kill("somebody-elses")
    assert await provider.kill("away")
    assert await provider.reap(dead_owners=False) == [mine.id]
    assert dockerd.containers() == ["somebody-elses"]
    dockerd.remove("somebody-elses")
    await provider.aclose()


async def test_a_place_is_the_daemons_address_and_for_a_sockets_file_the_machine_too() -> None:
    places = [DockerProvider(DockerTable(host=host)).place for host in ("tcp://there:2375", "unix:///d.sock")]
    assert places == ["tcp://there:2375", f"unix:///d.sock of {socket.gethostname()}"]


async def test_kill_ends_one_and_knows_when_there_is_none(dockerd: Dockerd) -> None:
    async with one(dockerd) as sandbox:
        other = dockerd.provider()
        assert await other.kill(sandbox.id)
        assert not await other.kill(sandbox.id)
        assert dockerd.containers() == []
        await other.aclose()
        with pytest.raises(Died):
            await sandbox.exec(["true"])


@pytest.mark.parametrize("after_s", [0.0, 0.05, 0.1, 0.2, 0.3, 0.4, 0.6])
async def test_a_cancelled_create_leaves_no_container(dockerd: Dockerd, after_s: float) -> None:
    provider = dockerd.provider()
    creating = asyncio.create_task(provider.create(SandboxSpec()))
    await asyncio.sleep(after_s)
    creating.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await (await creating).close()
    assert dockerd.containers() == []
    await provider.aclose()


# -- what is said when it cannot be -----------------------------------------------------------------------


async def fails(provider: DockerProvider, **asked: Any) -> SandboxError:
    with pytest.raises(SandboxError) as caught:
        await provider.create(SandboxSpec(**asked))
    await provider.aclose()
    return caught.value


async def test_no_daemon_is_named_with_its_key(dockerd: Dockerd, tmp_path: Path) -> None:
    error = await fails(dockerd.provider(host=f"unix://{tmp_path}/nobody.sock"))
    assert isinstance(error, Unavailable)
    assert "sandbox.docker.host" in str(error)


async def test_what_the_daemon_refuses_is_a_mistake_of_the_recipe_not_of_the_place(dockerd: Dockerd) -> None:
    error = await fails(dockerd.provider(), total=Total(cpus=999.0))
    assert isinstance(error, Misconfigured)
    assert "Range of CPUs" in str(error)
    assert "[sandbox.total]" in str(error)


async def test_a_daemon_that_has_answered_before_is_lost_for_the_places_sake(dockerd: Dockerd) -> None:
    daemon = Daemon(dockerd.host)
    assert isinstance(daemon.explained(ConnectionError("gone")), Unavailable)
    await daemon.call(lambda client: client.ping())
    lost = daemon.explained(ConnectionError("gone"))
    assert (type(lost), lost.blame) == (CreateError, "infra")
    daemon.close()


async def test_an_address_that_is_no_channel_is_refused_with_what_to_do(dockerd: Dockerd) -> None:
    error = await fails(dockerd.provider(host="ssh://user@host"))
    assert isinstance(error, Misconfigured)
    assert "ssh -N -L" in str(error)


async def test_an_image_without_python_is_named(dockerd: Dockerd) -> None:
    error = await fails(dockerd.provider(image=BARE))
    assert isinstance(error, Misconfigured)
    assert "sandbox.docker.python" in str(error)
    assert BARE in str(error)


async def test_an_image_of_the_spec_goes_before_the_recipes(dockerd: Dockerd) -> None:
    error = await fails(dockerd.provider(), image=BARE)
    assert BARE in str(error)


async def test_a_python_that_is_too_old_is_named_with_its_version(dockerd: Dockerd) -> None:
    error = await fails(dockerd.provider(python=f"/{OLD_PYTHON}"))
    assert isinstance(error, Misconfigured)
    assert "is Python 3.7.3" in str(error)


async def test_a_missing_image_is_refused_or_pulled_as_the_recipe_says(dockerd: Dockerd) -> None:
    never = await fails(dockerd.provider(image="rz-agent-test:none"))
    assert isinstance(never, Misconfigured)
    assert "docker pull rz-agent-test:none" in str(never)


async def test_an_image_is_pulled_once_and_its_progress_is_told(
    dockerd: Dockerd, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    with dockerd.registry() as prefix:
        provider = dockerd.provider(image=f"{prefix}ok:1", pull="missing", python="/usr/bin/python3")
        first, second = await asyncio.gather(*(provider.create(SandboxSpec()) for _ in range(2)))
        ran = await first.exec(["sh", "-c", "echo $PATH"])
        await provider.aclose()
    assert ran.stdout == b"/opt/bin:/usr/bin\n"  # as the image says
    told = [record.getMessage() for record in caplog.records if "docker image" in record.getMessage()]
    assert [line.split(": ")[1].split(" in ")[0] for line in told] == ["pulling", "pulled"]
    assert first.id != second.id


@pytest.mark.parametrize(
    ("name", "kind", "words"),
    [
        ("missing", Misconfigured, "sandbox.docker.image"),
        ("limited", RateLimited, "fewer pulls"),
        ("broken", CreateError, "pulling"),
    ],
)
async def test_a_failed_pull_says_who_must_act(
    dockerd: Dockerd, name: str, kind: type[SandboxError], words: str
) -> None:
    with dockerd.registry() as prefix:
        error = await fails(dockerd.provider(image=f"{prefix}{name}:1", pull="missing"))
    assert type(error) is kind
    assert words in str(error)
    assert name in str(error) or kind is RateLimited


async def test_a_create_that_is_cancelled_while_it_pulls_does_not_wait_for_the_rest(dockerd: Dockerd) -> None:
    with dockerd.registry() as prefix:
        provider = dockerd.provider(image=f"{prefix}slow:1", pull="always")
        creating = asyncio.create_task(provider.create(SandboxSpec()))
        await asyncio.sleep(1.0)
        creating.cancel()
        await asyncio.wait([creating], timeout=10)
        gave_up = creating.cancelled()
        await provider.aclose()
    assert gave_up


async def test_a_registry_that_is_not_there_is_the_infrastructures_fault(dockerd: Dockerd) -> None:
    error = await fails(dockerd.provider(image="127.0.0.1:9/gone:1", pull="always"))
    assert (type(error), error.blame, error.retryable) == (CreateError, "infra", True)


async def test_an_unknown_runtime_is_named(dockerd: Dockerd) -> None:
    error = await fails(dockerd.provider(runtime="no-such-runtime"))
    assert isinstance(error, Misconfigured)
    assert "sandbox.docker.runtime" in str(error)


async def test_the_doctor_looks_at_each_part_and_makes_a_trial(dockerd: Dockerd, tmp_path: Path) -> None:
    provider = dockerd.provider()
    results = {result.name: result.status for result in await provider.check()}
    await provider.aclose()
    assert results["daemon"] == results["runtime"] == results["trial sandbox"] == "ok"
    nowhere = dockerd.provider(host=f"unix://{tmp_path}/nobody.sock")
    (failed,) = await nowhere.check()
    await nowhere.aclose()
    assert failed.status == "failed"
    assert "sandbox.docker.host" in failed.remedy + failed.detail
