"""Commands: what goes in, what comes out, and when they end."""

from __future__ import annotations

import asyncio
import time

from .place import SMALL, Place
from .promise import Topic, expect, same

TOPIC = Topic("programs")


@TOPIC.promise()
async def an_exit_code_is_told_apart_from_a_signal(place: Place) -> None:
    left = await place.sh("exit 137")
    same((left.exit_code, left.signal), (137, None), "exit 137: exit_code and signal")
    killed = await place.sh("kill -9 $$")
    same((killed.exit_code, killed.signal), (137, 9), "kill -9: exit_code and signal")


@TOPIC.promise()
async def a_command_that_does_not_exist_is_a_result(place: Place) -> None:
    result = await (await place.sandbox()).exec(["no-such-program"])
    same(result.exit_code, 127, "exit_code")
    expect(b"no-such-program" in result.stderr, f"stderr does not name it: {result.stderr!r}")


@TOPIC.promise()
async def stdout_and_stderr_come_apart(place: Place) -> None:
    result = await place.sh("echo out; echo err >&2; exit 3")
    same(
        (result.stdout, result.stderr, result.exit_code), (b"out\n", b"err\n", 3), "stdout, stderr, exit code"
    )


@TOPIC.promise()
async def stdin_arrives_whole_and_ends(place: Place) -> None:
    same((await place.sh("cat; echo end", stdin=b"in ")).stdout, b"in end\n", "cat of stdin")
    same((await place.sh("cat; echo end")).stdout, b"end\n", "cat without stdin")


@TOPIC.promise()
async def a_large_stdin_and_a_large_output_do_not_block_each_other(place: Place) -> None:
    data = bytes(range(256)) * 2048
    result = await (await place.sandbox()).exec(["cat"], stdin=data, output_limit=len(data), timeout_s=30)
    same((result.stdout == data, result.truncated), (True, False), "cat of 512 KiB: equal, truncated")


@TOPIC.promise()
async def a_program_sees_the_variables_it_was_given_and_no_others(place: Place) -> None:
    code = "import os\nprint(sorted(os.environ))"
    shown = await place.command(code, env={"WORD": "here"})
    names = set(shown.text.strip("[]\n").replace("'", "").split(", "))
    expect("WORD" in names, f"WORD is not among {names}")
    extra = names - {"WORD", "PATH", "HOME", "LANG", "LC_CTYPE"}  # Python itself may add LC_CTYPE
    same(extra, set(), "variables beyond those given, PATH, HOME and LANG")
    cell = await place.cell(f"{code}\nNone")
    expect("WORD" not in cell.text and place.secret not in cell.text, "a cell sees more than it was given")


@TOPIC.promise()
async def the_variables_of_the_spec_reach_every_program(place: Place) -> None:
    async with place.fresh(env={"WORD": "of the spec"}) as sandbox:
        same((await sandbox.exec(["sh", "-c", "echo $WORD"])).stdout, b"of the spec\n", "in a command")
        cell = await sandbox.python("import os; os.environ['WORD']", session="s")
        same(cell.stdout, b"'of the spec'\n", "in a cell")
        over = await sandbox.exec(["sh", "-c", "echo $WORD"], env={"WORD": "of the call"})
        same(over.stdout, b"of the call\n", "in a command that is given another value")


@TOPIC.promise()
async def a_program_starts_in_the_folder_it_is_told(place: Place) -> None:
    same((await place.sh("pwd", cwd="/usr")).stdout, b"/usr\n", "pwd with cwd=/usr")
    await place.sh("mkdir -p below && echo x > below/file")
    home = (await place.sh("pwd")).text.strip()
    same((await place.sh("cat file", cwd=f"{home}/below")).stdout, b"x\n", "a file below the first folder")


@TOPIC.promise()
async def a_command_past_its_deadline_is_killed(place: Place) -> None:
    begun = time.monotonic()
    result = await place.sh("echo begun; sleep 60", timeout_s=0.5)
    same((result.timed_out, result.signal), (True, 9), "timed_out and signal")
    same(result.stdout, b"begun\n", "what it had written")
    expect(time.monotonic() - begun < 20, "the call came back 20 s late")


@TOPIC.promise()
async def long_output_keeps_its_head_and_tail_and_is_counted(place: Place) -> None:
    result = await place.sh("seq 1 5000", output_limit=100)
    expect(result.stdout.startswith(b"1\n2\n3\n"), f"head: {result.stdout[:20]!r}")
    expect(result.stdout.endswith(b"4999\n5000\n"), f"tail: {result.stdout[-20:]!r}")
    same((result.truncated, result.stdout_bytes), (True, 23893), "truncated and stdout_bytes")


@TOPIC.promise()
async def bytes_come_back_as_they_were_written(place: Place) -> None:
    code = "import os\nos.write(1, bytes(range(256)))\nNone"
    for result in await place.both_ways(code):
        same(result.stdout, bytes(range(256)), "all 256 bytes")


@TOPIC.promise()
async def endless_output_is_stopped_and_cut_in_the_middle(place: Place) -> None:
    code = "import os\nos.write(1, b'BEGIN')\nwhile True: os.write(1, b'A' * 65536)"
    for result in await place.both_ways(code):
        same(
            (result.flooded, result.truncated, result.timed_out),
            (True, True, False),
            "flooded, truncated, timed_out",
        )
        expect(result.stdout.startswith(b"BEGIN"), "the head is missing")
        expect(b"bytes cut" in result.stdout, "no mark says how much was cut")
        expect(len(result.stdout) < SMALL.output_bytes + 64, f"{len(result.stdout)} bytes were kept")
        expect(result.stdout_bytes > SMALL.flood_bytes, f"only {result.stdout_bytes} bytes were counted")


@TOPIC.promise()
async def commands_run_side_by_side(place: Place) -> None:
    sandbox = await place.sandbox()
    begun = time.monotonic()
    results = await asyncio.gather(*(sandbox.exec(["sleep", "1"]) for _ in range(8)))
    same([result.exit_code for result in results], [0] * 8, "exit codes")
    expect(time.monotonic() - begun < 7, "eight sleeps of 1 s took more than 7 s")


@TOPIC.promise()
async def a_cancelled_command_is_stopped(place: Place) -> None:
    count = "import time\nwhile True:\n  open('beats', 'a').write('x'); time.sleep(0.05)"
    try:
        async with asyncio.timeout(2):
            await place.command(count, timeout_s=60)
    except TimeoutError:
        pass
    await asyncio.sleep(1)
    first = (await place.sh("wc -c < beats")).stdout
    await asyncio.sleep(0.5)
    same((await place.sh("wc -c < beats")).stdout, first, "what it writes a second later")
