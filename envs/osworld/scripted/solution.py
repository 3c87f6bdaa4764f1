"""What a solution is, and how it waits for a program to show itself."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import dataclass

from PIL import Image

from ...message import Observation
from ...script import Script

LOOKS_S = (1, 2, 4, 8, 16, 30, 30)  # most programs are quick, a busy machine is not
_SMALL = (192, 108)


@dataclass(frozen=True, slots=True, kw_only=True)
class Solution:
    """How one task is solved. `programs` must be installed for it; positions are of a 1920 x 1080 screen."""

    name: str
    programs: tuple[str, ...]
    play: Callable[[Observation], Script]


def covered(shown: Observation) -> float:
    """The share of the screen that is not the black background."""
    with Image.open(io.BytesIO(shown["images"][-1])) as image:
        histogram = image.convert("L").resize(_SMALL).histogram()
    return 1 - sum(histogram[:8]) / (_SMALL[0] * _SMALL[1])


def until_covered(shown: Observation, share: float) -> Script:
    """Wait until so much of the screen shows windows, or until patience ends."""
    for seconds in LOOKS_S:
        if shown["images"] and covered(shown) >= share:
            return
        shown = yield f"time.sleep({seconds})"
