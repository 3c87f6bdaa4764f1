"""The last screenshot of one desktop, kept so that the next one only brings what changed."""

from __future__ import annotations

import zlib

from PIL import Image

from ..inside.wire import Header


class Screen:
    """Bands of rows put together; see `inside.screen` for the other end."""

    def __init__(self) -> None:
        self.number = 0  # of the shot that `_pixels` shows; 0 is none
        self._pixels = bytearray()

    def update(self, answer: Header, body: bytes) -> Image.Image:
        """The whole picture, with these changes to shot `answer["since"]`."""
        width, height = answer["width"], answer["height"]
        if len(self._pixels) != width * height * 4:
            self._pixels = bytearray(width * height * 4)
        step, data, taken = answer["step"], zlib.decompress(body), 0
        for start in answer["bands"]:
            end = min(start + step, len(self._pixels))
            self._pixels[start:end] = data[taken : taken + end - start]
            taken += end - start
        self.number = answer["number"]
        return Image.frombytes("RGB", (width, height), bytes(self._pixels), "raw", "BGRX")
