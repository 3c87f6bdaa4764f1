"""Screenshots as what changed since the last one: bands of rows, compressed. An unchanged screen is none."""

from __future__ import annotations

import zlib

from mss import MSS

from ...inside.wire import Header

BAND = 16  # rows


class Screen:
    """One display's pixels, as 4 bytes each: blue, green, red and one that means nothing."""

    def __init__(self, display: str) -> None:
        self._source = MSS(display=display)
        self._last, self._number = b"", 0

    def changes(self, since: int) -> tuple[Header, bytes]:
        """The bands that differ from shot number `since` (all, when that is not the last one), compressed."""
        shot = self._source.grab(self._source.monitors[0])
        step = shot.width * 4 * BAND
        old, new = self._last if since == self._number else b"", bytes(shot.raw)
        starts = range(0, len(new), step) if new != old else ()
        changed = [start for start in starts if new[start : start + step] != old[start : start + step]]
        self._last, self._number = new, self._number + 1
        body = zlib.compress(b"".join(new[start : start + step] for start in changed), 1)
        size = {"width": shot.width, "height": shot.height, "step": step}
        return {"number": self._number, "bands": changed, **size}, body
