"""What a policy may try in the local sandbox, and what becomes of it; the sandbox is usable after each."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from rz_agent.sandboxes.config import SandboxConfig
from rz_agent.sandboxes.local.provider import LocalProvider
from rz_agent.sandboxes.provider import Capabilities, ExecResult, FileError, Sandbox

pytestmark = pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not installed")

CONFIG = SandboxConfig.load(
    {
        "limits": {
            "memory_mb": 192, "pids": 32, "disk_mb": 16, "cpu_s": 20, "timeout_s": 3,
            "output_bytes": 4096, "flood_bytes": 1 << 20,
        }
    },
    source="test",
)  # fmt: skip
SECRET = "hunter2-of-the-host"


class Attacked:
    """One sandbox, an event loop to reach it, and a way to run hostile code both ways."""

    def __init__(self, runner: asyncio.Runner, sandbox: Sandbox, can: Capabilities) -> None:
        self.runner, self.sandbox, self.can = runner, sandbox, can
        self._count = 0

    def command(self, code: str, **options: float) -> ExecResult:
        argv = ["python3", "-I", "-c", code]
        return self.runner.run(self.sandbox.exec(argv, timeout_s=options.get("timeout_s")))

    def cell(self, code: str, *, session: str | None = None, timeout_s: float | None = None) -> ExecResult:
        if session is not None:
            return self.runner.run(self.sandbox.python(code, session=session, timeout_s=timeout_s))
        self._count += 1
        name = f"attack {self._count}"
        result = self.runner.run(self.sandbox.python(code, session=name, timeout_s=timeout_s))
        self.runner.run(self.sandbox.end_session(name))
        return result


@pytest.fixture(scope="module")
def place() -> Iterator[Attacked]:
    os.environ["RZ_TEST_SECRET"] = SECRET
    with asyncio.Runner() as runner:
        provider = LocalProvider(CONFIG.local)
        sandbox = runner.run(provider.create(CONFIG.spec()))
        yield Attacked(runner, sandbox, provider.capabilities())
        runner.run(provider.aclose())
    del os.environ["RZ_TEST_SECRET"]


@pytest.fixture(autouse=True)
def usable_afterwards(place: Attacked) -> Iterator[None]:
    neighbour = place.cell("kept = 'mine'", session="neighbour")
    assert neighbour.exit_code == 0
    yield
    assert place.cell("kept", session="neighbour").stdout == b"'mine'\n"
    assert place.command("print('alive')").stdout == b"alive\n"
    assert place.cell("1 + 1").stdout == b"2\n"


def test_a_fork_bomb_meets_the_process_limit_and_the_deadline(place: Attacked) -> None:
    bomb = "import os\nwhile True:\n  try: os.fork()\n  except OSError: pass"
    result = place.command(bomb, timeout_s=1)
    assert result.timed_out
    assert result.signal == 9
    cell = place.cell(bomb, timeout_s=1, session="bomber")
    assert cell.timed_out
    assert not cell.state_lost
    count = "import glob\nlen([f for f in glob.glob('/proc/[0-9]*/stat') if ') Z' not in open(f).read()])"
    assert place.cell(count, session="bomber").stdout == b"2\n"  # its init and itself
    assert place.cell("pid = os.fork() or os._exit(0); pid > 0", session="bomber").stdout == b"True\n"
    place.runner.run(place.sandbox.end_session("bomber"))


def test_a_thread_bomb_meets_the_process_limit(place: Attacked) -> None:
    result = place.cell(
        "import threading, time\nn = 0\ntry:\n  while True:\n"
        "    threading.Thread(target=time.sleep, args=(60,), daemon=True).start(); n += 1\n"
        "except RuntimeError: pass\nn"
    )
    assert int(result.stdout) < CONFIG.limits.pids


def test_a_memory_bomb_ends_its_own_session_only(place: Attacked) -> None:
    result = place.cell("held = []\nwhile True: held.append(b'x' * (8 << 20))", timeout_s=20)
    assert not result.timed_out
    if place.can.bounds_session_memory:
        assert (result.oom, result.state_lost) == (True, True)
    else:
        assert b"MemoryError" in result.stderr


def test_memory_spread_over_processes_counts_as_one(place: Attacked) -> None:
    if not place.can.bounds_session_memory:
        pytest.skip("no memory cgroup on this machine")
    code = (
        "import os, time\nfor _ in range(8):\n  if os.fork() == 0:\n"
        "    held = b'x' * (64 << 20); time.sleep(20); os._exit(0)\ntime.sleep(1)\nprint('parent lives')"
    )
    assert place.command(code).oom


@pytest.mark.parametrize("folder", ["/box", "/tmp", "/dev/shm"])
def test_filling_a_folder_meets_the_disk_limit(place: Attacked, folder: str) -> None:
    result = place.cell(
        "import itertools\ntry:\n  for i in itertools.count():\n"
        f"    open(f'{folder}/{{i}}', 'wb').write(bytes(1 << 20))\n"
        "except OSError as error: print(error.strerror, i)"
    )
    assert result.stdout.startswith(b"No space left on device")
    assert int(result.stdout.split()[-1]) <= CONFIG.limits.disk_mb


def test_endless_output_is_stopped_and_cut_in_the_middle(place: Attacked) -> None:
    code = "import os\nos.write(1, b'BEGIN')\nwhile True: os.write(1, b'A' * 65536)"
    for result in (place.command(code), place.cell(code)):
        assert result.flooded
        assert result.truncated
        assert not result.timed_out
        assert result.stdout.startswith(b"BEGIN")
        assert b"bytes cut" in result.stdout
        assert len(result.stdout) < CONFIG.limits.output_bytes + 64
        assert result.stdout_bytes > CONFIG.limits.flood_bytes


def test_a_background_thread_that_floods_between_cells_stops_nobody(place: Attacked) -> None:
    place.cell(
        "import os, threading\ndef flood():\n  while True: os.write(1, b'z' * 4096)\n"
        "threading.Thread(target=flood, daemon=True).start()",
        session="flooder",
    )
    assert place.cell("2 + 2").stdout == b"4\n"
    place.runner.run(place.sandbox.end_session("flooder"))


def test_nothing_outside_its_folders_can_be_written(place: Attacked) -> None:
    code = (
        "for path in ('/usr/x', '/etc/x', '/x', '/dev/x', '/run/x', '/proc/sys/kernel/core_pattern'):\n"
        "  try: open(path, 'w').write('x'); print('WROTE', path)\n  except OSError: pass"
    )
    assert place.command(code).stdout == b""
    assert place.cell(code).stdout == b""


def test_host_files_are_not_there(place: Attacked, tmp_path: Path) -> None:
    planted = tmp_path / "secret"
    planted.write_text(SECRET)
    code = (
        f"for path in ('/etc/shadow', '/root', '/home', '/var', '/sys/kernel', {str(planted)!r}):\n"
        "  try: open(path); print('OPENED', path)\n  except FileNotFoundError: pass"
    )
    assert place.command(code).stdout == b""
    assert place.cell(code).stdout == b""


def test_the_host_environment_is_nowhere_to_be_read(place: Attacked) -> None:
    code = (
        "import os\nprint(sorted(os.environ))\nfor pid in os.listdir('/proc'):\n  if pid.isdigit():\n"
        "    for name in ('environ', 'cmdline', 'mem', 'root/etc/shadow'):\n"
        "      try: print(open(f'/proc/{pid}/{name}', 'rb').read(1 << 16))\n      except OSError: pass"
    )
    for result in (place.command(code), place.cell(code)):
        assert result.stdout.startswith(b"['HOME', 'LANG', 'PATH']") or b"LC_CTYPE" in result.stdout
        assert SECRET.encode() not in result.stdout


def test_killing_its_parent_init_and_everyone_changes_nothing(place: Attacked) -> None:
    code = (
        "import os, signal\nfor pid in (os.getppid(), 1, 2, 3):\n  if pid != os.getpid():\n"
        "    try: os.kill(pid, signal.SIGKILL)\n    except OSError: pass\nprint('still here')\n"
    )
    assert place.cell(code).stdout == b"still here\n"
    assert place.command(code + "os.kill(-1, signal.SIGKILL)\n").stdout == b"still here\n"
    assert place.command(
        "import os\nos.execvp('sh', ['sh', '-c', 'kill -9 1; kill -9 -1; echo after'])"
    ).exit_code in (
        0,
        137,
    )


def test_a_child_in_its_own_session_ends_with_its_command(place: Attacked) -> None:
    code = (
        "import os, time\nif os.fork() == 0:\n  os.setsid()\n  if os.fork() == 0:\n"
        "    time.sleep(600)\n  os._exit(0)\nprint('parent done')"
    )
    result = place.command(code)
    assert result.stdout == b"parent done\n"
    assert result.duration_s < 2.5


def test_a_daemon_that_holds_stdout_does_not_hold_the_call(place: Attacked) -> None:
    code = "import subprocess\nsubprocess.Popen(['sleep', '600'], start_new_session=True)\nprint('done')"
    assert place.command(code).stdout == b"done\n"
    assert place.cell(code).stdout == b"done\n"


def test_the_network_is_unreachable_and_names_do_not_resolve(place: Attacked) -> None:
    code = (
        "import socket\nfor address in (('192.0.2.1', 53), ('1.1.1.1', 53), ('169.254.169.254', 80)):\n"
        "  try: socket.create_connection(address, 1); print('CONNECTED', address)\n  except OSError: pass\n"
        "try: socket.getaddrinfo('example.org', 443); print('RESOLVED')\nexcept OSError: pass"
    )
    assert place.command(code).stdout == b""
    assert place.cell(code).stdout == b""


def test_sockets_of_other_families_cannot_be_made(place: Attacked) -> None:
    code = (
        "import socket\nfor family in (40, 17, 38, 44, 31):\n"
        "  try: socket.socket(family, socket.SOCK_STREAM); print('MADE', family)\n  except OSError: pass"
    )
    assert place.cell(code).stdout == b""


def test_ptrace_unshare_mount_setns_and_clone3_are_refused(place: Attacked) -> None:
    code = (
        "import ctypes, errno, os\nlibc = ctypes.CDLL(None, use_errno=True)\n"
        "def name(result): return errno.errorcode[ctypes.get_errno()] if result == -1 else 'DONE'\n"
        "print(name(libc.ptrace(16, 1, 0, 0)), name(libc.unshare(0x10000000)),\n"
        "      name(libc.mount(b'none', b'/tmp', b'tmpfs', 0, None)), name(libc.setns(0, 0)),\n"
        "      name(libc.chroot(b'/tmp')), name(libc.syscall(435, 0, 0)))"
    )
    for result in (place.command(code), place.cell(code)):
        assert result.stdout == b"EPERM EPERM EPERM EPERM EPERM ENOSYS\n"


def test_no_capability_is_left_and_none_can_be_gained(place: Attacked) -> None:
    code = "print([line.split() for line in open('/proc/self/status') if line[:3] in ('Cap', 'NoN', 'Sec')])"
    text = place.cell(code).text
    assert text.count("0000000000000000") == 5
    assert "['NoNewPrivs:', '1']" in text
    assert "['Seccomp:', '2']" in text


def test_ignoring_every_signal_does_not_outlive_the_deadline(place: Attacked) -> None:
    code = (
        "import signal\nfor number in (1, 2, 3, 10, 12, 13, 14, 15): signal.signal(number, signal.SIG_IGN)\n"
        "while True: pass"
    )
    command = place.command(code, timeout_s=0.5)
    assert (command.timed_out, command.signal) == (True, 9)
    cell = place.cell(code, timeout_s=0.5)
    assert (cell.timed_out, cell.state_lost) == (True, True)


def test_reading_stdin_finds_its_end(place: Attacked) -> None:
    assert place.command("import sys\nprint(repr(sys.stdin.read()))").stdout == b"''\n"
    assert b"EOFError" in place.cell("input()").stderr


def test_bytes_come_back_as_they_were_written(place: Attacked) -> None:
    code = "import os\nos.write(1, bytes(range(256)))\nNone"
    assert place.command(code).stdout == bytes(range(256))
    assert place.cell(code).stdout == bytes(range(256))
    assert place.cell("print('\\ud800')").stdout == b"\\ud800\n"


def test_a_crash_is_a_signal_and_a_lost_state(place: Attacked) -> None:
    code = "import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)"
    assert place.command(code).signal == 11
    cell = place.cell(code)
    assert (cell.signal, cell.exit_code, cell.state_lost) == (11, 139, True)


def test_deep_recursion_is_contained(place: Attacked) -> None:
    code = "import sys\nsys.setrecursionlimit(10**9)\nf = lambda n: f(n + 1)\nf(0)"
    assert place.cell(code, timeout_s=10).exit_code != 0


def test_closing_and_scribbling_on_every_descriptor_harms_only_itself(place: Attacked) -> None:
    code = (
        "import os\nfor fd in range(3, 64):\n  try: os.write(fd, b'\\0\\0\\0\\2{}')\n  except OSError: pass\n"
        "os.closerange(0, 64)"
    )
    place.command(code)
    assert place.cell(code, timeout_s=1).state_lost


def test_zombies_are_reaped(place: Attacked) -> None:
    code = "import os, time\nfor _ in range(20):\n  if os.fork() == 0: os._exit(0)\nprint('made')"
    assert place.command(code).stdout == b"made\n"


@pytest.fixture(scope="module")
def traps(place: Attacked, tmp_path_factory: pytest.TempPathFactory) -> str:
    outside = tmp_path_factory.mktemp("host") / "secret"
    outside.write_text(SECRET)
    script = (
        f"ln -s /etc/shadow shadow; ln -s {outside} host; mkfifo fifo; ln -s /proc/1/environ environ; "
        "ln -s /dev/zero zero; truncate -s 9999999 big; ln -s loop loop; mkdir folder; ln -s /usr/bin bin"
    )
    assert place.runner.run(place.sandbox.exec(["sh", "-c", script])).exit_code == 0
    return str(outside)


TRAPS = ["shadow", "host", "fifo", "environ", "zero", "big", "loop", "folder", "bin/env", "../etc/passwd"]


@pytest.mark.parametrize("path", [*TRAPS, "/proc/1/environ", "/proc/self/mem", "/etc/shadow", "missing"])
def test_reading_a_trap_is_an_error_and_never_host_content(place: Attacked, traps: str, path: str) -> None:
    with pytest.raises(FileError) as caught:
        place.runner.run(place.sandbox.read(path, max_bytes=1 << 20))
    assert not caught.value.retryable


@pytest.mark.parametrize("path", ["/usr/x", "/etc/passwd", "bin/x", "/proc/x"])
def test_writing_outside_its_folders_is_an_error(place: Attacked, traps: str, path: str) -> None:
    with pytest.raises(FileError):
        place.runner.run(place.sandbox.write(path, b"x"))
