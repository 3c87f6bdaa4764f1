"""Files that an agent may have written any way it likes, opened so that the worst they do is to score 0."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from rapidfuzz import fuzz

Document = TypeVar("Document")
MAX_UNPACKED = 128 * 2**20
MAX_FUZZY = 300_000  # characters: two such texts take a second to compare


class Unreadable(ValueError):
    """A file is not what its metric compares. `path` says which, for the right answer must be readable."""

    def __init__(self, path: str, why: str) -> None:
        self.path, self.why = path, why
        super().__init__(f"{Path(path).name}: {why}")


def opened(path: str, open_it: Callable[[str], Document]) -> Document:
    """What a library makes of a file. `Unreadable` for whatever the library says against it."""
    try:
        if zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as archive:
                size = sum(member.file_size for member in archive.infolist())
            if size > MAX_UNPACKED:
                raise Unreadable(path, f"would unpack to {size} bytes")
        return open_it(path)
    except Unreadable:
        raise
    except Exception as error:  # each library has errors of its own for a damaged file
        raise Unreadable(path, f"{type(error).__name__}: {error}") from error


def text_of(path: str) -> str:
    """A file's text as UTF-8; what is not becomes U+FFFD."""
    return Path(path).read_text(encoding="utf-8", errors="replace")


def json_of(path: str) -> Any:
    """A file's JSON value."""
    return opened(path, lambda path: json.loads(text_of(path)))


def similarity(first: str, second: str) -> float:
    """How alike two texts are, 0.0 to 1.0: twice their longest common subsequence over both lengths.

    >>> similarity("abcd", "abce")
    0.75
    """
    if first == second:
        return 1.0
    return float(fuzz.ratio(first[:MAX_FUZZY], second[:MAX_FUZZY])) / 100
