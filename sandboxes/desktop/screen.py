"""The last screenshot of one desktop, kept so that the next one only brings what changed."""

from __future__ import annotations

import zlib
from itertools import pairwise

from PIL import Image

from ..inside.wire import Header


class Screen:
    """Bands of rows put together; see `inside.screen` for the other end."""

    def __init__(self, size: tuple[int, int]) -> None:
        self.number = 0  # of the shot that `_pixels` shows; 0 is none
        self._size = size
        self._pixels = bytearray(size[0] * size[1] * 4)

    def update(self, answer: Header, body: bytes) -> Image.Image:
        """The whole picture, with these changes to the shot before. ValueError when they are none."""
        bands = self._bands(answer)
        length = sum(end - start for start, end in bands)
        data = _decompressed(body, length)
        taken = 0
        for start, end in bands:
            self._pixels[start:end] = data[taken : taken + end - start]
            taken += end - start
        self.number = answer["number"]
        return Image.frombytes("RGB", self._size, bytes(self._pixels), "raw", "BGRX")

    def _bands(self, answer: Header) -> list[tuple[int, int]]:
        """Where each begins and ends, in order."""
        step, starts, number = answer.get("step"), answer.get("bands"), answer.get("number")
        if (answer.get("width"), answer.get("height")) != self._size:
            raise ValueError(f"a screen of {answer.get('width')} x {answer.get('height')} pixels")
        if type(step) is not int or step <= 0 or type(number) is not int or not isinstance(starts, list):
            raise ValueError("a picture without its bands")
        whole = len(self._pixels)
        if not all(type(start) is int and 0 <= start < whole for start in starts):
            raise ValueError("bands outside of the screen")
        if any(after - before < step for before, after in pairwise(starts)):
            raise ValueError("bands that overlap")
        return [(start, min(start + step, whole)) for start in starts]


def _decompressed(body: bytes, length: int) -> bytes:
    """Exactly so many bytes; no more are unpacked than that, whatever the body could become."""
    unpacking = zlib.decompressobj()
    try:
        data = unpacking.decompress(body, length + 1)
    except zlib.error as error:
        raise ValueError(f"pixels that cannot be unpacked: {error}") from None
    if len(data) != length or not unpacking.eof:
        raise ValueError(f"other than {length} bytes of pixels")
    return data
