"""What the tests of desktops share: what they need here, and waiting for what a program shows."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from rz_agent.sandboxes.desktop.actions import Hotkey, Press, Type
from rz_agent.sandboxes.desktop.archive import build
from rz_agent.sandboxes.desktop.desktop import Desktop, Window
from rz_agent.sandboxes.desktop.provider import DesktopProvider
from rz_agent.sandboxes.errors import FileError
from rz_agent.sandboxes.local.provider import LocalProvider
from rz_agent.sandboxes.spec import SandboxSpec
from rz_agent.sandboxes.tables import DesktopTable, LocalTable

NEEDS = [
    pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not installed"),
    pytest.mark.skipif(shutil.which("Xvfb") is None, reason="xvfb is not installed"),
    pytest.mark.skipif(shutil.which("openbox") is None, reason="openbox is not installed"),
    pytest.mark.skipif(shutil.which("dbus-daemon") is None, reason="dbus is not installed"),
    pytest.mark.skipif(shutil.which("mousepad") is None, reason="mousepad is not installed"),
    pytest.mark.skipif(
        not Path("/usr/libexec/at-spi-bus-launcher").exists(), reason="at-spi2-core is not installed"
    ),
]
SETTLE_S = 0.25


@contextlib.asynccontextmanager
async def another(table: DesktopTable, spec: SandboxSpec | None = None) -> AsyncIterator[Desktop]:
    provider = DesktopProvider(table, LocalProvider(LocalTable()))
    try:
        yield await provider.create(spec or SandboxSpec())
    finally:
        await provider.aclose()


async def window(desktop: Desktop, title: str) -> Window:
    """The window with these words in its title, once it is there."""
    async with asyncio.timeout(30):
        while True:
            for found in await desktop.windows():
                if title in found.title:
                    return found
            await asyncio.sleep(0.05)


async def content(desktop: Desktop, path: str, ending: str = "") -> str:
    """A file, once it is there and ends like this."""
    async with asyncio.timeout(30):
        while True:
            with contextlib.suppress(FileError):
                text = (await desktop.read(path)).decode()
                if text.endswith(ending):
                    return text
            await asyncio.sleep(0.05)


async def save_as(desktop: Desktop, path: str) -> None:
    """Through the editor's dialog."""
    await desktop.act(Hotkey(("ctrl", "s")))
    await window(desktop, "Save As")
    await desktop.act(Hotkey(("ctrl", "a")))
    await desktop.act(Type(path))
    await desktop.act(Press("enter"))


async def paint(desktop: Desktop, seconds: float) -> None:
    """Start the painter and wait until it covers the screen."""
    await desktop.write("libraries.zip", build())
    await desktop.write("painter.py", (Path(__file__).parent / "painter.py").read_bytes())
    await desktop.launch(["python3", "painter.py", str(seconds)], env={"PYTHONPATH": "/box/libraries.zip"})
    await content(desktop, "events", "ready\n")
