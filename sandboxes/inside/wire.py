"""Frames on the socket between the harness and the agent in the sandbox; imported by both sides.

A frame is a 4-byte big-endian length, a JSON object of that length, then `header["n"]` raw bytes.
Standard library only: this file also runs inside the sandbox.
"""

from __future__ import annotations

import json
import struct
from typing import Any

Header = dict[str, Any]
MAX_HEADER = 8 << 20
LENGTH = struct.Struct(">I")
NOT_PRELOADED = "cannot be preloaded: "  # in the greeting of an agent that did not start, before the module


def pack(header: Header, body: bytes = b"") -> bytes:
    """One frame as bytes."""
    text = json.dumps({**header, "n": len(body)}).encode()
    return LENGTH.pack(len(text)) + text + body


def take(buffer: bytearray) -> tuple[Header, bytes] | None:
    """Cut the first whole frame off `buffer`; None when it is not all there yet."""
    if len(buffer) < LENGTH.size:
        return None
    (size,) = LENGTH.unpack_from(buffer)
    if size > MAX_HEADER:
        raise ValueError(f"frame header of {size} bytes")
    start = LENGTH.size + size
    if len(buffer) < start:
        return None
    header: Header = json.loads(bytes(buffer[LENGTH.size : start]))
    end = start + int(header["n"])
    if len(buffer) < end:
        return None
    body = bytes(buffer[start:end])
    del buffer[:end]
    return header, body
