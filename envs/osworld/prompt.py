"""What the policy is told before it sees the screen: one text for each way of writing actions."""

from __future__ import annotations

import json

from .machine import Machine
from .options import OsworldOptions

_BEGIN = """You operate a computer with a {width} x {height} screen to do what the user asks. After each
of your turns you are shown the screen. You can use the mouse and the keyboard, nothing else. If a password
is asked for, it is {password!r}."""
_END = "Write WAIT to wait for a moment, DONE when the task is done, FAIL when it cannot be done."

_PYAUTOGUI = f"""{_BEGIN}

Write what you do as Python code that calls pyautogui, in one ```python block. Positions are pixels from the
upper left corner. Write every value itself: variables, loops, screenshots and image search are not
available; time.sleep is. {_END}"""

_COMPUTER_13 = f"""{_BEGIN}

Write what you do as one JSON object in a ```json block, for example
{{{{"action_type": "CLICK", "x": 100, "y": 200}}}}
Positions are pixels from the upper left corner. The actions:
MOVE_TO x y; CLICK button x y num_clicks (all optional); RIGHT_CLICK x y; DOUBLE_CLICK x y; DRAG_TO x y;
MOUSE_DOWN button; MOUSE_UP button; SCROLL dx dy; TYPING text; PRESS key; KEY_DOWN key; KEY_UP key;
HOTKEY keys (a list). {_END}"""

_WAIT = {
    "name": "computer.wait",
    "description": "Make the computer wait for 20 seconds for installation, running code, etc.",
    "parameters": {"type": "object", "properties": {}, "required": []},
}
_TERMINATE = {
    "name": "computer.terminate",
    "description": "Terminate the current task and report its completion status",
    "parameters": {
        "type": "object",
        "properties": {
            "status": {
                "type": "string",
                "enum": ["success", "failure"],
                "description": "The status of the task",
            }
        },
        "required": ["status"],
    },
}
_NEMOTRON = (
    "You are a GUI agent. You are given an instruction, a screenshot of the screen and your previous "
    "interactions with the computer. You need to perform a series of actions to complete the task. The "
    "passoword of the computer is {password}.\n\n"
    "For each step, provide your response in this format:\n"
    "{{thought}}\n## Action:\n{{action}}\n## Code:\n{{code}}\n\n"
    "In the code section, the code should be either pyautogui code or one of the following functions wrapped "
    "in the code block:\n"
    + "\n".join(f"- {json.dumps(one)}" for one in (_WAIT, _TERMINATE)).replace("{", "{{").replace("}", "}}")
)
# "passoword" is what that model was trained with.

_TEXTS = {"pyautogui": _PYAUTOGUI, "computer_13": _COMPUTER_13, "nemotron": _NEMOTRON}


def system_prompt(options: OsworldOptions, machine: Machine) -> str:
    """The system message of an episode, "" where there shall be none."""
    if options.system_prompt is not None:
        return options.system_prompt
    text = _TEXTS[options.action_space]
    return text.format(width=machine.width, height=machine.height, password=machine.password)


def request(options: OsworldOptions, instruction: str) -> str:
    """What the user says at the first screen."""
    if options.action_space == "nemotron":
        return (
            f"# Task Instruction:\n{instruction}\n\nPlease generate the next move according to the "
            "screenshot, task instruction and previous steps (if provided).\n"
        )
    return instruction
