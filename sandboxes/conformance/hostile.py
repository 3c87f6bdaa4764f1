"""What a policy may try, and what becomes of it; tried where the provider claims to hold it."""

from __future__ import annotations

from .place import SMALL, Place
from .promise import Topic, expect, same

TOPIC = Topic("hostile")


@TOPIC.promise("isolates_processes", "bounds_pids")
async def a_fork_bomb_meets_the_process_limit_and_the_deadline_or_the_memory_limit(place: Place) -> None:
    bomb = "import os\nwhile True:\n  try: os.fork()\n  except OSError: pass"
    result = await place.command(bomb, timeout_s=1)
    # Forks that are refused cost the kernel memory for a while, with many cores more than a program may have.
    expect(result.timed_out or result.oom, f"as a command it met neither bound: {result}")
    same(result.signal, 9, "as a command: signal")
    cell = await place.cell(bomb, timeout_s=1, session="bomber")
    expect(cell.timed_out or cell.oom, f"as a cell it met neither bound: {cell}")
    again = await place.cell("import os; pid = os.fork() or os._exit(0); pid > 0", session="bomber")
    same(again.stdout, b"True\n", "a fork in the same session afterwards")
    await (await place.sandbox()).end_session("bomber")


@TOPIC.promise("isolates_processes", "isolates_sessions", "bounds_pids")
async def a_fork_bombs_children_are_gone_and_its_state_is_kept(place: Place) -> None:
    bomb = "import os\nwhile True:\n  try: os.fork()\n  except OSError: pass"
    cell = await place.cell(bomb, timeout_s=1, session="bomber")
    if not cell.oom:  # see above: then the kernel chose which of them to kill
        same((cell.timed_out, cell.state_lost), (True, False), "timed_out and state_lost")
    count = (
        "import glob\ndef lives(stat):\n  try: return ') Z' not in open(stat).read()\n"
        "  except OSError: return False  # its init reaps them meanwhile\n"
        "sum(map(lives, glob.glob('/proc/[0-9]*/stat')))"
    )
    same((await place.cell(count, session="bomber")).stdout, b"2\n", "its init and itself, counted in /proc")
    await (await place.sandbox()).end_session("bomber")


@TOPIC.promise("isolates_processes", "bounds_pids")
async def a_thread_bomb_meets_the_process_limit(place: Place) -> None:
    result = await place.cell(
        "import threading, time\nn = 0\ntry:\n  while True:\n"
        "    threading.Thread(target=time.sleep, args=(60,), daemon=True).start(); n += 1\n"
        "except RuntimeError: pass\nn"
    )
    expect(int(result.stdout or b"9999") < SMALL.pids, f"threads that were started: {result.text!r}")


@TOPIC.promise("isolates_processes")
async def a_memory_bomb_ends_its_own_session_only(place: Place) -> None:
    bomb = "held = []\nwhile True: held.append(b'x' * (8 << 20))"
    result = await place.cell(bomb, timeout_s=20)
    expect(not result.timed_out, "it ran to its deadline")
    if place.can.bounds_session_memory:
        same((result.oom, result.state_lost), (True, True), "oom and state_lost")
    else:
        expect(result.exit_code != 0, f"it went well: {result.text!r}")


@TOPIC.promise("isolates_processes", "bounds_session_memory")
async def memory_spread_over_processes_counts_as_one(place: Place) -> None:
    code = (
        "import os, time\nfor _ in range(8):\n  if os.fork() == 0:\n"
        "    held = b'x' * (64 << 20); time.sleep(8); os._exit(0)\nfor _ in range(8): os.wait()"
    )
    expect((await place.command(code, timeout_s=30)).oom, "eight times 64 MiB fit into 192 MiB")


def _fill(folder: str) -> None:
    async def body(place: Place) -> None:
        result = await place.cell(
            "import itertools\ntry:\n  for i in itertools.count():\n"
            f"    open(f'{folder}/{{i}}', 'wb').write(bytes(1 << 20))\n"
            "except OSError as error: print(error.strerror, i)"
        )
        expect(result.stdout.startswith(b"No space left on device"), f"it said {result.text[:200]!r}")
        expect(int(result.stdout.split()[-1]) <= SMALL.disk_mb, f"MiB that fitted: {result.text!r}")

    TOPIC.add(f"filling {folder} meets the disk limit", body, "bounds_disk", "isolates_sessions")


for _folder in (".", "/tmp", "/dev/shm"):
    _fill(_folder)


@TOPIC.promise("bounds_disk")
async def empty_files_meet_a_limit_too(place: Place) -> None:
    code = (
        f"import errno, os, shutil\nmost = {SMALL.disk_mb << 8}\n"
        "for top in ('.', '/tmp', '/dev/shm'):\n"
        "  folder = os.path.join(top, 'many'); os.mkdir(folder)\n"
        "  try:\n    for i in range(most): os.close(os.open(f'{folder}/{i}', os.O_CREAT | os.O_WRONLY))\n"
        "  except OSError as error: print(errno.errorcode[error.errno])\n"
        "  shutil.rmtree(folder)"
    )
    for result in await place.both_ways(code):
        same(result.stdout, b"ENOSPC\n" * 3, "after as many files as there are pages")


@TOPIC.promise()
async def a_background_thread_that_floods_between_cells_stops_nobody(place: Place) -> None:
    flood = (
        "import os, threading\ndef flood():\n  while True: os.write(1, b'z' * 4096)\n"
        "threading.Thread(target=flood, daemon=True).start()"
    )
    await place.cell(flood, session="flooder")
    same((await place.cell("2 + 2")).stdout, b"4\n", "another session's cell")
    await (await place.sandbox()).end_session("flooder")


@TOPIC.promise("isolates_files")
async def nothing_outside_its_folders_can_be_written(place: Place) -> None:
    code = (
        "for path in ('/usr/x', '/etc/x', '/x', '/dev/x', '/run/x', '/proc/sys/kernel/core_pattern'):\n"
        "  try: open(path, 'w').write('x'); print('WROTE', path)\n  except OSError: pass"
    )
    for result in await place.both_ways(code):
        same(result.stdout, b"", "what could be written")


@TOPIC.promise("isolates_files")
async def host_files_are_not_there(place: Place) -> None:
    code = (
        f"for path in ('/etc/shadow', {str(place.planted)!r}, '/proc/1/root{place.planted}'):\n"
        "  try: open(path); print('OPENED', path)\n  except OSError: pass"
    )
    for result in await place.both_ways(code):
        same(result.stdout, b"", "what could be opened")


@TOPIC.promise("isolates_processes")
async def the_host_environment_is_nowhere_to_be_read(place: Place) -> None:
    code = (
        "import os\nprint(dict(os.environ))\nfor pid in os.listdir('/proc'):\n  if pid.isdigit():\n"
        "    for name in ('environ', 'cmdline', 'mem', 'root/etc/shadow'):\n"
        "      try: print(open(f'/proc/{pid}/{name}', 'rb').read(1 << 16))\n      except OSError: pass"
    )
    for result in await place.both_ways(code):
        expect(place.secret not in result.text, "a variable of the harness was read")


@TOPIC.promise("isolates_processes")
async def killing_its_parent_init_and_everyone_changes_nothing(place: Place) -> None:
    code = (
        "import os, signal\nfor pid in (os.getppid(), 1, 2, 3):\n  if pid != os.getpid():\n"
        "    try: os.kill(pid, signal.SIGKILL)\n    except OSError: pass\nprint('still here', flush=True)\n"
    )
    if place.can.isolates_sessions:
        same((await place.cell(code)).stdout, b"still here\n", "the cell")
        everyone = await place.command(code + "os.kill(-1, signal.SIGKILL)\n")
        same(everyone.stdout, b"still here\n", "the command")
    left = await place.sh("kill -9 1; kill -9 -1; echo after")
    expect(left.exit_code in (0, 137), f"exit code {left.exit_code}")


@TOPIC.promise("isolates_processes")
async def a_child_in_its_own_session_ends_with_its_command(place: Place) -> None:
    code = (
        "import os, time\nif os.fork() == 0:\n  os.setsid()\n  if os.fork() == 0:\n"
        "    time.sleep(613)\n  os._exit(0)\nprint('parent done')"
    )
    result = await place.command(code)
    same(result.stdout, b"parent done\n", "stdout")
    expect(result.duration_s < 7, f"it held the call for {result.duration_s:.1f} s")
    await place.sh("setsid sleep 614 & sleep 615", timeout_s=0.5)
    look = (
        "import os\nprint(any(b'sleep\\x0061' in open(f'/proc/{p}/cmdline', 'rb').read()"
        " for p in os.listdir('/proc') if p.isdigit()))"
    )
    same((await place.command(look)).stdout, b"False\n", "whether a child is seen afterwards")


@TOPIC.promise("isolates_processes")
async def a_daemon_that_holds_stdout_does_not_hold_the_call(place: Place) -> None:
    code = "import subprocess\nsubprocess.Popen(['sleep', '600'], start_new_session=True)\nprint('done')"
    for result in await place.both_ways(code):
        same(result.stdout, b"done\n", "stdout")
        expect(not result.timed_out, "the call waited for the daemon")


@TOPIC.promise("isolates_network")
async def the_network_is_unreachable_and_names_do_not_resolve(place: Place) -> None:
    code = (
        "import socket\nfor address in (('192.0.2.1', 53), ('1.1.1.1', 53), ('169.254.169.254', 80)):\n"
        "  try: socket.create_connection(address, 1); print('CONNECTED', address)\n  except OSError: pass\n"
        "try: socket.getaddrinfo('example.org', 443); print('RESOLVED')\nexcept OSError: pass"
    )
    for result in await place.both_ways(code, timeout_s=30):
        same((result.stdout, result.timed_out), (b"", False), "what was reached, timed_out")


@TOPIC.promise("filters_syscalls")
async def sockets_of_other_families_cannot_be_made(place: Place) -> None:
    code = (
        "import socket\nfor family in (40, 17, 38, 44, 31):\n"
        "  try: socket.socket(family, socket.SOCK_STREAM); print('MADE', family)\n  except OSError: pass"
    )
    same((await place.cell(code)).stdout, b"", "vsock, packet, alg, xdp, bluetooth")


@TOPIC.promise("filters_syscalls")
async def ptrace_unshare_mount_setns_and_clone3_are_refused(place: Place) -> None:
    code = (
        "import ctypes, errno, os\nlibc = ctypes.CDLL(None, use_errno=True)\n"
        "def name(result): return errno.errorcode[ctypes.get_errno()] if result == -1 else 'DONE'\n"
        "print(name(libc.ptrace(16, 1, 0, 0)), name(libc.unshare(0x10000000)),\n"
        "      name(libc.mount(b'none', b'/tmp', b'tmpfs', 0, None)), name(libc.setns(0, 0)),\n"
        "      name(libc.chroot(b'/tmp')), name(libc.syscall(435, 0, 0)))"
    )
    for result in await place.both_ways(code):
        same(result.stdout, b"EPERM EPERM EPERM EPERM EPERM ENOSYS\n", "what each call gave")


@TOPIC.promise("filters_syscalls")
async def nothing_but_itself_can_be_delayed_or_limited(place: Place) -> None:
    code = (
        "import ctypes, os, resource\nlibc = ctypes.CDLL(None, use_errno=True)\n"
        "def syscall(*numbers):\n"
        "  if libc.syscall(*numbers) < 0: raise OSError(ctypes.get_errno(), 'refused')\n"
        "idle, idle_io = os.sched_param(0), 3 << 13\n"
        "for call in (\n"
        "  lambda: os.sched_setscheduler(1, os.SCHED_IDLE, idle), lambda: os.sched_setparam(1, idle),\n"
        "  lambda: os.sched_setaffinity(1, {0}), lambda: resource.prlimit(1, resource.RLIMIT_CPU, (1, 1)),\n"
        "  lambda: syscall(314, 1, None, 0), lambda: syscall(251, 1, 1, idle_io),\n"
        "  lambda: syscall(251, 2, 0, idle_io), lambda: syscall(251, 3, 0, idle_io),\n"
        "  *(lambda k=k, w=w: os.setpriority(k, w, 19) for k, w in ((0, 1), (1, 0), (1, 1), (2, 0)))):\n"
        "  try: call(); print('DONE')\n  except PermissionError: pass\n"
        "os.sched_setaffinity(0, os.sched_getaffinity(0)); os.sched_setscheduler(0, os.SCHED_BATCH, idle)\n"
        "os.nice(1); os.setpriority(os.PRIO_PROCESS, 0, 2); syscall(251, 1, 0, idle_io)\n"
        "resource.setrlimit(resource.RLIMIT_CPU, (9, 9)); print('itself')"
    )
    for result in await place.both_ways(code):
        same(result.stdout, b"itself\n", f"what could be changed ({result.text[-200:]!r})")


@TOPIC.promise("filters_syscalls")
async def no_capability_is_left_and_none_can_be_gained(place: Place) -> None:
    code = "print([line.split() for line in open('/proc/self/status') if line[:3] in ('Cap', 'NoN', 'Sec')])"
    for result in await place.both_ways(code):
        same(result.text.count("0000000000000000"), 5, "empty capability sets")
        for line in ("['NoNewPrivs:', '1']", "['Seccomp:', '2']"):
            expect(line in result.text, f"{line} is not in {result.text!r}")


@TOPIC.promise()
async def ignoring_every_signal_does_not_outlive_the_deadline(place: Place) -> None:
    code = (
        "import signal\nfor number in (1, 2, 3, 10, 12, 13, 14, 15): signal.signal(number, signal.SIG_IGN)\n"
        "while True: pass"
    )
    command = await place.command(code, timeout_s=0.5)
    same((command.timed_out, command.signal), (True, 9), "as a command: timed_out and signal")
    cell = await place.cell(code, timeout_s=2)  # on a busy machine, time to get as far as ignoring them
    same((cell.timed_out, cell.state_lost), (True, True), "as a cell: timed_out and state_lost")


@TOPIC.promise()
async def reading_stdin_finds_its_end(place: Place) -> None:
    same((await place.command("import sys\nprint(repr(sys.stdin.read()))")).stdout, b"''\n", "as a command")
    expect("EOFError" in (await place.cell("input()")).text, "as a cell, input() did not raise EOFError")


@TOPIC.promise()
async def what_is_no_unicode_is_printed_escaped(place: Place) -> None:
    same((await place.cell("print('\\ud800')")).stdout, b"\\ud800\n", "a lone surrogate")


@TOPIC.promise()
async def a_crash_is_a_signal_and_a_lost_state(place: Place) -> None:
    code = "import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)"
    same((await place.command(code)).signal, 11, "the command's signal")
    cell = await place.cell(code)
    same(
        (cell.signal, cell.exit_code, cell.state_lost),
        (11, 139, True),
        "the cell's signal, exit code, state_lost",
    )


@TOPIC.promise("isolates_processes")
async def deep_recursion_is_contained(place: Place) -> None:
    code = "import sys\nsys.setrecursionlimit(10**9)\nf = lambda n: f(n + 1)\nf(0)"
    expect((await place.cell(code, timeout_s=20)).exit_code != 0, "it went well")


@TOPIC.promise()
async def closing_and_scribbling_on_every_descriptor_harms_only_itself(place: Place) -> None:
    code = (
        "import os\nfor fd in range(3, 64):\n  try: os.write(fd, b'\\0\\0\\0\\2{}')\n  except OSError: pass\n"
        "os.closerange(0, 64)"
    )
    await place.command(code)
    expect((await place.cell(code, timeout_s=3)).state_lost, "the session goes on without its descriptors")


@TOPIC.promise()
async def numbers_of_any_size_on_every_descriptor_harm_only_itself(place: Place) -> None:
    code = (
        "import os\nfor fd in range(3, 64):\n"
        "  for word in (b'exit', b'0', b'1'):\n"
        "    for number in (b'9' * 5000, b'%d' % (128 << 80), b'99999', b'-1', b'1_0'):\n"
        "      try: os.write(fd, word + b' ' + number + b'\\n')\n      except OSError: pass\n"
    )
    await place.cell(code, timeout_s=3)
    await place.cell(code + "os._exit(0)", timeout_s=3)


@TOPIC.promise()
async def zombies_are_reaped(place: Place) -> None:
    code = "import os, time\nfor _ in range(20):\n  if os.fork() == 0: os._exit(0)\nprint('made')"
    same((await place.command(code)).stdout, b"made\n", "stdout")
