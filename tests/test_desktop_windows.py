"""When a desktop may say that it is there: its window manager answers, it has not only put up its name."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator

import pytest
from desktops import NEEDS
from rz_agent.sandboxes.desktop.inside.windows import Windows
from Xlib import X
from Xlib.display import Display

pytestmark = NEEDS


@pytest.fixture
def display() -> Iterator[Display]:
    given, gives = os.pipe()
    options = ["-displayfd", str(gives), "-screen", "0", "320x200x24", "-nolisten", "tcp", "-noreset", "-ac"]
    with subprocess.Popen(["Xvfb", *options], pass_fds=(gives,), stderr=subprocess.DEVNULL) as server:
        os.close(gives)
        with open(given) as numbers:  # it writes the newline apart, and ends when nobody reads that
            display = Display(f":{numbers.readline().strip()}")
        try:
            yield display
        finally:
            display.close()
            server.terminate()


def test_a_window_manager_is_there_once_it_answers(display: Display) -> None:
    windows = Windows(display)
    assert not windows.managed(0.05)
    root = display.screen().root
    named = display.intern_atom("_NET_SUPPORTING_WM_CHECK")
    root.change_property(named, display.intern_atom("WINDOW"), 32, [root.id], X.PropModeReplace)
    assert not windows.managed(0.3)  # its name alone
    command = ["openbox", "--sm-disable"]
    environment = {**os.environ, "DISPLAY": display.get_display_name()}
    with subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL) as manager:
        try:
            assert windows.managed(30)
            windows.caught_up()  # whose count of answers begins here
        finally:
            manager.terminate()
