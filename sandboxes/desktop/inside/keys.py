"""Names of keys, as pyautogui has them, and the keysyms that X knows them by. Imported by both sides.

A key is one character ("a", "é", "€") or one of these names. Standard library only.
"""

from __future__ import annotations

import difflib

SHIFT, CAPS_LOCK = 0xFFE1, 0xFFE5
_CONTROL = {"\n": 0xFF0D, "\r": 0xFF0D, "\t": 0xFF09, "\b": 0xFF08}

NAMED = {
    "enter": 0xFF0D, "return": 0xFF0D, "tab": 0xFF09, "space": 0x20, "backspace": 0xFF08,
    "esc": 0xFF1B, "escape": 0xFF1B, "delete": 0xFFFF, "del": 0xFFFF, "insert": 0xFF63,
    "up": 0xFF52, "down": 0xFF54, "left": 0xFF51, "right": 0xFF53, "home": 0xFF50, "end": 0xFF57,
    "pageup": 0xFF55, "pgup": 0xFF55, "pagedown": 0xFF56, "pgdn": 0xFF56,
    "shift": SHIFT, "shiftleft": SHIFT, "shiftright": 0xFFE2,
    "ctrl": 0xFFE3, "ctrlleft": 0xFFE3, "ctrlright": 0xFFE4, "control": 0xFFE3,
    "alt": 0xFFE9, "altleft": 0xFFE9, "altright": 0xFFEA, "option": 0xFFE9, "optionleft": 0xFFE9,
    "optionright": 0xFFEA, "altgr": 0xFE03,
    "win": 0xFFEB, "winleft": 0xFFEB, "winright": 0xFFEC, "super": 0xFFEB, "command": 0xFFEB,
    "apps": 0xFF67, "menu": 0xFF67, "capslock": CAPS_LOCK, "numlock": 0xFF7F, "scrolllock": 0xFF14,
    "pause": 0xFF13, "print": 0xFF61, "printscreen": 0xFF61, "prntscrn": 0xFF61, "prtsc": 0xFF61,
    "prtscr": 0xFF61, "clear": 0xFF0B, "help": 0xFF6A, "select": 0xFF60, "execute": 0xFF62,
    "add": 0xFFAB, "separator": 0xFFAC, "subtract": 0xFFAD, "decimal": 0xFFAE, "divide": 0xFFAF,
    "multiply": 0xFFAA, "yen": 0xA5, "modechange": 0xFF7E, "kana": 0xFF2D, "kanji": 0xFF21,
    "convert": 0xFF23, "nonconvert": 0xFF22, "hangul": 0xFF31, "hanja": 0xFF34,
    "volumedown": 0x1008FF11, "volumemute": 0x1008FF12, "volumeup": 0x1008FF13,
    "playpause": 0x1008FF14, "stop": 0x1008FF15, "prevtrack": 0x1008FF16, "nexttrack": 0x1008FF17,
    "browserback": 0x1008FF26, "browserforward": 0x1008FF27, "browserrefresh": 0x1008FF29,
    "browserstop": 0x1008FF28, "browsersearch": 0x1008FF1B, "browserfavorites": 0x1008FF30,
    "browserhome": 0x1008FF18, "launchmail": 0x1008FF19, "sleep": 0x1008FF2F,
    **{f"f{number}": 0xFFBD + number for number in range(1, 25)},
    **{f"num{digit}": 0xFFB0 + digit for digit in range(10)},
}  # fmt: skip


def of_character(character: str) -> int:
    """Its keysym. ValueError for what no key can write.

    >>> hex(of_character("é")), hex(of_character("€"))
    ('0xe9', '0x10020ac')
    """
    code = ord(character)
    if character in _CONTROL:
        return _CONTROL[character]
    if code < 0x20 or 0x7F <= code < 0xA0 or 0xD800 <= code < 0xE000:
        raise ValueError(f"no key writes the character {character!r}")
    return code if code < 0x100 else 0x1000000 + code


def of(key: str) -> int:
    """The keysym of a key by its name (in any case) or character. ValueError with the nearest names."""
    if len(key) == 1:
        return of_character(key)
    if key.lower() not in NAMED:
        near = difflib.get_close_matches(key.lower(), NAMED, n=3)
        hint = f"did you mean {' or '.join(near)}?" if near else f"known are {', '.join(sorted(NAMED))}."
        raise ValueError(f"there is no key {key!r}: {hint}")
    return NAMED[key.lower()]
