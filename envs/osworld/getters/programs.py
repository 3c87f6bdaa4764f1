"""Settings that programs keep in files of their own.

FileNotFoundError where the program has never written them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .registry import GETTERS, Place

MAX_LAUNCHERS, MAX_LAUNCHER = 200, 64 << 10  # those of a desktop, and the bytes of one


@GETTERS.add("vlc_config")
async def vlc_config(place: Place, config: Mapping[str, Any]) -> str:
    """VLC's settings file."""
    return place.keep(str(config["dest"]), await place.machine.read(".config/vlc/vlcrc"))


@GETTERS.add("gimp_config_file")
async def gimp_config_file(place: Place, config: Mapping[str, Any]) -> str:
    """One of GIMP 2.10's settings files (gimprc, sessionrc, ...)."""
    path = f".config/GIMP/2.10/{config['file_name']}"
    return place.keep(str(config["dest"]), await place.machine.read(path))


@GETTERS.add("shortcuts_on_desktop")
async def shortcuts_on_desktop(place: Place, config: Mapping[str, Any]) -> dict[str, str]:
    """Name -> content of each launcher on the desktop."""
    listed = await place.machine.execute(["ls", "-1", f"{place.machine.home}/Desktop"])
    found: dict[str, str] = {}
    for name in listed.stdout.splitlines():
        if name.endswith(".desktop") and len(found) < MAX_LAUNCHERS:
            content = await place.machine.read(f"Desktop/{name}")
            found[name] = content[:MAX_LAUNCHER].decode(errors="replace")
    return found
