"""What is kept of a stream that may be endless: its first and its last half, and the count of the rest."""

from __future__ import annotations


class Kept:
    """Bounded memory for one stream.

    >>> kept = Kept(8)
    >>> kept.add(b"abcdefghijkl")
    >>> kept.value()
    b'abcd\\n[... 4 bytes cut ...]\\nijkl'
    """

    def __init__(self, limit: int) -> None:
        self.half = max(1, limit // 2)
        self.total = 0  # of what is held now
        self.taken = 0
        self._head = bytearray()
        self._tail = bytearray()

    def add(self, data: bytes) -> None:
        """Take the next bytes of the stream."""
        self.total += len(data)
        room = self.half - len(self._head)
        if room > 0:
            self._head += data[:room]
            data = data[room:]
        self._tail += data
        if len(self._tail) > 4 * self.half + 65536:
            del self._tail[: -self.half]

    def value(self) -> bytes:
        """The kept bytes, with a mark where some are missing."""
        tail = bytes(self._tail[-self.half :])
        cut = self.total - len(self._head) - len(tail)
        mark = b"\n[... %d bytes cut ...]\n" % cut if cut else b""
        return bytes(self._head) + mark + tail

    def take(self) -> bytes:
        """The kept bytes, which are then forgotten."""
        value = self.value()
        self.taken += self.total
        self.total = 0
        self._head.clear()
        self._tail.clear()
        return value

    @property
    def cut(self) -> bool:
        """Whether anything is missing from `value()`."""
        return self.total > 2 * self.half
