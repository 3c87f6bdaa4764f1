"""Tasks in VLC 3: its preferences, once the question of the first start is answered."""

from __future__ import annotations

from collections.abc import Mapping

from ...message import Observation
from ...script import Script
from .solution import Solution, until_covered

_SHARE = 0.06  # the question and the main window, whose middle is black
_SAVE = "pyautogui.click(1223, 868)\ntime.sleep(2)"


def _preferences(shown: Observation) -> Script:
    yield from until_covered(shown, _SHARE)
    yield "time.sleep(1)\npyautogui.click(474, 361)\ntime.sleep(2)"  # Continue
    yield "pyautogui.click(960, 500)\npyautogui.hotkey('ctrl', 'p')\ntime.sleep(4)"


def _recordings_on_the_desktop(shown: Observation) -> Script:
    yield from _preferences(shown)
    yield "pyautogui.click(1005, 235)\ntime.sleep(2)"  # Input / Codecs
    yield "pyautogui.click(1038, 692)\npyautogui.write('/home/user/Desktop')\ntime.sleep(1)"
    yield _SAVE
    yield "DONE"


def _several_instances(shown: Observation) -> Script:
    yield from _preferences(shown)
    yield "pyautogui.click(599, 707)\ntime.sleep(1)"  # only one instance when started from file manager
    yield _SAVE
    yield "DONE"


def _no_cone(shown: Observation) -> Script:
    yield from _preferences(shown)
    yield "pyautogui.click(655, 864)\ntime.sleep(3)"  # show all settings
    yield "pyautogui.hotkey('ctrl', 'f')\npyautogui.write('background cone')\ntime.sleep(2)"
    yield "pyautogui.click(649, 334)\ntime.sleep(3)"  # Qt, all that is left of the tree
    yield "pyautogui.scroll(-30, x=1200, y=600)\ntime.sleep(1)\npyautogui.click(906, 630)\ntime.sleep(1)"
    yield _SAVE
    yield "DONE"


SOLUTIONS: Mapping[str, Solution] = {
    "8ba5ae7a-5ae5-4eab-9fcc-5dd4fe3abf89": Solution(
        name="VLC's recordings on the desktop", programs=("vlc",), play=_recordings_on_the_desktop
    ),
    "f3977615-2b45-4ac5-8bba-80c17dbe2a37": Solution(
        name="several VLCs", programs=("vlc",), play=_several_instances
    ),
    "215dfd39-f493-4bc3-a027-8a97d72c61bf": Solution(name="no cone in VLC", programs=("vlc",), play=_no_cone),
}
