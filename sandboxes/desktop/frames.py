"""What the program that holds a desktop has written, cut into frames (`inside.wire`). It is not trusted.

Invariant: whatever the bytes are, `cut` gives whole frames or raises ValueError, and what is held of a frame
that is not all there yet is bounded by what was asked.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

from ..inside.wire import LENGTH, MAX_HEADER, Header

Answer = tuple[Header, bytes]
SMALL_HEADER = 1 << 20  # bytes; hundreds of windows


class Frames:
    """The answers of one desktop of that size; a `tree` of accessibility makes for large headers."""

    def __init__(self, size: tuple[int, int], *, tree: bool) -> None:
        raw = size[0] * size[1] * 4
        self._max_body = raw + raw // 256 + 1024  # zlib's own bound is below that
        self._max_header = MAX_HEADER if tree else SMALL_HEADER
        self._incoming = bytearray()
        self._header: Header | None = None  # of the frame whose body is on its way

    def cut(self, data: bytes) -> Iterator[Answer]:
        """The frames that are complete with these bytes. ValueError for what is none."""
        self._incoming += data
        while (header := self._header or self._cut_header()) is not None:
            self._header = header
            if len(self._incoming) < header["n"]:
                return
            body = bytes(self._incoming[: header["n"]])
            del self._incoming[: header["n"]]
            self._header = None
            yield header, body

    def _cut_header(self) -> Header | None:
        if len(self._incoming) < LENGTH.size:
            return None
        (size,) = LENGTH.unpack_from(self._incoming)
        if size > self._max_header:
            raise ValueError(f"a frame's header of {size} bytes")
        end = LENGTH.size + size
        if len(self._incoming) < end:
            return None
        try:
            header = json.loads(bytes(self._incoming[LENGTH.size : end]))
        except RecursionError:
            raise ValueError("a frame's header without end") from None
        del self._incoming[:end]
        if not isinstance(header, dict) or type(header.get("n")) is not int:
            raise ValueError("a frame's header that is none")
        if not 0 <= header["n"] <= self._max_body:
            raise ValueError(f"a frame's body of {header['n']} bytes")
        return header
