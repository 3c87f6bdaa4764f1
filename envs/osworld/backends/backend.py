"""A source of machines: each episode gets a fresh one, and it is gone when the episode is."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from typing import Protocol

from ..machine import Machine


class Backend(Protocol):
    """`async with backend.machine() as machine`: raises a `SandboxError` where none can be had.

    Shared by the episodes of a run. A machine is as if nobody had used it.
    """

    def machine(self) -> AbstractAsyncContextManager[Machine]: ...
