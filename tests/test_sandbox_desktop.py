"""A desktop inside a sandbox: what is typed arrives, and what is drawn is seen."""

from __future__ import annotations

import asyncio
import contextlib
import re
import tracemalloc
import zlib
from collections.abc import AsyncIterator, Callable

import pytest
from desktops import NEEDS, SETTLE_S, another, content, paint, save_as, window
from painter import COLOURS
from rz_agent.sandboxes.desktop.actions import (
    Action,
    Click,
    Drag,
    Hotkey,
    KeyDown,
    KeyUp,
    MouseDown,
    MouseUp,
    Move,
    Press,
    Scroll,
    Type,
    Wait,
)
from rz_agent.sandboxes.desktop.desktop import Accessible, Desktop
from rz_agent.sandboxes.desktop.provider import DesktopProvider
from rz_agent.sandboxes.desktop.screen import Screen
from rz_agent.sandboxes.errors import Misconfigured, Unsupported
from rz_agent.sandboxes.local.provider import LocalProvider
from rz_agent.sandboxes.spec import SandboxSpec
from rz_agent.sandboxes.tables import DesktopTable, LocalTable

pytestmark = [pytest.mark.anyio, *NEEDS]
TEXT = "Größe: 42 €, (a+b)*c != d; é你好ß ~|{}\n\tsecond line: ÅΩя “quoted”\n"


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
async def the_desktop(anyio_backend: str) -> AsyncIterator[Desktop]:
    provider = DesktopProvider(DesktopTable(settle_s=SETTLE_S, a11y=True), LocalProvider(LocalTable()))
    yield await provider.create(SandboxSpec())
    await provider.aclose()


@pytest.fixture
async def desktop(the_desktop: Desktop) -> Desktop:
    await the_desktop.reset()
    return the_desktop


# -- typing ---------------------------------------------------------------------------------------------


async def test_a_text_typed_and_saved_through_the_editors_dialog_is_the_file(desktop: Desktop) -> None:
    for number in range(3):
        await desktop.reset()
        await desktop.launch(["mousepad"])
        await window(desktop, "Untitled")
        await desktop.act(Type(TEXT))
        await save_as(desktop, f"/box/é{number} 你.txt")
        assert await content(desktop, f"é{number} 你.txt", "\n") == TEXT


LAYOUTS = {
    "german": ["-layout", "de"],
    "french": ["-layout", "fr"],
    "russian": ["-layout", "ru"],
    "dead keys": ["-layout", "us", "-variant", "intl"],
    "two, the second in use": ["-layout", "us,gr", "-option", "grp:rctrl_toggle"],
}


async def test_it_is_right_on_every_layout_and_with_caps_lock(desktop: Desktop) -> None:
    await desktop.launch(["mousepad"])
    await window(desktop, "Untitled")
    line = "Ab1!'\"^~ xyZ[]{}@ zürich µ привет ΑΩ €\n"
    for options in LAYOUTS.values():
        await desktop.launch(["setxkbmap", "-option", "", *options])
        await desktop.act(Wait(0.3))
        if "us,gr" in options:
            await desktop.act(Press("ctrlright"))
        await desktop.act(Type(line))
    await desktop.launch(["setxkbmap", "-option", "", "-layout", "us"])
    await desktop.act(Wait(0.3))
    await desktop.act(Press("capslock"))
    await desktop.act(Type(line))
    await desktop.act(Press("x"))
    await save_as(desktop, "/box/layouts.txt")
    assert await content(desktop, "layouts.txt", "X") == line * 6 + "X"  # Caps Lock is on again


async def test_more_characters_than_the_keyboard_has_keys_arrive_in_order(desktop: Desktop) -> None:
    text = "".join(chr(0x4E00 + number) for number in range(600)) + "\n"
    await desktop.launch(["mousepad"])
    await window(desktop, "Untitled")
    await desktop.act(Type(text))
    await save_as(desktop, "/box/many.txt")
    assert await content(desktop, "many.txt", "\n") == text


# -- acting and looking ---------------------------------------------------------------------------------


ACTIONS: list[tuple[list[Action], list[str]]] = [
    ([Move(7, 8)], ["motion 7 8"]),
    ([Hotkey(("ctrl", "s"))], ["key 0xffe3", "key 0x73", "up 0x73", "up 0xffe3"]),
    ([Click(10, 20)], ["motion 10 20", "button 0x1 10 20", "release 0x1 10 20"]),
    ([Click(5, 6, "right", 2)], ["motion 5 6", *["button 0x3 5 6", "release 0x3 5 6"] * 2]),
    ([Scroll(up=-2, x=9, y=9)], ["motion 9 9", *["button 0x5 9 9", "release 0x5 9 9"] * 2]),
    ([Scroll(right=1)], ["button 0x7 9 9", "release 0x7 9 9"]),
    ([Drag(50, 60, 30, 40)], ["motion 30 40", "button 0x1 30 40", "motion 50 60", "release 0x1 50 60"]),
    ([MouseDown(3, 4), MouseUp(5, 6)], ["motion 3 4", "button 0x1 3 4", "motion 5 6", "release 0x1 5 6"]),
    ([Click(32000, 400)], ["motion 1279 400", "button 0x1 1279 400", "release 0x1 1279 400"]),
    ([KeyDown("shift"), KeyUp("shift")], ["key 0xffe1", "up 0xffe1"]),
    ([Type("B")], ["key 0xffe1", "key 0x62", "up 0x62", "up 0xffe1"]),
    ([Press(("a", "Enter"))], ["key 0x61", "up 0x61", "key 0xff0d", "up 0xff0d"]),
]


async def test_programs_see_what_a_person_would_have_done(desktop: Desktop) -> None:
    await paint(desktop, 0)
    for actions, _ in ACTIONS:
        for action in actions:
            await desktop.act(action)
    expected = [event for _, events in ACTIONS for event in events]
    seen = list[str]()
    for line in (await content(desktop, "events", f"{expected[-1]} 1279 400\n")).splitlines()[1:]:
        kind, detail, *place = line.split()
        if kind == "motion":
            seen = seen[: -1 if seen and seen[-1].startswith("motion") else None]  # only the last of a path
            seen.append(" ".join([kind, *place]))
        else:
            seen.append(" ".join([kind, detail, *(place if kind in ("button", "release") else ())]))
    assert seen == expected


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (lambda: Press("entre"), "no key 'entre': did you mean enter"),
        (lambda: Hotkey(("ctrl", "")), "no key ''"),
        (lambda: Type("a\x00"), "no key writes the character '\\x00'"),
        (lambda: Click(3), "x = 3, y = None"),
        (lambda: Click(1, 1, clicks=0), "clicks = 0"),
        (lambda: Click(40000, 1), "x = 40000 is no position"),
        (lambda: Wait(-1), "seconds = -1"),
    ],
)
async def test_what_cannot_be_done_is_refused_where_it_is_written(
    wrong: Callable[[], Action], words: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        wrong()


async def test_a_screenshot_shows_exactly_what_is_on_the_screen_change_after_change(desktop: Desktop) -> None:
    await paint(desktop, 0)
    done = 0
    for clicks in (0, 1, 1, len(COLOURS), 2, 0):  # as many as there are colours change nothing
        if clicks:
            await desktop.act(Click(1, 1, clicks=clicks))
            await content(desktop, "events", "release 0x1 1 1\n")
        done += clicks
        shot = await desktop.screenshot()
        assert (shot.mode, shot.size) == ("RGB", (1280, 800))
        left, right = (COLOURS[number % len(COLOURS)].to_bytes(3) for number in (done, 0))
        assert shot.tobytes() == (left * 640 + right * 640) * 800


async def test_pixels_are_not_unpacked_beyond_the_size_of_the_screen() -> None:
    screen, bomb = Screen((64, 48)), zlib.compress(bytes(64 << 20))
    answer = {"number": 1, "width": 64, "height": 48, "step": 4096, "bands": [0, 4096, 8192]}
    assert screen.update(answer, zlib.compress(bytes(64 * 48 * 4))).getextrema() == ((0, 0),) * 3
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match="other than 12288 bytes of pixels"):
            screen.update(answer, bomb)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


async def test_a_cancelled_look_leaves_the_next_one_right(desktop: Desktop) -> None:
    await paint(desktop, 0)
    for delay in (0.0, 0.002, 0.004, 0.008, 0.016):
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(delay):
                await desktop.screenshot()
    await desktop.act(Click(1, 1))
    assert (await desktop.screenshot()).tobytes()[:3] == COLOURS[1].to_bytes(3)


async def test_a_look_waits_until_what_was_done_has_settled() -> None:
    """The painter needs 0.3 s for its answer to a click."""
    seen = []
    for settle_s in (0.0, 1.0):
        async with another(DesktopTable(settle_s=settle_s)) as desktop:
            await paint(desktop, 0.3)
            await desktop.act(Click(1, 1))
            seen.append((await desktop.screenshot()).tobytes()[:3])
    assert seen == [COLOURS[0].to_bytes(3), COLOURS[1].to_bytes(3)]


async def test_the_screen_is_as_large_as_the_spec_or_the_table_says() -> None:
    async with another(DesktopTable(size=(333, 222)), SandboxSpec(screen=(1920, 1080))) as desktop:
        assert (await desktop.screenshot()).size == desktop.size == (1920, 1080)
    async with another(DesktopTable(size=(333, 222))) as desktop:
        assert (await desktop.screenshot()).size == (333, 222)
    with pytest.raises(Misconfigured, match="10 x 10 pixels"):
        async with another(DesktopTable(), SandboxSpec(screen=(10, 10))):
            pass


async def test_the_accessibility_tree_names_what_can_be_clicked(desktop: Desktop) -> None:
    await desktop.launch(["mousepad"])
    await window(desktop, "Untitled")
    await desktop.act(Type("déjà vu"))
    tree = await desktop.a11y()

    def named(root: Accessible, role: str, name: str) -> Accessible:
        return next(node for node in root.walk() if (node.role, node.name.strip()) == (role, name))

    assert tree.complete
    assert "déjà vu" in [node.text for node in tree.walk() if node.role == "text"]
    assert named(tree, "menu item", "Save As...").box is None
    box = named(tree, "menu", "File").box
    assert box is not None
    await desktop.act(Click(box[0] + box[2] // 2, box[1] + box[3] // 2))
    entry = named(await desktop.a11y(), "menu item", "Save As...")
    assert "showing" in entry.states
    assert entry.box is not None


async def test_without_being_configured_there_is_no_accessibility_tree() -> None:
    async with another(DesktopTable()) as desktop:
        with pytest.raises(Unsupported, match=r"desktop\.a11y = true"):
            await desktop.a11y()
