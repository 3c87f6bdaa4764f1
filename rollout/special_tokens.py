"""The tokens that structure a chat, and how text that merely spells one is kept from becoming one.

    split(text)      -> pieces: a token of this table, or text between two of them
    guard(text)      text of a tool, a user or a file, marked so that `split` finds no token in it
    unguard(piece)   the same text without the marks

A template is rendered from guarded text, so what `split` finds in the result was written by the
template. Guarding breaks each spelling with a mark after its first character, a Unicode
noncharacter that means nothing to a template's `strip`, `split` or `startswith`; also a spelling
that only begins at the end of a text, because templates set texts side by side.

Invariant: `unguard(guard(text)) == text` up to characters that are not text (`as_text`), and
`split(guard(a) + guard(b))` yields no token for any texts a and b.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

MARK = "\ufdd0"
"""Breaks the spelling of a token inside guarded text."""
CUT = "\ufdd1"
"""Stands in a rendered template where a sampled turn ends."""

_NOT_TEXT = re.compile(f"[{MARK}{CUT}\ud800-\udfff]")


@dataclass(frozen=True, slots=True, kw_only=True)
class AddedToken:
    """One entry of a tokenizer's `added_tokens`.

    control  the tokenizer calls it special: it delimits turns. The others, such as `<tool_call>`
             or `<think>`, are written inside turns by the policy itself.
    lstrip, rstrip  the token swallows white space on that side
    """

    id: int
    content: str
    control: bool
    lstrip: bool = False
    rstrip: bool = False


def as_text(text: str) -> str:
    """`text` with lone surrogates and our two marks, none of which is text, as U+FFFD."""
    return text if text.isascii() else _NOT_TEXT.sub("\ufffd", text)


class SpecialTokens:
    """The added tokens of one tokenizer, found as the tokenizer finds them: leftmost, then longest."""

    def __init__(self, tokens: Mapping[str, AddedToken]) -> None:
        self.tokens = dict(tokens)
        self.ids = frozenset(token.id for token in self.tokens.values())
        self._finder = _finder(self.tokens.values())
        # A token that swallows white space is found with what it swallowed.
        self._ids = {token.content.strip(): token.id for token in self.tokens.values()}
        self._ids |= {token.content: token.id for token in self.tokens.values()}
        self._guard_all = _breaker(list(self.tokens))
        self._guard_control = _breaker([t.content for t in self.tokens.values() if t.control])

    def guard(self, text: str, *, authored: bool = False) -> str:
        """Mark `text` so that it spells no token.

        authored  by the policy or the task's author: only control tokens are broken, because
                  such a text may rightly contain `<tool_call>`
        """
        pattern = self._guard_control if authored else self._guard_all
        return pattern.sub(_broken, as_text(text)) if pattern else as_text(text)

    def unguard(self, piece: str) -> str:
        return piece.replace(MARK, "")

    def split(self, text: str) -> Iterator[tuple[int | None, str]]:
        """(id, spelling) of each token and (None, text) of each non-empty text between, in order."""
        for place, piece in enumerate(self._finder.split(text)):
            if place % 2:
                yield self._ids[piece if piece in self._ids else piece.strip()], piece
            elif piece:
                yield None, piece


def _broken(match: re.Match[str]) -> str:
    return match[0] + MARK


def _finder(tokens: Iterable[AddedToken]) -> re.Pattern[str]:
    """Matches a token, in one group: of two that start together the longest wins. Those of one first
    character share it, so that a text without it is passed over at once."""
    longest_first = sorted(tokens, key=lambda token: -len(token.content))

    def spelling(token: AddedToken, begun: int) -> str:
        left, right = r"\s*" if token.lstrip else "", r"\s*" if token.rstrip else ""
        return f"{left}{re.escape(token.content[begun:])}{right}"

    if any(token.lstrip for token in longest_first):  # their matches begin with any white space
        return re.compile(f"({'|'.join(spelling(token, 0) for token in longest_first)})")
    by_first: dict[str, list[AddedToken]] = {}
    for token in longest_first:
        by_first.setdefault(token.content[0], []).append(token)
    parts = [
        f"{re.escape(first)}(?:{'|'.join(spelling(token, 1) for token in alike)})"
        for first, alike in by_first.items()
    ]
    return re.compile(f"({'|'.join(parts) or '(?!)'})")


def _breaker(spellings: list[str]) -> re.Pattern[str] | None:
    """Matches the first character of each place where a spelling stands, or begins at the end."""
    rests: dict[str, set[str]] = {}
    for spelling in spellings:
        whole = rests.setdefault(spelling[0], set())
        whole.add(re.escape(spelling[1:]))
        # A template may strip a text, so white space after an unfinished spelling does not end it.
        whole.update(re.escape(spelling[1:end]) + r"\s*\Z" for end in range(1, len(spelling)))
    by_first = (f"{re.escape(first)}(?={'|'.join(sorted(rest))})" for first, rest in sorted(rests.items()))
    return re.compile("|".join(by_first)) if spellings else None
