"""The answer in a reply: what stands in the last balanced `\\boxed{}` outside of the thought.

Nothing here waits; both functions are total and linear in the text.
"""

from __future__ import annotations

import re

LIMIT = 1000  # characters of a boxed answer; a longer one is none (a grader must not parse an essay)
_BOX = re.compile(r"\\boxed\s*\{")
_INTEGER = re.compile(r"[+-]?\d{1,100}")


def last_boxed(content: str) -> str | None:
    """The content of the last balanced box, innermost where boxes are nested; None where there is none.

    >>> last_boxed(r"either \\boxed{6} or \\boxed{\\frac{1}{2}}, or \\boxed{7")
    '\\\\frac{1}{2}'
    """
    found, position = None, 0
    while match := _BOX.search(content, position):
        end = _closing(content, match.end())
        # An unbalanced box swallows the rest only until the next one opens.
        position = match.end()
        if end is not None:
            found = content[match.end() : end].strip()
        elif not _BOX.search(content, position):
            break
    return found if found and len(found) <= LIMIT else None


def _closing(text: str, start: int) -> int | None:
    """Where the brace opened before `start` closes, if within the limit; escaped braces are text."""
    depth, position, stop = 1, start, min(len(text), start + LIMIT + 100)
    while position < stop:
        character = text[position]
        if character == "\\":
            position += 1
        elif character == "{":
            depth += 1
        elif character == "}":
            depth -= 1
            if not depth:
                return position
        position += 1
    return None


def equal_integers(gold: str, answer: str) -> bool | None:
    """Whether two plain integers are equal, as math-verify would say; None where one is something else.

    >>> equal_integers("27", "027"), equal_integers("27", "28"), equal_integers("27", "27 cm")
    (True, False, None)
    """
    if _INTEGER.fullmatch(gold) and _INTEGER.fullmatch(answer):
        return int(gold) == int(answer)
    return None
