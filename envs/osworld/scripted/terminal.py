"""Tasks that are solved in a terminal: Ctrl+Alt+T, a command, its effect."""

from __future__ import annotations

from collections.abc import Mapping

from ...message import Observation
from ...script import Script
from .solution import Solution, until_covered

_SHARE = 0.1  # of the screen: the terminal's first window is larger
_PROFILE = "org.gnome.Terminal.Legacy.Profile:/org/gnome/terminal/legacy/profiles:/:"


def typed(*lines: str) -> str:
    """A turn that types these lines, each with its enter key."""
    return "\n".join(f"pyautogui.write({line!r} + '\\n')\ntime.sleep(1)" for line in lines)


def _in_terminal(name: str, *lines: str, programs: tuple[str, ...] = ()) -> Solution:
    def play(shown: Observation) -> Script:
        shown = yield "pyautogui.hotkey('ctrl', 'alt', 't')"
        yield from until_covered(shown, _SHARE)
        yield typed(*lines)
        yield "DONE"

    return Solution(name=name, programs=("gnome-terminal", *programs), play=play)


SOLUTIONS: Mapping[str, Solution] = {
    "e0df059f-28a6-4169-924f-b9623e7184cc": _in_terminal(
        "rename a folder", "mv ~/Desktop/todo_list_Jan_1 ~/Desktop/todo_list_Jan_2"
    ),
    "3ce045a0-877b-42aa-8d2c-b4a863336ab8": _in_terminal(
        "enlarge the text",
        "gsettings set org.gnome.desktop.interface text-scaling-factor 1.5",
        programs=("gsettings", "bc"),
    ),
    "bedcedc4-4d72-425e-ad62-21960b11fe0d": _in_terminal(
        "never dim the screen",
        "gsettings set org.gnome.desktop.session idle-delay 0",
        programs=("gsettings",),
    ),
    "f9be0997-4b7c-45c5-b05c-4612b44a6118": _in_terminal(
        "do not disturb",
        "gsettings set org.gnome.desktop.notifications show-banners false",
        programs=("gsettings",),
    ),
    "ec4e3f68-9ea4-4c18-a5c9-69f89d1178b3": _in_terminal(
        "remove a favourite program",
        "gsettings set org.gnome.shell favorite-apps \"['thunderbird.desktop', 'google-chrome.desktop']\"",
        programs=("gsettings",),
    ),
    "13584542-872b-42d8-b299-866967b5c3ef": _in_terminal(
        "a larger terminal for good",
        'id=$(gsettings get org.gnome.Terminal.ProfilesList default | tr -d "\'")',
        f"gsettings set {_PROFILE}$id/ default-size-columns 132",
        f"gsettings set {_PROFILE}$id/ default-size-rows 43",
        programs=("gsettings",),
    ),
}
