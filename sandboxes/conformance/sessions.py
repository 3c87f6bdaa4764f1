"""Stateful Python: what is kept, what is lost and how that is said."""

from __future__ import annotations

import asyncio

from .place import Place
from .promise import Topic, expect, same

TOPIC = Topic("sessions")


@TOPIC.promise()
async def a_session_keeps_its_state_and_echoes_the_last_expression(place: Place) -> None:
    first = await place.cell("x = 41\nprint('said')\nx + 1", session="state")
    same((first.stdout, first.fresh, first.exit_code), (b"said\n42\n", True, 0), "stdout, fresh, exit_code")
    second = await place.cell("x", session="state")
    same((second.stdout, second.fresh), (b"41\n", False), "the second cell's stdout and fresh")
    same((await place.cell("None", session="state")).stdout, b"", "the echo of None")


@TOPIC.promise()
async def an_exception_is_a_traceback_and_exit_code_1(place: Place) -> None:
    result = await place.cell("def f():\n    return 1 / 0\nf()", session="error")
    same(result.exit_code, 1, "exit_code")
    expect(
        b"ZeroDivisionError: division by zero" in result.stdout + result.stderr,
        f"no traceback: {result.text!r}",
    )
    same((await place.cell("1", session="error")).fresh, False, "fresh after an exception")


@TOPIC.promise()
async def a_timeout_interrupts_first_and_keeps_the_state(place: Place) -> None:
    await place.cell("x = 7", session="slow")
    result = await place.cell("while True: pass", session="slow", timeout_s=0.5)
    same((result.timed_out, result.state_lost), (True, False), "timed_out and state_lost")
    same((await place.cell("x", session="slow")).stdout, b"7\n", "x afterwards")


@TOPIC.promise()
async def a_cell_that_swallows_the_interrupt_is_killed_and_the_next_is_fresh(place: Place) -> None:
    stubborn = "import time\nx = 1\nwhile True:\n  try:\n    time.sleep(60)\n  except KeyboardInterrupt: pass"
    result = await place.cell(stubborn, session="stubborn", timeout_s=2)
    same((result.timed_out, result.state_lost), (True, True), "timed_out and state_lost")
    after = await place.cell("'x' in globals()", session="stubborn")
    same((after.stdout, after.fresh), (b"False\n", True), "the next cell's stdout and fresh")


@TOPIC.promise()
async def a_session_that_ends_itself_says_so_and_starts_anew(place: Place) -> None:
    result = await place.cell("import os; os._exit(7)", session="gone")
    same((result.exit_code, result.state_lost), (7, True), "exit_code and state_lost")
    same((await place.cell("1", session="gone")).fresh, True, "fresh of the next cell")


@TOPIC.promise()
async def a_forged_end_mark_does_not_shift_later_cells(place: Place) -> None:
    forge = (
        "import os\nfor fd in range(3, 16):\n"
        "  try: os.write(fd, b'1 0\\n2 0\\n3 0\\n99 0\\nexit 0\\nnonsense\\n')\n  except OSError: pass"
    )
    await place.cell(forge, session="forger")
    for number in range(10, 15):
        result = await place.cell(f"print({number})\n{number} * 2", session="forger")
        same(result.stdout, f"{number}\n{number * 2}\n".encode(), "a later cell's own output")


@TOPIC.promise()
async def a_session_cannot_say_how_it_ended(place: Place) -> None:
    forge = (
        "import os\nfor fd in range(3, 16):\n"
        "  try: os.write(fd, b'exit 9\\nx')\n  except OSError: pass\nos._exit(7)"
    )
    result = await place.cell(forge, session="liar")
    same((result.exit_code, result.signal, result.state_lost), (7, None, True), "code, signal, state_lost")


@TOPIC.promise()
async def sessions_do_not_share_their_names(place: Place) -> None:
    await place.cell("theirs = 1", session="a")
    seen = await place.cell("'theirs' in globals()", session="b")
    same(seen.stdout, b"False\n", "a name of another session")


@TOPIC.promise("isolates_sessions")
async def sessions_do_not_share_files_or_processes(place: Place) -> None:
    code = "import subprocess\nopen('note', 'w').write('a')\nchild = subprocess.Popen(['sleep', '60'])"
    await place.cell(code, session="files a")
    look = (
        "import os\nprint(os.path.exists('note'))\n"
        "print(any(b'sleep' in open(f'/proc/{p}/cmdline', 'rb').read() for p in os.listdir('/proc')"
        " if p.isdigit()))"
    )
    same((await place.cell(look, session="files b")).stdout, b"False\nFalse\n", "its file, its process seen")
    for name in ("files a", "files b"):
        await (await place.sandbox()).end_session(name)


@TOPIC.promise()
async def an_ended_session_is_forgotten_and_ending_an_unknown_one_is_fine(place: Place) -> None:
    await place.cell("x = 1", session="ended")
    sandbox = await place.sandbox()
    await sandbox.end_session("ended")
    await sandbox.end_session("ended")
    same((await place.cell("'x' in globals()", session="ended")).stdout, b"False\n", "a name afterwards")


@TOPIC.promise()
async def a_cancelled_cell_loses_its_session_and_nothing_else(place: Place) -> None:
    try:
        async with asyncio.timeout(1):
            await place.cell("while True: pass", session="cancelled", timeout_s=60)
    except TimeoutError:
        pass
    same((await place.cell("1", session="cancelled")).fresh, True, "fresh of the next cell")


@TOPIC.promise()
async def sessions_run_side_by_side(place: Place) -> None:
    async def episode(number: int) -> None:
        for turn in range(3):
            code = f"x = {number}\nimport time; time.sleep(0.05)\nx * {turn}"
            result = await place.cell(code, session=f"side {number}")
            same(
                (result.stdout, result.fresh), (f"{number * turn}\n".encode(), turn == 0), "stdout and fresh"
            )
        await (await place.sandbox()).end_session(f"side {number}")

    await asyncio.gather(*(episode(number) for number in range(8)))
