"""The folder in which all processes of a user on a machine share what they know of sandboxes.

`$XDG_STATE_HOME/rz-agent/sandboxes`, or `~/.local/state/...`. A user who may not write there (a service
account without a home) gets one below the temporary folder, and only if nobody else made it.
"""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path

from ..errors import ConfigError

NAME = Path("rz-agent") / "sandboxes"


def state_folder() -> Path:
    """The folder, made if need be, for this user alone. ConfigError when there can be none."""
    given = os.environ.get("XDG_STATE_HOME", "")
    home = Path(given) if os.path.isabs(given) else Path.home() / ".local" / "state"
    without_home = Path(tempfile.gettempdir()) / f"rz-agent-{os.geteuid()}"
    for folder in (home / NAME, without_home / NAME.name):
        if _is_ours(folder):
            return folder
    raise ConfigError(
        source="environment",
        key="XDG_STATE_HOME",
        value=given,
        why=f"is no use: neither {home / NAME} nor {without_home} can be made and written by this user.",
        remedy="Set it to a folder of yours.",
    )


def _is_ours(folder: Path) -> bool:
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        owners = {path.lstat().st_uid for path in (folder, folder.parent)}
        closed = not folder.lstat().st_mode & stat.S_IWOTH
    except OSError:
        return False
    return owners == {os.geteuid()} and closed and os.access(folder, os.W_OK)
