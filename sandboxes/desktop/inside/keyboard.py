"""The keyboard: keys pressed through XTEST, text typed right whatever the layout, Caps Lock or group is.

A character that the layout has with or without Shift is typed there; any other is bound to a keycode that
the layout leaves free, two to a keycode. Programs look a key press up in the map of that moment:

    bind all that is missing -> programs have seen it -> press -> (programs have read it -> bind anew)

Invariant: a keycode gets other characters only when the program in front has read what was typed with it.
Each binding makes every program read the map anew, so there are as few as can be.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from Xlib import X
from Xlib.display import Display
from Xlib.ext import xtest

from . import keys

_GROUPS = 0x6000  # of the modifier state: which of several layouts is in use
_LEVELS = 2  # plain, and with Shift
Place = tuple[int, bool]  # keycode, whether with Shift


class Keyboard:
    """Presses keys. `caught_up` returns when programs have handled all that was sent to them."""

    def __init__(self, display: Display, caught_up: Callable[[], None]) -> None:
        self._display, self._caught_up = display, caught_up
        self._layout: dict[int, Place] = {}  # keysym -> where the layout has it
        self._free: list[int] = []
        self._ours: dict[int, tuple[int, int]] = {}  # keycode -> its keysyms, the longest unused first
        # a slow machine between press and release would double a character
        display.change_keyboard_control(auto_repeat_mode=X.AutoRepeatModeOff)

    def type(self, text: str, interval_s: float) -> None:
        """Write a text; Caps Lock is lifted meanwhile."""
        symbols = [keys.of_character(character) for character in text.replace("\r\n", "\n")]
        locked = bool(self._modifiers() & X.LockMask)
        if locked:
            self.press(["capslock"])
        self._read_map()
        for piece in self._pieces(symbols):
            places = self._places(piece, alone=False)
            for symbol in piece:
                self._tap(*places[symbol])
                if interval_s:
                    time.sleep(interval_s)
        if locked:
            self.press(["capslock"])

    def press(self, names: list[str]) -> None:
        """Press and release keys one after the other."""
        for place in self._find(names):
            self._tap(*place)

    def hotkey(self, names: list[str]) -> None:
        """Press keys in order, release them in reverse."""
        places = self._find(names)
        for place in places:
            self._send(True, *place)
        for place in reversed(places):
            self._send(False, *place)

    def hold(self, name: str, down: bool) -> None:
        """Press a key, or release it."""
        self._send(down, *self._find([name])[0])

    def _find(self, names: list[str]) -> list[Place]:
        symbols = [keys.of(name) for name in names]
        self._read_map()
        places = self._places(symbols, alone=True)
        return [places[symbol] for symbol in symbols]

    # -- the map ----------------------------------------------------------------------------------------

    def _modifiers(self) -> int:
        mask: int = self._display.screen().root.query_pointer().mask
        return mask

    def _read_map(self) -> None:
        """Anew before each use: any program may change the layout, and so take back what we had bound."""
        first = self._display.display.info.min_keycode
        rows = self._display.get_keyboard_mapping(first, self._display.display.info.max_keycode - first + 1)
        mapped = {first + index: tuple(row) for index, row in enumerate(rows)}
        modifiers = {code for codes in self._display.get_modifier_mapping() for code in codes}
        self._ours = {code: row for code, row in self._ours.items() if mapped[code][:_LEVELS] == row}
        self._free = [code for code, row in mapped.items() if not any(row) and code not in modifiers]
        self._layout = {}
        characters = not self._modifiers() & _GROUPS  # the map shows those of the first group
        for level in range(_LEVELS):
            for code, row in mapped.items():
                symbol = row[level] if len(row) > level and code not in self._ours else 0
                # keys without a character mean the same in every group, but with Shift not under Num Lock
                if symbol and (characters if symbol & 0xFF00 != 0xFF00 else not level):
                    self._layout.setdefault(symbol, (code, bool(level)))

    def _bound(self, *, alone: bool) -> dict[int, Place]:
        """What we have bound; `alone` leaves out what is another character under Shift."""
        places: dict[int, Place] = {}
        for code, (plain, shifted) in self._ours.items():
            if plain == shifted or not alone:
                places.setdefault(plain, (code, False))
                places.setdefault(shifted, (code, True))
        return places

    def _pieces(self, symbols: list[int]) -> Iterator[list[int]]:
        """Cut a text where the keycodes would not do for its different characters."""
        room, piece, rare = len(self._free) + len(self._ours), list[int](), set[int]()
        for symbol in symbols:
            if symbol not in self._layout and symbol not in rare:
                if len(rare) == room:
                    yield piece
                    piece, rare = [], set()
                rare.add(symbol)
            piece.append(symbol)
        yield piece

    def _places(self, symbols: list[int], *, alone: bool) -> dict[int, Place]:
        """Where each of them is, having bound those that were nowhere."""
        rare = [symbol for symbol in dict.fromkeys(symbols) if symbol not in self._layout]
        bound = self._bound(alone=alone)
        for code in {bound[symbol][0] for symbol in rare if symbol in bound}:
            self._ours[code] = self._ours.pop(code)  # the last to be given up
        missing = [symbol for symbol in rare if symbol not in bound]
        pairs = [(some[0], some[-1]) for some in _cut(missing, 1 if alone else 2)]
        if pairs:
            self._bind(pairs, spare=len(self._ours) - len({bound[s][0] for s in rare if s in bound}))
        return {**self._bound(alone=alone), **self._layout}

    def _bind(self, pairs: list[tuple[int, int]], *, spare: int) -> None:
        """Give each pair a keycode, first the free ones, then the `spare` longest unused of ours."""
        lacking = len(pairs) - len(self._free)
        if lacking > spare:
            raise ValueError("the keyboard layout leaves too few keycodes free for other characters")
        if lacking > 0:
            self._caught_up()
            for code in list(self._ours)[:lacking]:
                del self._ours[code]
                self._free.append(code)
        for pair in pairs:
            code = self._free.pop(0)
            self._ours[code] = pair
            self._display.change_keyboard_mapping(code, [pair])
        self._caught_up()

    # -- pressing ---------------------------------------------------------------------------------------

    def _tap(self, code: int, shifted: bool) -> None:
        self._send(True, code, shifted)
        self._send(False, code, shifted)

    def _send(self, down: bool, code: int, shifted: bool) -> None:
        kind = X.KeyPress if down else X.KeyRelease
        order = [code] if not shifted else [self._layout[keys.SHIFT][0], code]
        for each in order if down else reversed(order):
            xtest.fake_input(self._display, kind, each)
        self._display.sync()


def _cut(symbols: list[int], size: int) -> list[list[int]]:
    return [symbols[at : at + size] for at in range(0, len(symbols), size)]
