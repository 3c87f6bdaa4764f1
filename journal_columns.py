"""How a segment's columns become bytes and come back bit for bit.

    token_ids int32[T] | action_mask ceil(T/8) bytes, first token in the lowest bit | behaviour_logprobs
    float32[T], NaN bits included | runs of policy_version as (version, length) pairs of int32

all little endian, one blob a segment: 8.2 bytes a token and 8 bytes a run. A blake2b checksum over the
blob and everything else the segment says is compared on reading, so a flipped bit or a lost byte is an
error that names the place and never another number.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from .errors import RzError
from .trajectory import Int32, Sampling, Segment


class CorruptJournal(RzError):
    """A record does not read as it was written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentRow:
    """A segment as the journal stores it; `images` are SHA-256 digests, 32 bytes each."""

    length: int
    columns: bytes
    sampling: str
    contract: str
    images: bytes
    checksum: bytes


def image_digest(png: bytes) -> bytes:
    """The name of an image: 32 bytes."""
    return hashlib.sha256(png).digest()


def encode(segment: Segment) -> SegmentRow:
    columns = b"".join(
        (
            segment.token_ids.astype("<i4", copy=False).tobytes(),
            np.packbits(segment.action_mask, bitorder="little").tobytes(),
            segment.behaviour_logprobs.astype("<f4", copy=False).tobytes(),
            _runs(segment.policy_version).tobytes(),
        )
    )
    images = b"".join(image_digest(png) for png in segment.images)
    length, sampling, contract = len(segment), _sampling(segment.sampling), segment.contract
    return SegmentRow(
        length=length,
        columns=columns,
        sampling=sampling,
        contract=contract,
        images=images,
        checksum=_checksum(length, columns, sampling, contract, images),
    )


def decode(row: SegmentRow, images: Sequence[bytes], where: str) -> Segment:
    """The segment of a row. Raises CorruptJournal, naming `where`, if a byte of it changed."""
    expected = _checksum(row.length, row.columns, row.sampling, row.contract, row.images)
    if expected != row.checksum:
        raise CorruptJournal(
            f"{where}: checksum is {expected.hex()}, recorded {row.checksum.hex()}; the file was damaged "
            "after it was written. Restore the journal from a copy."
        )
    ids_end = 4 * row.length
    mask_end = ids_end + (row.length + 7) // 8
    logprobs_end = mask_end + 4 * row.length
    blob = row.columns
    packed = np.frombuffer(blob[ids_end:mask_end], np.uint8)
    return Segment(
        token_ids=np.frombuffer(blob[:ids_end], "<i4"),
        action_mask=np.unpackbits(packed, count=row.length, bitorder="little").astype(np.bool_),
        behaviour_logprobs=np.frombuffer(blob[mask_end:logprobs_end], "<f4"),
        policy_version=_unrolled(np.frombuffer(blob[logprobs_end:], "<i4").reshape(-1, 2)),
        images=tuple(images),
        sampling=Sampling(**json.loads(row.sampling)),
        contract=row.contract,
    )


@lru_cache(maxsize=64)  # a run has two or three
def _sampling(sampling: Sampling) -> str:
    return json.dumps(asdict(sampling), sort_keys=True)


def _runs(values: Int32) -> NDArray[np.int32]:
    """int32[R, 2]: (value, length) of each run of equal values."""
    if not len(values):
        return np.empty((0, 2), "<i4")
    ends = np.append((values[1:] != values[:-1]).nonzero()[0] + 1, len(values))
    runs = np.empty((len(ends), 2), "<i4")
    runs[:, 0] = values[ends - 1]
    runs[0, 1] = ends[0]
    runs[1:, 1] = ends[1:] - ends[:-1]
    return runs


def _unrolled(runs: NDArray[np.int32]) -> Int32:
    return np.repeat(runs[:, 0], runs[:, 1]).astype(np.int32)


def _checksum(length: int, columns: bytes, *rest: str | bytes) -> bytes:
    digest = hashlib.blake2b(columns, digest_size=16)
    for part in (str(length), *rest):
        encoded = part.encode() if isinstance(part, str) else part
        digest.update(len(encoded).to_bytes(8, "little"))
        digest.update(encoded)
    return digest.digest()
