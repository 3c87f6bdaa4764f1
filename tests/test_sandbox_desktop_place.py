"""Where desktops are: in sandboxes of their own, kept and counted like any other; in containers as well."""

from __future__ import annotations

import asyncio
import contextlib
import io
import subprocess
import sys
import zipfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path

import pytest
from desktops import NEEDS, SETTLE_S, another, content, paint, window
from dockerd import Dockerd
from painter import COLOURS
from rz_agent.sandboxes.config import SandboxConfig
from rz_agent.sandboxes.desktop import hand
from rz_agent.sandboxes.desktop.actions import Click, Move, Type, Wait
from rz_agent.sandboxes.desktop.desktop import Desktop
from rz_agent.sandboxes.desktop.kept import KeptDesktop
from rz_agent.sandboxes.desktop.provider import DesktopProvider
from rz_agent.sandboxes.desktop.sandbox import DesktopSandbox
from rz_agent.sandboxes.errors import Died, FileError, Misconfigured, Unavailable
from rz_agent.sandboxes.inside.wire import pack
from rz_agent.sandboxes.keeper import Keeper
from rz_agent.sandboxes.ledger import Ledger
from rz_agent.sandboxes.local.provider import LocalProvider
from rz_agent.sandboxes.pool import SandboxPool
from rz_agent.sandboxes.registry import make_provider
from rz_agent.sandboxes.sandbox import Sandbox
from rz_agent.sandboxes.spec import SandboxSpec
from rz_agent.sandboxes.tables import DesktopTable, LocalTable

pytestmark = [pytest.mark.anyio, *NEEDS]


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


def servers(size: str) -> list[str]:
    """X servers of this machine with a screen of this size."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            found += [path.parent.name] if f"{size}x24".encode() in path.read_bytes() else []
    return found


async def test_programs_on_it_are_as_confined_as_any_other() -> None:
    status = "grep -E '^(CapEff|NoNewPrivs|Seccomp):' /proc/self/status | sort"
    async with another(DesktopTable()) as desktop:
        await desktop.launch(["sh", "-c", f"(id -u; {status}; tail -n +3 /proc/net/dev; echo end) > facts"])
        lines = [line.split() for line in (await content(desktop, "facts", "end\n")).splitlines()]
    assert lines[:4] == [["1000"], ["CapEff:", "0" * 16], ["NoNewPrivs:", "1"], ["Seccomp:", "2"]]
    assert [line[0] for line in lines[4:]] == ["lo:", "end"]


async def test_a_reset_makes_a_new_desktop_and_keeps_the_files_of_a_snapshot() -> None:
    async with another(DesktopTable(a11y=True)) as desktop:
        assert await desktop.list_dir(".") == []  # what holds the desktop leaves its files elsewhere
        await desktop.write("kept.txt", b"then")
        taken = await desktop.snapshot()
        await desktop.launch(["mousepad"])
        await window(desktop, "Untitled")
        await desktop.write("dropped.txt", b"now")
        await desktop.reset(to=taken)
        assert await desktop.windows() == []
        assert await desktop.read("kept.txt") == b"then"
        with pytest.raises(FileError):
            await desktop.read("dropped.txt")
        assert (await desktop.screenshot()).getextrema() == ((0, 0),) * 3  # black


# what a program does, and what a call on the desktop says then
ENDS = (
    ("sleep 0.2; kill -9 -1", "its desktop ended with status 137"),
    ("sleep 0.2; kill -STOP $PPID", "the desktop did not answer to 'screenshot' in 0.5 s"),
)


async def test_a_desktop_that_its_programs_have_ended_or_stopped_has_died_by_them_and_can_be_reset(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    under = LocalProvider(LocalTable())
    async with await DesktopProvider(DesktopTable(), under).create(SandboxSpec()) as desktop:
        for script, words in ENDS:
            with monkeypatch.context() as patch:
                patch.setattr(hand, "ANSWER_S", 0.5)
                await desktop.launch(["sh", "-c", script])
                await desktop.act(Wait(0.7))
                with pytest.raises(Died, match=words) as caught:
                    await desktop.screenshot()
            assert (caught.value.blame, caught.value.cause) == ("program", "ended")
            assert not await desktop.alive()
            assert (await desktop.exec(["echo", "still here"])).stdout == b"still here\n"
            await desktop.reset()
            assert await desktop.alive()
            assert await desktop.windows() == []
        await under.kill(desktop.id)
        with pytest.raises(Died) as caught:
            await desktop.screenshot()
        assert caught.value.blame == "infra"
    await under.aclose()


FORGE = """
import os, sys
for pid in filter(str.isdigit, os.listdir("/proc")):
    if "memfd_create" in open(f"/proc/{pid}/cmdline").read():
        for end in "fd/0", "fd/1", "mem":
            try:
                os.open(f"/proc/{pid}/{end}", os.O_WRONLY)
                print("opened", end, flush=True)
            except PermissionError:
                print("refused", end, flush=True)
print("end", flush=True)
"""


async def test_programs_cannot_speak_for_the_desktop() -> None:
    async with another(DesktopTable()) as desktop:
        await desktop.write("forge.py", FORGE.encode())
        await desktop.launch(["sh", "-c", "python3 forge.py > said 2>&1"])
        said = (await content(desktop, "said", "end\n")).splitlines()
    assert said == ["refused fd/0", "refused fd/1", "refused mem", "end"]


# -- nonsense -----------------------------------------------------------------------------------------------

LIAR = """
import os, struct, sys, time
def main(settings):
    os.write(1, struct.pack(">I", 17) + b'{"id": 0, "n": 0}')
    os.read(0, 65536)
    os.write(1, {says!r})
    time.sleep(600)
"""
SIZE = (64, 48)


def liar(says: bytes) -> bytes:
    """An archive like `archive.build`, of a program that says this whatever it is asked first."""
    buffer, place = io.BytesIO(), "rz_agent"
    with zipfile.ZipFile(buffer, "w") as bundle:
        for part in ("", "/sandboxes", "/desktop", "/inside"):
            place += part
            bundle.writestr(f"{place}/__init__.py", "")
        bundle.writestr(f"{place}/main.py", LIAR.replace("{says!r}", repr(says)))
    return buffer.getvalue()


@pytest.fixture(scope="module")
async def around(anyio_backend: str) -> AsyncIterator[Sandbox]:
    provider = LocalProvider(LocalTable(isolation="none"))
    yield await provider.create(SandboxSpec())
    await provider.aclose()


def node(**other: object) -> dict[str, object]:
    return {"role": "", "name": "", "box": None, "states": [], "text": "", "children": [], **other}


def shot(**other: object) -> bytes:
    right = {"id": 1, "width": 64, "height": 48, "step": 4096, "bands": [0], "number": 1}
    return pack(right | other, b"no zlib")


def tree(root: object) -> bytes:
    return pack({"id": 1, "tree": {"root": root, "complete": True}})


def framed(text: bytes) -> bytes:
    return len(text).to_bytes(4) + text


Ask = Callable[[Desktop], Awaitable[object]]
NONSENSE: dict[str, tuple[Ask, bytes]] = {
    "no frame": (lambda d: d.windows(), b"Hello, world"),
    "no JSON": (lambda d: d.windows(), framed(b"{{{")),
    "no object": (lambda d: d.windows(), framed(b"[]")),
    "nesting without end": (lambda d: d.windows(), framed(b"[" * 100_000)),
    "no length": (lambda d: d.windows(), framed(b'{"id": 1}')),
    "a body without end": (lambda d: d.windows(), framed(b'{"id": 1, "n": 1125899906842624}')),
    "less than no body": (lambda d: d.windows(), framed(b'{"id": 1, "n": -1}')),
    "no number": (lambda d: d.windows(), pack({"windows": []})),
    "the number of no request": (lambda d: d.windows(), pack({"id": 2, "windows": []})),
    "an error": (lambda d: d.act(Move(1, 1)), pack({"id": 1, "error": "forged"})),
    "no windows": (lambda d: d.windows(), pack({"id": 1, "windows": [{"a": 1}]})),
    "half a character": (
        lambda d: d.windows(),
        pack({"id": 1, "windows": [{"id": 1, "title": "\ud800", "box": [0] * 4, "active": True, "pid": 0}]}),
    ),
    "no pid": (lambda d: d.launch(["x"]), pack({"id": 1, "pid": "1"})),
    "no tree": (lambda d: d.a11y(), tree([])),
    "a box of two": (lambda d: d.a11y(), tree(node(box=[1, 2]))),
    "another screen": (lambda d: d.screenshot(), shot(width=30000)),
    "no bands": (lambda d: d.screenshot(), shot(bands=None)),
    "bands outside": (lambda d: d.screenshot(), shot(bands=[1 << 30])),
    "one band again and again": (lambda d: d.screenshot(), shot(bands=[0, 0])),
    "no pixels": (lambda d: d.screenshot(), shot()),
}


@pytest.mark.parametrize("name", NONSENSE)
async def test_whatever_a_desktop_answers_it_has_died_by_its_programs(around: Sandbox, name: str) -> None:
    ask, says = NONSENSE[name]
    desktop = DesktopSandbox(around, DesktopTable(a11y=True), SIZE, liar(says))
    await desktop.open()
    async with asyncio.timeout(10):
        with pytest.raises(Died) as caught:
            await ask(desktop)
        assert (caught.value.blame, caught.value.cause) == ("program", "ended")
        assert "ended with status" not in str(caught.value)
        with pytest.raises(Died) as again:
            await desktop.screenshot()
        assert again.value.blame == "program"


async def test_nothing_of_a_closed_desktop_is_left() -> None:
    async with another(DesktopTable(size=(345, 234))) as desktop:
        await desktop.launch(["sleep", "600"])
        assert servers("345x234")
    assert servers("345x234") == []


# -- what cannot be had -----------------------------------------------------------------------------------


async def test_a_program_that_is_not_there_is_named() -> None:
    async with another(DesktopTable()) as desktop:
        with pytest.raises(Misconfigured, match="mousepat"):
            await desktop.launch(["mousepat"])
        with pytest.raises(FileError, match="/box/tool"):
            await desktop.launch(["/box/tool"])
        with pytest.raises(FileError, match="/box/folder"):
            await desktop.launch(["true"], cwd="/box/folder")
        with pytest.raises(FileError, match="no words"):
            await desktop.launch([])
        assert await desktop.alive()
    with pytest.raises(Misconfigured, match=r"sandbox\.desktop\.python = 'python2'"):
        async with another(DesktopTable(python="python2")):
            pass


async def test_missing_programs_are_named_with_the_command_that_installs_them() -> None:
    table = DesktopTable(python="/usr/bin/python3")
    with pytest.raises(Unavailable, match=r"Xvfb, openbox, dbus-daemon\n  apt-get install .* xvfb"):
        async with another(table, SandboxSpec(env={"PATH": "/nowhere"})):
            pass


async def test_it_is_refused_where_programs_share_the_files_of_the_machine() -> None:
    provider = DesktopProvider(DesktopTable(), LocalProvider(LocalTable(isolation="none")))
    with pytest.raises(Misconfigured, match='isolation = "namespaces"'):
        await provider.create(SandboxSpec())
    await provider.aclose()


# -- kept -------------------------------------------------------------------------------------------------


def recipe(size: tuple[int, int]) -> SandboxConfig:
    return SandboxConfig.load(
        {"provider": "desktop", "max_live": 2, "desktop": {"size": size, "settle_s": SETTLE_S}}, source="test"
    )


async def test_the_check_makes_a_trial_desktop_and_the_recipe_names_the_provider() -> None:
    provider = make_provider(recipe((640, 480)))
    assert provider.capabilities().desktop
    last = (await provider.check())[-1]
    assert (last.name, last.status) == ("desktop", "ok"), last
    assert "640 x 480 pixels over local" in last.detail
    await provider.aclose()


async def test_a_keeper_hands_out_desktops_and_writes_them_into_its_books() -> None:
    config = recipe((641, 481))
    async with Keeper.of(config, run_id="run 7") as keeper:
        async with await keeper.create(config.spec()) as kept:
            assert isinstance(kept, KeptDesktop)
            assert [entry.sandbox_id for entry in Ledger().entries("desktop")] == [kept.id]
            assert [info.id for info in await keeper.provider.live(run_id="run 7")] == [kept.id]
            await paint(kept, 0)
            await kept.act(Click(1, 1))
            await kept.act(Type("e"))
            await content(kept, "events", "up 0x65 1 1\n")
            shot = await kept.screenshot()
            assert (shot.size, shot.getpixel((0, 0))) == (kept.size, tuple(COLOURS[1].to_bytes(3)))
            await kept.reset()
            assert await kept.windows() == []
        assert Ledger().entries("desktop") == []
        assert await keeper.provider.live(run_id="run 7") == []


async def test_each_episode_has_a_screen_of_its_own() -> None:
    async with SandboxPool.of(recipe((320, 240))) as pool:
        one, other = await pool.acquire(), await pool.acquire()
        assert one.id != other.id
        await pool.release(one)
        assert [entry.sandbox_id for entry in Ledger().entries("desktop")] == [other.id]


OWNER = """
import asyncio
from rz_agent.sandboxes.config import SandboxConfig
from rz_agent.sandboxes.keeper import Keeper

async def main():
    config = SandboxConfig.load({"provider": "desktop", "desktop": {"size": [642, 482]}}, source="test")
    sandbox = await Keeper.of(config, run_id="run 8").create(config.spec())
    print(sandbox.id, flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


@pytest.fixture
def elsewhere() -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """A desktop that another process holds, and that process."""
    with subprocess.Popen([sys.executable, "-c", OWNER], stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        try:
            yield owner.stdout.readline().strip(), owner
        finally:
            owner.kill()


async def test_a_desktop_whose_owner_is_killed_is_gone_and_reported_under_its_run(
    elsewhere: tuple[str, subprocess.Popen[str]],
) -> None:
    name, owner = elsewhere
    async with Keeper.of(recipe((642, 482))) as keeper:
        (info,) = await keeper.provider.live(run_id="run 8")
        assert (info.id, info.state, bool(servers("642x482"))) == (name, "running", True)
        owner.kill()
        owner.wait()
        (reaped,) = await keeper.reap(run_id="run 8")
        assert (reaped.id, reaped.run_id) == (name, "run 8")
        assert reaped.what in ("removed", "had ended")  # its own end may have been quicker
        async with asyncio.timeout(5):
            while servers("642x482"):  # noqa: ASYNC110  nothing tells
                await asyncio.sleep(0.05)
    assert Ledger().entries("desktop") == []


# -- in containers ----------------------------------------------------------------------------------------

# of this machine, in place of an image in which its packages are installed
INSTALLED = {folder: folder for folder in ("/usr", "/etc/fonts", "/etc/xdg", "/etc/X11")}
NAMES = next((str(path) for path in Path("/usr/lib").glob("*/libnss_wrapper.so")), "")


@pytest.mark.skipif(not NAMES, reason="libnss-wrapper is not installed")
async def test_over_docker_a_typed_text_is_in_the_editors_window_and_on_the_screen(dockerd: Dockerd) -> None:
    table = DesktopTable(over="docker", settle_s=SETTLE_S, a11y=True)
    provider = DesktopProvider(table, dockerd.provider(volumes=INSTALLED))
    async with await provider.create(SandboxSpec()) as desktop:
        assert (await desktop.screenshot()).getextrema() == ((0, 0),) * 3
        await desktop.launch(["mousepad"])
        await window(desktop, "Untitled")
        await desktop.act(Type("Größe: 42 €, 你好\n"))
        tree = await desktop.a11y()
        assert "Größe: 42 €, 你好\n" in [node.text for node in tree.walk() if node.role == "text"]
        assert (await desktop.screenshot()).getextrema() == ((0, 255),) * 3
    await provider.aclose()


@pytest.mark.skipif(not NAMES, reason="libnss-wrapper is not installed")
async def test_what_an_image_lacks_is_named(dockerd: Dockerd) -> None:
    without = dockerd.provider(volumes=INSTALLED | {"/dev/null": NAMES})
    provider = DesktopProvider(DesktopTable(over="docker", python="/usr/bin/python3"), without)
    missing = "Xvfb, openbox, dbus-daemon, libnss_wrapper.so"
    remedy = r"apt-get install .* xvfb .* libnss-wrapper\n  .* in the image \(sandbox\.docker\.image\)"
    with pytest.raises(Unavailable, match=rf"{missing}\n  {remedy}"):
        await provider.create(SandboxSpec(env={"PATH": "/nowhere"}))
    assert await provider.live() == []
    await provider.aclose()
