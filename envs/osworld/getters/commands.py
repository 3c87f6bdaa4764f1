"""What programs of the machine say."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from .registry import GETTERS, Place

# The video types that OSWorld asks a desktop about, each for its default program.
VIDEO_TYPES = (
    "3gp 3gpp 3gpp2 avi divx dv fli flv mp2t mp4 mp4v-es mpeg mpeg-system msvideo ogg quicktime vnd.divx"
    " vnd.mpegurl vnd.rn-realvideo webm x-anim x-avi x-flc x-fli x-flv x-m4v x-matroska x-mpeg x-mpeg-system"
    " x-mpeg2 x-ms-asf x-ms-asf-plugin x-ms-asx x-ms-wm x-ms-wmv x-ms-wmx x-ms-wvx x-msvideo x-nsv x-ogm"
    " x-ogm+ogg x-theora x-theora+ogg"
)


@GETTERS.add("vm_command_line")
async def vm_command_line(place: Place, config: Mapping[str, Any]) -> str:
    """What a command wrote to its output, whatever it ended with."""
    executed = await place.machine.execute(config["command"], shell=bool(config.get("shell", False)))
    return executed.stdout


@GETTERS.add("vm_command_error")
async def vm_command_error(place: Place, config: Mapping[str, Any]) -> str:
    """What a command wrote to its error output."""
    executed = await place.machine.execute(config["command"], shell=bool(config.get("shell", False)))
    return executed.stderr


@GETTERS.add("list_directory")
async def list_directory(place: Place, config: Mapping[str, Any]) -> dict[str, Any]:
    """The names in a folder, as `{"children": [{"name": ...}]}`. FileNotFoundError where there is none."""
    path = str(config["path"])
    executed = await place.machine.execute(
        ["find", path, "-mindepth", "1", "-maxdepth", "1", "-printf", r"%f\0"]
    )
    if executed.exit_code:
        raise FileNotFoundError(executed.stderr.strip() or path)
    return {"name": path, "children": [{"name": name} for name in executed.stdout.split("\0") if name]}


@GETTERS.add("default_video_player")
async def default_video_player(place: Place, config: Mapping[str, Any]) -> str:
    """The program that most video types open with; "unknown" where none has one."""
    script = f"for type in {VIDEO_TYPES}; do xdg-mime query default video/$type; done"
    programs = (await place.machine.execute(["sh", "-c", script])).stdout.split()
    return Counter(programs).most_common(1)[0][0] if programs else "unknown"
