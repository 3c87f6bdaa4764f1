"""What a published task leaves open until there is a machine: its password, its screen, its home.

    {CLIENT_PASSWORD} {SCREEN_WIDTH} {SCREEN_HEIGHT} {SCREEN_WIDTH_HALF} {SCREEN_HEIGHT_HALF}
    /home/user, as OSWorld calls the home of its one user, becomes the machine's own

Other braces stay: commands are full of them (`awk '{print $1}'`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Protocol

OSWORLD_HOME = "/home/user"
# Neither /home/user2 nor /home/user.old, and no longer path that merely ends so (/mnt/home/user).
_HOME = re.compile(r"(?<![\w.-])/home/user(?![\w.-])")


class Screenful(Protocol):
    """The part of a `Machine` that fills the placeholders.

    home       the folder that the tasks call /home/user
    password   what sudo takes there; "" where there is no sudo
    """

    @property
    def width(self) -> int: ...

    @property
    def height(self) -> int: ...

    @property
    def home(self) -> str: ...

    @property
    def password(self) -> str: ...


def fill(value: Any, machine: Screenful) -> Any:
    """A JSON value with every text in it filled; mappings become dictionaries, lists stay lists.

    >>> from types import SimpleNamespace
    >>> machine = SimpleNamespace(width=800, height=600, home="/root", password="")
    >>> fill(["click({SCREEN_WIDTH_HALF})", "/home/user/a.txt"], machine)
    ['click(400)', '/root/a.txt']
    """
    words = {
        "{CLIENT_PASSWORD}": machine.password,
        "{SCREEN_WIDTH}": str(machine.width),
        "{SCREEN_HEIGHT}": str(machine.height),
        "{SCREEN_WIDTH_HALF}": str(machine.width // 2),
        "{SCREEN_HEIGHT_HALF}": str(machine.height // 2),
    }
    return _filled(value, words, machine.home)


def _filled(value: Any, words: Mapping[str, str], home: str) -> Any:
    if isinstance(value, str):
        for placeholder, word in words.items():
            value = value.replace(placeholder, word)
        return _HOME.sub(lambda _: home, value)
    if isinstance(value, Mapping):
        return {key: _filled(item, words, home) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_filled(item, words, home) for item in value]
    return value
