"""Files: what is read and written, and the tricks by which a program would have the harness read its own."""

from __future__ import annotations

import contextlib
from dataclasses import replace

from ..errors import FileError
from .place import Place
from .promise import Topic, expect, same

TOPIC = Topic("files")


@TOPIC.promise()
async def a_written_file_is_read_back_and_seen_by_programs(place: Place) -> None:
    sandbox = await place.sandbox()
    await sandbox.write("deep/folder/data.bin", b"\0\xff", mode=0o755)
    same(await sandbox.read("deep/folder/data.bin"), b"\0\xff", "what was read")
    shown = await place.sh("test -x deep/folder/data.bin && wc -c < deep/folder/data.bin")
    same(shown.stdout.strip(), b"2", "its size, if a program may execute it")
    await sandbox.write("deep/folder/data.bin", b"other")
    same(await sandbox.read("deep/folder/data.bin"), b"other", "what was read after it was replaced")


@TOPIC.promise()
async def a_program_writes_and_the_harness_reads(place: Place) -> None:
    await place.sh("printf 'of the program' > made.txt")
    same(await (await place.sandbox()).read("made.txt"), b"of the program", "what was read")


@TOPIC.promise()
async def files_are_listed_by_name_and_links_are_named_as_such(place: Place) -> None:
    sandbox = await place.sandbox()
    await sandbox.write("listed/b.txt", b"12345")
    await place.sh("ln -sf /etc/passwd listed/link; mkdir -p listed/folder; mkfifo listed/pipe")
    found = [(entry.name, entry.kind, entry.size) for entry in await sandbox.list_dir("listed")]
    wanted = [("b.txt", "file", 5), ("folder", "folder", 0), ("link", "link", 0), ("pipe", "other", 0)]
    same(found, wanted, "name, kind and size")


@TOPIC.promise()
async def a_listing_of_many_long_names_is_whole_or_an_error(place: Place) -> None:
    code = (
        "import os\nos.mkdir('many')\nfor number in range(6000):\n"
        "  os.mknod(b'many/' + b'\\xff' * 240 + b'%d' % number)"  # no text: six characters each in JSON
    )
    async with place.fresh(limits=replace(place.spec.limits, disk_mb=64)) as sandbox:
        made = await sandbox.exec(["python3", "-c", code], timeout_s=60)
        same((made.exit_code, made.text), (0, ""), "exit code of making them")
        with contextlib.suppress(FileError):
            same(len(await sandbox.list_dir("many")), 6000, "entries")
        same(await sandbox.alive(), True, "alive()")


async def _refused(place: Place, path: str, *, max_bytes: int = 1 << 20) -> None:
    try:
        data = await (await place.sandbox()).read(path, max_bytes=max_bytes)
    except FileError as error:
        same(error.retryable, False, "retryable")
        return
    expect(place.secret.encode() not in data, f"reading {path} gave the host's own file")
    expect(False, f"reading {path} gave {data[:40]!r}, not FileError")


@TOPIC.promise()
async def a_file_larger_than_asked_for_is_an_error(place: Place) -> None:
    await (await place.sandbox()).write("large", b"x" * 100)
    await _refused(place, "large", max_bytes=99)


# The trick's name, the script that sets it up, the path that the harness is asked for.
TRICKS = (
    ("a link to the host's shadow file", "ln -sf /etc/shadow shadow", "shadow"),
    ("a link to a planted file", "ln -sf {planted} host", "host"),
    ("a pipe nobody writes to", "mkfifo fifo", "fifo"),
    ("a link to an environment", "ln -sf /proc/1/environ environ", "environ"),
    ("a link to an endless device", "ln -sf /dev/zero zero", "zero"),
    ("a file of many megabytes without blocks", "truncate -s 9999999 big", "big"),
    ("a link to itself", "ln -sf loop loop", "loop"),
    ("a folder", "mkdir -p folder", "folder"),
    ("a folder that is a link", "ln -sfn /usr/bin bin", "bin/env"),
    ("a path that climbs out", "true", "../etc/passwd"),
    ("an environment", "true", "/proc/1/environ"),
    ("a process's memory", "true", "/proc/self/mem"),
    ("the shadow file", "true", "/etc/shadow"),
    ("a file that is not there", "true", "missing"),
)


def _trick(setup: str, path: str) -> None:
    async def body(place: Place) -> None:
        made = await place.sh(setup.format(planted=place.planted))
        same(made.exit_code, 0, f"exit code of {setup!r}")
        await _refused(place, path)

    name = next(name for name, script, asked in TRICKS if (script, asked) == (setup, path))
    TOPIC.add(f"reading {name} is an error and never host content", body)


for _, _setup, _path in TRICKS:
    _trick(_setup, _path)


def _outside(path: str) -> None:
    async def body(place: Place) -> None:
        await place.sh("ln -sfn /usr/bin bin")
        try:
            await (await place.sandbox()).write(path, b"x")
        except FileError:
            return
        expect(False, f"writing {path} was accepted")

    TOPIC.add(f"writing {path} outside the folders is an error", body)


for _path in ("/usr/x", "/etc/passwd", "bin/x", "/proc/x"):
    _outside(_path)
