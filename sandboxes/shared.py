"""A sandbox in which several episodes have a session each.

What programs did to it, they did to every episode there: so it is no episode's own failure, but the place's.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from .errors import CreateError, Died, Hindered
from .forwarding import ForwardingSandbox


class SharedSandbox(ForwardingSandbox):
    """See `sandbox.Sandbox`."""

    @contextmanager
    def _asked(self) -> Iterator[None]:
        try:
            yield
        except Hindered as error:
            raise CreateError(error.message, provider=error.provider, sandbox_id=error.sandbox_id) from error
        except Died as error:
            raise error.again(blame="infra") from error
