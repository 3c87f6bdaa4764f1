"""Sandboxes without `await`: the same answers, an interrupt stops the program, nothing is left at the end."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest
from rz_agent.errors import ConfigError
from rz_agent.sandboxes.errors import FileError, Misconfigured
from rz_agent.sandboxes.ledger import Ledger
from rz_agent.sandboxes.local import census
from rz_agent.sandboxes.sync import SyncSandbox

BARE = {"isolation": "none"}


@pytest.fixture(scope="module")
def box() -> Iterator[SyncSandbox]:
    with SyncSandbox.create("local", local=BARE) as made:
        yield made


def test_commands_cells_and_files_answer_as_they_do_with_await(box: SyncSandbox) -> None:
    assert box.exec(["cat"], stdin=b"hello").stdout == b"hello"
    assert box.python("x = 41").fresh
    assert box.python("x + 1").text == "42\n"
    box.write("folder/note", b"kept")
    assert box.read("folder/note") == b"kept"
    assert [entry.name for entry in box.list_dir("folder")] == ["note"]
    taken = box.snapshot()
    box.reset()
    with pytest.raises(FileError):
        box.read("folder/note")
    box.reset(to=taken)
    assert box.read("folder/note") == b"kept"


def test_a_started_program_is_talked_with(box: SyncSandbox) -> None:
    process = box.start(["cat"])
    process.write(b"line\n")
    assert process.read(timeout_s=10).stdout == b"line\n"
    process.end_input()
    assert process.wait().exit_code == 0
    box.start(["sleep", "60"]).kill()


def test_an_interrupt_stops_the_program_and_leaves_the_sandbox_usable(box: SyncSandbox) -> None:
    main = threading.main_thread().ident or 0
    timer = threading.Timer(1.0, signal.pthread_kill, (main, signal.SIGINT))
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
    timer.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            box.python("while True: pass", session="endless", timeout_s=600)
    finally:
        signal.signal(signal.SIGINT, before)
    assert box.exec(["echo", "on"]).stdout == b"on\n"
    assert box.python("1", session="endless").fresh


def test_close_ends_its_thread_and_its_books_and_may_be_called_twice() -> None:
    before = threading.active_count()
    box = SyncSandbox.create("local", local=BARE)
    name = box.id
    assert box.alive()
    box.close()
    box.close()
    assert not box.alive()
    assert threading.active_count() == before
    assert name not in census.take_census()
    assert name not in {entry.sandbox_id for entry in Ledger().entries()}


def test_what_cannot_be_made_is_said_and_leaves_no_thread() -> None:
    before = threading.active_count()
    with pytest.raises(ConfigError, match=r"sandbox\.limits\.memory"):
        SyncSandbox.create("local", limits={"memory": 1})
    with pytest.raises(Misconfigured, match="nowhere"):
        SyncSandbox.create("local", local={"isolation": "none", "python": "/nowhere"})
    assert threading.active_count() == before


FORGETFUL = """
from rz_agent.sandboxes.sync import SyncSandbox
box = SyncSandbox.create("local", local={"isolation": "none"})
box.python("import subprocess; subprocess.Popen(['sleep', '600'])")
print(box.id)
"""


def test_a_forgotten_one_is_closed_at_the_end_of_the_interpreter() -> None:
    ran = subprocess.run([sys.executable, "-c", FORGETFUL], capture_output=True, text=True, timeout=60)
    assert (ran.returncode, ran.stderr) == (0, "")
    name = ran.stdout.strip()
    assert name not in census.take_census()
    assert name not in {entry.sandbox_id for entry in Ledger().entries()}
