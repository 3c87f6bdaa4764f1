"""A started program: written to and read from while it runs, each byte seen once, nothing left of it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from rz_agent.sandboxes.errors import Died
from rz_agent.sandboxes.local.provider import LocalProvider
from rz_agent.sandboxes.provider import Provider
from rz_agent.sandboxes.sandbox import Process, Sandbox
from rz_agent.sandboxes.spec import SandboxSpec
from rz_agent.sandboxes.tables import LocalTable

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(params=["local", "docker"])
async def sandbox(request: pytest.FixtureRequest) -> AsyncIterator[Sandbox]:
    provider: Provider = LocalProvider(LocalTable())
    if request.param == "docker":
        provider = request.getfixturevalue("dockerd").provider()
    async with await provider.create(SandboxSpec()) as made:
        yield made
    await provider.aclose()


async def read_until(process: Process, end: bytes, seconds: float = 20.0) -> bytes:
    seen = b""
    async with asyncio.timeout(seconds):
        while not seen.endswith(end):
            output = await process.read(timeout_s=1.0)
            seen += output.stdout
            assert not output.ended or seen.endswith(end), seen
    return seen


async def test_it_answers_line_by_line_and_ends_with_its_input(sandbox: Sandbox) -> None:
    process = await sandbox.start(["sh", "-c", 'while read line; do echo "got $line"; done; exit 7'])
    for word in (b"one", b"two"):
        await process.write(word + b"\n")
        assert await read_until(process, b"\n") == b"got " + word + b"\n"
    await process.end_input()
    assert (await process.wait()).exit_code == 7
    assert (await process.read(timeout_s=1)).ended


async def test_reading_without_output_waits_and_returns_nothing(sandbox: Sandbox) -> None:
    process = await sandbox.start(["sleep", "60"])
    output = await process.read(timeout_s=0.2)
    assert (output.stdout, output.stderr, output.ended) == (b"", b"", False)
    await process.kill()
    assert (await process.wait()).signal == 9


async def test_many_megabytes_arrive_whole_through_a_small_buffer(sandbox: Sandbox) -> None:
    program = "import sys\nfor i in range(200000): sys.stdout.write(f'{i:>49}\\n')"
    process = await sandbox.start(["python3", "-c", program], output_limit=65536)
    got, ended = bytearray(), False
    while not ended:
        output = await process.read(timeout_s=5.0)
        got += output.stdout
        ended = output.ended
    assert len(got) == 200000 * 50
    assert bytes(got) == b"".join(b"%49d\n" % i for i in range(200000))
    result = await process.wait()
    assert (result.exit_code, result.stdout_bytes, result.truncated) == (0, 200000 * 50, False)


async def test_what_nobody_reads_holds_the_program_back(sandbox: Sandbox) -> None:
    process = await sandbox.start(["sh", "-c", "yes; echo"], output_limit=4096)
    await asyncio.sleep(0.5)
    held = len((await process.read(timeout_s=1.0)).stdout)
    assert 4096 <= held <= 4096 + 2 * 65536
    await process.kill()


async def test_the_last_words_are_in_the_read_that_ends(sandbox: Sandbox) -> None:
    process = await sandbox.start(["sh", "-c", "printf last; printf word >&2"])
    await process.wait()
    first, second = await process.read(timeout_s=1), await process.read(timeout_s=1)
    assert (first.stdout, first.stderr, first.ended) == (b"last", b"word", True)
    assert (second.stdout, second.stderr, second.ended) == (b"", b"", True)


async def test_a_large_input_is_taken_in_order_while_output_is_read(sandbox: Sandbox) -> None:
    process = await sandbox.start(["cat"])
    data = bytes(range(256)) * 8192

    async def feed() -> None:
        for start in range(0, len(data), 300_000):
            await process.write(data[start : start + 300_000])
        await process.end_input()

    feeding = asyncio.create_task(feed())
    got, ended = bytearray(), False
    while not ended:
        output = await process.read(timeout_s=5.0)
        got += output.stdout
        ended = output.ended
    await feeding
    assert bytes(got) == data


async def test_its_deadline_kills_it_with_all_it_started(sandbox: Sandbox) -> None:
    process = await sandbox.start(["sh", "-c", "setsid sleep 61 & sleep 62"], timeout_s=0.5)
    result = await process.wait()
    assert (result.timed_out, result.signal) == (True, 9)
    left = await sandbox.exec(["sh", "-c", "cat /proc/[0-9]*/cmdline"])
    assert b"sleep\x0061" not in left.stdout


async def test_a_cancelled_wait_leaves_it_running(sandbox: Sandbox) -> None:
    process = await sandbox.start(["cat"])
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.1):
            await process.wait()
    await process.write(b"still here\n")
    assert await read_until(process, b"\n") == b"still here\n"
    await process.kill()


async def test_writing_to_one_that_has_ended_is_harmless(sandbox: Sandbox) -> None:
    process = await sandbox.start(["true"])
    await process.wait()
    await process.write(b"hello?")
    await process.end_input()
    await process.kill()


async def test_the_end_of_the_sandbox_reaches_who_waits(sandbox: Sandbox) -> None:
    process = await sandbox.start(["sleep", "60"])
    waiting = asyncio.create_task(process.wait())
    reading = asyncio.create_task(process.read(timeout_s=50))
    await asyncio.sleep(0.1)
    await sandbox.close()
    for task in (waiting, reading):
        with pytest.raises((Died, asyncio.CancelledError)):
            await task


async def test_files_are_listed_and_links_are_named_as_such(sandbox: Sandbox) -> None:
    await sandbox.write("a/b.txt", b"12345")
    await sandbox.exec(["sh", "-c", "ln -s /etc/passwd a/link; mkdir a/folder; mkfifo a/pipe"])
    found = [(entry.name, entry.kind, entry.size) for entry in await sandbox.list_dir("a")]
    assert found == [("b.txt", "file", 5), ("folder", "folder", 0), ("link", "link", 0), ("pipe", "other", 0)]


async def test_a_snapshot_brings_the_files_back(sandbox: Sandbox) -> None:
    await sandbox.write("kept.txt", b"then")
    await sandbox.exec(["sh", "-c", "chmod 700 kept.txt; echo t > /tmp/t"])
    taken = await sandbox.snapshot()
    await sandbox.write("kept.txt", b"now")
    await sandbox.write("new.txt", b"x")
    await sandbox.reset(to=taken)
    assert await sandbox.read("kept.txt") == b"then"
    assert await sandbox.read("/tmp/t") == b"t\n"
    assert [entry.name for entry in await sandbox.list_dir(".")] == ["kept.txt"]
    seen = await sandbox.exec(["stat", "-c", "%a", "kept.txt"])
    assert seen.stdout == b"700\n"
