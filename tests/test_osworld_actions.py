"""What a policy writes becomes mouse and keyboard events, or words about what is wrong; nothing is run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rz_agent.envs.osworld.actions import Parser, Screen, parser
from rz_agent.envs.osworld.actions.parsed import MAX_TEXT, Parsed
from rz_agent.envs.osworld.backends.pyautogui_text import program
from rz_agent.sandboxes.desktop.actions import (
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

SCREEN = Screen(width=1920, height=1080, pointer=(100, 50))
CODE, JSON, NEMOTRON = parser("pyautogui"), parser("computer_13"), parser("nemotron")
# Made for this project: replies of a computer-use model and what must become of them. "expect" is the code
# that is to run; "FAIL" means that nothing is, and that the model is told.
CASES = [
    json.loads(line)
    for line in (Path(__file__).parent / "data/nemotron_cases.jsonl").read_text().splitlines()
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: str(case["expect"]))
def test_nemotrons_replies_give_the_actions_that_they_must(case: dict[str, Any]) -> None:
    found = parser("nemotron", case.get("coord", "relative"))(case["content"], SCREEN)
    if case["expect"] == ["FAIL"]:
        assert found.error
        assert (found.events, found.signal) == ((), None)
    else:
        assert found == CODE("\n".join(case["expect"]), SCREEN)


PYAUTOGUI = {
    "import pyautogui; import time; pyautogui.click(1920 / 2, 540); time.sleep(0.5);": (
        Click(960, 540),
        Wait(0.5),
    ),
    "pyautogui.click(x=1, y=2, clicks=2, button='secondary')": (Click(1, 2, "right", 2),),
    "pyautogui.tripleClick(5, 6)": (Click(5, 6, clicks=3),),
    "pyautogui.rightClick()": (Click(button="right"),),
    "pyautogui.moveTo((7, 8), duration=1)": (Wait(1), Move(7, 8)),
    "pyautogui.moveRel(10, -20)": (Move(110, 30),),
    "pyautogui.dragTo(30, 40, 0.5, button='left')": (Drag(30, 40, duration_s=0.5),),
    "pyautogui.mouseDown(); pyautogui.mouseUp(9, 9)": (MouseDown(), MouseUp(9, 9)),
    "pyautogui.scroll(-5, x=3, y=4)": (Scroll(up=-5, x=3, y=4),),
    "pyautogui.hscroll(2)": (Scroll(right=2),),
    "pyautogui.write('a' + 'b\\n', interval=0.1)": (Type("ab\n", 0.1),),
    "pyautogui.typewrite(['a', 'enter'])": (Press("a"), Press("enter")),
    "pyautogui.press(['down', 'enter'], presses=2)": (Press(("down", "enter"), 2),),
    "pyautogui.press('tab', presses=2, interval=0.2)": (Press("tab"), Wait(0.2)) * 2,
    "pyautogui.hotkey(['ctrl', 'q'])": (Hotkey(("ctrl", "q")),),
    "import pyautogui as p\np.PAUSE = 1\nwith p.hold('shift'):\n    p.press('a')": (
        KeyDown("shift"),
        Press("a"),
        KeyUp("shift"),
    ),
    "from time import sleep\n# a comment\nsleep(2)": (Wait(2),),
}


@pytest.mark.parametrize("code", PYAUTOGUI)
def test_pyautogui_code_becomes_the_events_that_it_would_make(code: str) -> None:
    assert CODE(f"<think>hm</think>I click.\n```python\n{code}\n```", SCREEN) == Parsed(
        events=PYAUTOGUI[code]
    )


@pytest.mark.parametrize(
    ("reply", "expected"),
    [
        ("DONE", Parsed(signal="done")),
        ("```WAIT```", Parsed(signal="wait")),
        ("```python\npyautogui.press('a')\nFAIL\n```", Parsed(events=(Press("a"),), signal="fail")),
    ],
)
def test_a_word_of_osworlds_ends_or_waits_after_what_stands_before_it(reply: str, expected: Parsed) -> None:
    assert CODE(reply, SCREEN) == expected


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("import os", "import os"),
        ("os.system('reboot')", "os.system('reboot')"),
        ("pyautogui.screenshot('a.png')", "pyautogui.screenshot('a.png')"),
        ("for _ in range(3): pyautogui.press('a')", "for _ in range(3)"),
        ("x = 3", "x = 3"),
        ("pyautogui.click(*args)", "*args is not a constant"),
        ("pyautogui.click(9**9**9, 1)", "is not a constant"),
        ("pyautogui.press('entr')", "no key 'entr': did you mean enter"),
        ("pyautogui.click(1, 2, 3, 4, 5, 6, 7, 8, 9, 10)", "at most"),
        ("pyautogui.click(x=1, z=2)", "has no 'z'"),
        ("pyautogui.click('ok.png')", "'ok.png' is no number"),
        ("pyautogui.press('a'", "no Python"),
        ("time.sleep(500)", "waits at most 120 s"),
        ("pyautogui.write('a'); quit()", "quit()"),
        ("(" * 3000, "no Python"),
        ("", "there is no action"),
        ("<think>pyautogui.press('a')", "there is no action"),
        ("x" * (MAX_TEXT + 1), "at most"),
    ],
)
def test_what_cannot_be_done_is_named_and_none_of_it_is_done(code: str, words: str) -> None:
    found = CODE(code, SCREEN)
    assert words in found.error
    assert (found.events, found.signal) == ((), None)


@pytest.mark.parametrize(
    ("action", "expected"),
    [
        ({"action_type": "MOVE_TO", "x": 1, "y": 2}, (Move(1, 2),)),
        ({"action_type": "CLICK", "parameters": {"x": 1, "y": 2, "num_clicks": 2}}, (Click(1, 2, clicks=2),)),
        ({"action_type": "RIGHT_CLICK", "x": 1, "y": 2}, (Click(1, 2, "right"),)),
        ({"action_type": "DOUBLE_CLICK"}, (Click(clicks=2),)),
        ({"action_type": "MOUSE_DOWN", "button": "middle"}, (MouseDown(button="middle"),)),
        ({"action_type": "MOUSE_UP"}, (MouseUp(),)),
        ({"action_type": "DRAG_TO", "x": 1, "y": 2}, (Drag(1, 2),)),
        ({"action_type": "SCROLL", "dx": 1, "dy": -3}, (Scroll(up=-3, right=1),)),
        ({"action_type": "TYPING", "text": "é"}, (Type("é"),)),
        ({"action_type": "PRESS", "key": "f5"}, (Press("f5"),)),
        ({"action_type": "KEY_DOWN", "key": "alt"}, (KeyDown("alt"),)),
        ({"action_type": "KEY_UP", "key": "alt"}, (KeyUp("alt"),)),
        ({"action_type": "HOTKEY", "keys": ["ctrl", "s"]}, (Hotkey(("ctrl", "s")),)),
    ],
)
def test_each_of_the_thirteen_actions(action: dict[str, Any], expected: tuple[Any, ...]) -> None:
    assert JSON(f"```json\n{json.dumps(action)}\n```", SCREEN) == Parsed(events=expected)


@pytest.mark.parametrize(
    ("reply", "words"),
    [
        ("[", "not valid JSON"),
        ("3", "action_type"),
        ('{"action_type": "CLIK"}', "Did you mean 'CLICK'"),
        ('{"action_type": "TYPING"}', 'TYPING needs "text"'),
        ('{"action_type": "CLICK", "X": 1}', "button, num_clicks, x, y"),
        ('[{"action_type": "CLICK"}, {"action_type": "PRESS", "key": "no"}]', "no key 'no'"),
    ],
)
def test_a_malformed_action_is_answered_and_none_of_it_is_done(reply: str, words: str) -> None:
    found = JSON(reply, SCREEN)
    assert words in found.error
    assert found.events == ()


def test_a_share_of_the_screen_beyond_it_is_refused() -> None:
    found = NEMOTRON("## Code:\n```python\npyautogui.click(960, 0.5)\n```", SCREEN)
    assert "x = 960 is not between 0 and 1" in found.error


PIECES = (
    *(
        "## Code:\n",
        "```python\n",
        "```",
        "pyautogui.",
        "click(",
        "write(",
        "1e999",
        "-",
        "'a'",
        ")",
        "\n",
        "DONE",
    ),
    *("{", '"action_type": ', '"CLICK"', "}", "computer.terminate(", "[", "]"),
)


@pytest.mark.parametrize("parse", [CODE, JSON, NEMOTRON])
@given(text=st.one_of(st.text(), st.lists(st.sampled_from(PIECES)).map("".join)))
def test_any_text_is_taken_apart_without_an_exception(parse: Parser, text: str) -> None:
    found = parse(text, SCREEN)
    assert not (found.error and (found.events or found.signal))


def test_a_machine_that_has_pyautogui_is_told_the_same_events() -> None:
    for events in PYAUTOGUI.values():
        told = program(events).replace("import pyautogui, subprocess, time", "").replace("*[", "[")
        assert CODE(told, SCREEN).events == events
    assert "hotkey('shift', ',')" in program([Type("a<b")])  # pyautogui itself would type >
