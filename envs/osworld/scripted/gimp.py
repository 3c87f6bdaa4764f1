"""Tasks in GIMP 2.10. Its splash covers a quarter of the screen, its window more than a third."""

from __future__ import annotations

from collections.abc import Mapping

from ...message import Observation
from ...script import Script
from .solution import Solution, until_covered

_SHARE = 0.35


def _hide_docks(shown: Observation) -> Script:
    yield from until_covered(shown, _SHARE)
    yield "time.sleep(2)\npyautogui.press('tab')\ntime.sleep(2)"
    yield "DONE"


def _light_theme(shown: Observation) -> Script:
    yield from until_covered(shown, _SHARE)
    # Preferences is the fifth entry of the Edit menu from below
    yield (
        "time.sleep(2)\npyautogui.hotkey('alt', 'e')\ntime.sleep(1)\n"
        "pyautogui.press('up', presses=5)\npyautogui.press('enter')\ntime.sleep(4)"
    )
    yield "pyautogui.click(636, 557)\ntime.sleep(2)"  # Theme
    yield "pyautogui.click(844, 525)\ntime.sleep(3)"  # Light
    yield "pyautogui.click(1343, 761)\ntime.sleep(3)"  # OK
    yield "DONE"


SOLUTIONS: Mapping[str, Solution] = {
    "d52d6308-ec58-42b7-a2c9-de80e4837b2b": Solution(
        name="hide GIMP's docks", programs=("gimp",), play=_hide_docks
    ),
    "7767eef2-56a3-4cea-8c9f-48c070c7d65b": Solution(
        name="GIMP's light theme", programs=("gimp",), play=_light_theme
    ),
}
