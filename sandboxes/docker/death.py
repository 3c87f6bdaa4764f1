"""Why a container ended: asked of the daemon's memory of events, as the container is removed by then."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from ..agent.sandbox import OUT_OF_MEMORY
from ..errors import DeathCause

_PATIENCE_S = 2  # for the daemon to notice the end that its connection told us of
_KILLED = 137


def cause_of(container: str, since: float) -> Callable[[Any], tuple[DeathCause, str]]:
    """For `Daemon.call`; `since` is when it was made."""

    def look(client: Any) -> tuple[DeathCause, str]:
        until = int(time.time()) + _PATIENCE_S
        wanted = {"container": container, "event": ["oom", "die"]}
        seen_oom = 0
        for event in client.events(since=int(since), until=until, filters=wanted, decode=True):
            if event["Action"] == "oom":
                seen_oom = event["timeNano"]
                continue
            code = int(event["Actor"]["Attributes"].get("exitCode", -1))
            if code == _KILLED and seen_oom and event["timeNano"] - seen_oom < 2e9:
                return OUT_OF_MEMORY
            if code == _KILLED:
                return "killed", "its container was killed"
            return "killed", f"its agent ended with exit code {code}"
        return "lost", "its connection ended"

    return look
