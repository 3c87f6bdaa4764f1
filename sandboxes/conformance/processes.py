"""Started programs: written to and read from while they run."""

from __future__ import annotations

import asyncio

from ..sandbox import Process
from .place import Place
from .promise import Topic, expect, same

TOPIC = Topic("processes")


async def _until(process: Process, end: bytes) -> bytes:
    seen = b""
    async with asyncio.timeout(20):
        while not seen.endswith(end):
            output = await process.read(timeout_s=1.0)
            seen += output.stdout
            expect(not output.ended or seen.endswith(end), f"it ended after {seen!r}")
    return seen


async def _all(process: Process) -> bytes:
    got, ended = bytearray(), False
    while not ended:
        output = await process.read(timeout_s=5.0)
        got += output.stdout
        ended = output.ended
    return bytes(got)


@TOPIC.promise()
async def a_program_answers_line_by_line_and_ends_with_its_input(place: Place) -> None:
    script = 'while read line; do echo "got $line"; done; exit 7'
    process = await (await place.sandbox()).start(["sh", "-c", script])
    for word in (b"one", b"two"):
        await process.write(word + b"\n")
        same(await _until(process, b"\n"), b"got " + word + b"\n", "the answer")
    await process.end_input()
    same((await process.wait()).exit_code, 7, "exit_code")
    expect((await process.read(timeout_s=1)).ended, "a read after the end does not say so")


@TOPIC.promise()
async def reading_without_output_waits_its_time_and_returns_nothing(place: Place) -> None:
    process = await (await place.sandbox()).start(["sleep", "60"])
    output = await process.read(timeout_s=0.2)
    same((output.stdout, output.stderr, output.ended), (b"", b"", False), "stdout, stderr, ended")
    await process.kill()
    same((await process.wait()).signal, 9, "the signal after kill()")


@TOPIC.promise()
async def megabytes_arrive_whole_through_a_small_buffer(place: Place) -> None:
    code = "import sys\nfor i in range(40000): sys.stdout.write(f'{i:>49}\\n')"
    process = await (await place.sandbox()).start(["python3", "-I", "-c", code], output_limit=65536)
    got = await _all(process)
    expect(
        got == b"".join(b"%49d\n" % i for i in range(40000)),
        f"{len(got)} bytes of 2,000,000, or another order",
    )


@TOPIC.promise()
async def the_last_words_are_read_once(place: Place) -> None:
    process = await (await place.sandbox()).start(["sh", "-c", "printf last; printf word >&2"])
    await process.wait()
    first, second = await process.read(timeout_s=1), await process.read(timeout_s=1)
    same((first.stdout, first.stderr, first.ended), (b"last", b"word", True), "the first read after its end")
    same((second.stdout, second.stderr, second.ended), (b"", b"", True), "the second")


@TOPIC.promise()
async def a_started_program_is_killed_at_its_deadline(place: Place) -> None:
    process = await (await place.sandbox()).start(["sleep", "61"], timeout_s=0.5)
    result = await process.wait()
    same((result.timed_out, result.signal), (True, 9), "timed_out and signal")


@TOPIC.promise()
async def a_cancelled_wait_leaves_it_running(place: Place) -> None:
    process = await (await place.sandbox()).start(["cat"])
    try:
        async with asyncio.timeout(0.2):
            await process.wait()
    except TimeoutError:
        pass
    await process.write(b"still here\n")
    same(await _until(process, b"\n"), b"still here\n", "the answer afterwards")
    await process.kill()


@TOPIC.promise()
async def writing_to_one_that_has_ended_is_harmless(place: Place) -> None:
    process = await (await place.sandbox()).start(["true"])
    await process.wait()
    await process.write(b"hello?")
    await process.end_input()
    await process.kill()
