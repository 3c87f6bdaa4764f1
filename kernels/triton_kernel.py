"""Triton with types: what the kernels of this package are declared with.

Triton reads the annotations of a kernel as part of its language, so only compile-time constants have one.
With TRITON_INTERPRET=1 in the environment kernels run on a CPU, in NumPy.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import triton

# Counts that change from call to call. Triton would compile a number that is 1, or divisible by 16, apart
# from others, and the form may change the order of a sum.
_COUNTS = ("rows", "tokens")


def kernel(function: Callable[..., None]) -> Any:
    """`triton.jit` of a kernel whose counts get no compiled form of their own."""
    return triton.jit(function, do_not_specialize=_COUNTS)


def next_power_of_2(number: int) -> int:
    """The smallest power of two that is at least `number`.

    >>> next_power_of_2(96), next_power_of_2(128)
    (128, 128)
    """
    return 1 << (number - 1).bit_length()
