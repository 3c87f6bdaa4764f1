"""The tool str_replace_edit: look at a file, make one, replace one exact passage, insert lines.

Invariants: a file keeps its mode and its kind of line ends; whatever the policy asks for is an answer or a
`ToolError` that says what to do instead; one edit changes one place.
Waits: the policy for its edit.
"""

from __future__ import annotations

import posixpath
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from ...sandboxes.errors import CreateError, FileError
from ...sandboxes.exec_result import ExecResult
from ...sandboxes.sandbox import Sandbox
from ..tool import ToolError
from .shell import cut

Command = Literal["view", "create", "str_replace", "insert"]
_MAX_BYTES = 4 << 20
_AROUND = 4  # lines shown before and after an edit
_TIMEOUT_S = 30.0
# What is there, behind symbolic links: kind, mode, real path.
_LOOK = r"""
real=$(readlink -f -- "$1") || { printf 'nowhere 0 %s' "$1"; exit; }
if [ -d "$real" ]; then kind=folder; elif [ -f "$real" ]; then kind=file
elif [ -e "$real" ]; then kind=other; else kind=nothing; fi
mode=$(stat -c %a -- "$real" 2>/dev/null) || mode=644
printf '%s %s %s' "$kind" "$mode" "$real"
"""
_LIST = 'cd -- "$1" && find . -mindepth 1 -maxdepth 2 -not -path "*/.*" -not -name __pycache__ | sort'


@dataclass(frozen=True, slots=True, kw_only=True)
class _Place:
    kind: str
    mode: int
    path: str


class Editor:
    """`root` is the folder that relative paths start from."""

    def __init__(self, sandbox: Sandbox, *, root: str, chars: int) -> None:
        self._sandbox, self._root, self._chars = sandbox, root, chars

    async def view(self, path: str, lines: Sequence[int] | None = None) -> str:
        """A file with line numbers, or what lies in a folder, two levels deep."""
        place = await self._look(path)
        if place.kind == "folder":
            listed = await self._exec(_LIST, place.path)
            return cut(listed.text.rstrip("\n"), self._chars) or f"{path} is empty"
        text = await self._read(path, place)
        all_lines = text.split("\n")
        if all_lines[-1] == "":
            all_lines.pop()  # the end of the last line is no line
        if lines is None:
            return cut(_numbered(all_lines, 1), self._chars) or f"{path} is empty"
        first, last = _range(lines, len(all_lines))
        return cut(_numbered(all_lines[first - 1 : last], first), self._chars)

    async def create(self, path: str, text: str) -> str:
        """Make or overwrite a file, and its folders."""
        place = await self._look(path)
        if place.kind not in ("file", "nothing", "nowhere"):
            raise ToolError(f"{path} is a {place.kind}; name a file")
        target = posixpath.join(self._root, path) if place.kind == "nowhere" else place.path
        await self._write(target, text, place.mode if place.kind == "file" else 0o644)
        return f"{path} was {'overwritten' if place.kind == 'file' else 'created'}."

    async def str_replace(self, path: str, old: str, new: str) -> str:
        """Replace the one place where `old` stands."""
        place = await self._look(path)
        text = await self._read(path, place)
        windows = _has_windows_ends(text)
        if windows:
            text, old, new = (part.replace("\r\n", "\n") for part in (text, old, new))
        if not old:
            raise ToolError("old_str is empty; use insert to add lines")
        if old == new:
            raise ToolError("old_str and new_str are the same: nothing would change")
        starts = _places(text, old)
        if not starts:
            raise ToolError(_not_found(path, text, old))
        if len(starts) > 1:
            numbers = ", ".join(str(text.count("\n", 0, start) + 1) for start in starts[:10])
            raise ToolError(
                f"old_str stands {len(starts)} times in {path}, at lines {numbers}; add lines around it "
                "until it stands once"
            )
        edited = text[: starts[0]] + new + text[starts[0] + len(old) :]
        await self._write(place.path, edited.replace("\n", "\r\n") if windows else edited, place.mode)
        return _shown(path, edited, edited.count("\n", 0, starts[0]), new.count("\n") + 1)

    async def insert(self, path: str, after: int, new: str) -> str:
        """Insert lines after line `after`; 0 is the beginning."""
        place = await self._look(path)
        text = await self._read(path, place)
        windows = _has_windows_ends(text)
        if windows:
            text, new = text.replace("\r\n", "\n"), new.replace("\r\n", "\n")
        lines = _with_ends(text)
        if not 0 <= after <= len(lines):
            raise ToolError(f"insert_line = {after}: {path} has {len(lines)} lines; give 0 to {len(lines)}")
        if lines and after == len(lines) and not lines[-1].endswith("\n"):
            lines[-1] += "\n"
        lines[after:after] = [new if new.endswith("\n") else new + "\n"]
        edited = "".join(lines)
        await self._write(place.path, edited.replace("\n", "\r\n") if windows else edited, place.mode)
        return _shown(path, edited, after, new.rstrip("\n").count("\n") + 1)

    async def _look(self, path: str) -> _Place:
        if not path or "\0" in path:
            raise ToolError("path is empty or has a NUL character; name a file")
        whole = posixpath.join(self._root, path)
        found = await self._exec(_LOOK, whole)
        kind, _, rest = found.stdout.decode("utf-8", "surrogateescape").partition(" ")
        mode, _, real = rest.partition(" ")
        if found.exit_code or not real:
            raise ToolError(f"{path} cannot be looked at: {found.text.strip()[:200]}")
        return _Place(kind=kind, mode=int(mode, 8), path=real)

    async def _exec(self, script: str, path: str) -> ExecResult:
        try:
            return await self._sandbox.exec(["sh", "-c", script, "sh", path], timeout_s=_TIMEOUT_S)
        except CreateError as error:  # in a sandbox that lives: what the policy started leaves no room
            raise ToolError(f"{path} cannot be looked at: {error}") from error

    async def _read(self, path: str, place: _Place) -> str:
        if place.kind in ("nothing", "nowhere"):
            raise ToolError(f"{path} does not exist; paths are absolute or start at {self._root}")
        if place.kind != "file":
            raise ToolError(f"{path} is a {place.kind}; name a file")
        try:
            data = await self._sandbox.read(place.path, max_bytes=_MAX_BYTES)
        except FileError as error:
            raise ToolError(f"{path} cannot be read here ({error}); use bash") from error
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError as error:
            raise ToolError(f"{path} is no UTF-8 text ({error.reason} at {error.start}); use bash") from error

    async def _write(self, path: str, text: str, mode: int) -> None:
        try:
            data = text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise ToolError("the text holds half of a surrogate pair; write valid Unicode") from error
        try:
            await self._sandbox.write(path, data, mode=mode)
        except FileError as error:
            raise ToolError(f"{path} cannot be written ({error})") from error


def _places(text: str, wanted: str) -> list[int]:
    found, start = [], text.find(wanted)
    while start >= 0:
        found.append(start)
        start = text.find(wanted, start + 1)
    return found


def _not_found(path: str, text: str, old: str) -> str:
    """The commonest mistake is white space: say where the first line stands otherwise indented."""
    first = next((line.strip() for line in old.split("\n") if line.strip()), "")
    near = [number for number, line in enumerate(text.split("\n"), 1) if first and line.strip() == first]
    if near:
        where = ", ".join(map(str, near[:5]))
        return (
            f"old_str does not stand in {path}. Its first line is like line {where}: "
            "compare white space and the lines below"
        )
    return f"old_str does not stand in {path}; view the file and copy the passage exactly"


def _has_windows_ends(text: str) -> bool:
    """Whether every line ends with CR LF."""
    return "\r\n" in text and text.count("\r\n") == text.count("\n")


def _with_ends(text: str) -> list[str]:
    # Not splitlines: that also splits at form feeds and the like.
    pieces = text.split("\n")
    return [f"{piece}\n" for piece in pieces[:-1]] + ([pieces[-1]] if pieces[-1] else [])


def _range(lines: Sequence[int], count: int) -> tuple[int, int]:
    if len(lines) != 2:
        raise ToolError("view_range is two line numbers: [first, last]; last = -1 is the end")
    first, last = lines[0], count if lines[1] == -1 else min(lines[1], count)
    if not 1 <= first <= last:
        raise ToolError(f"view_range = {list(lines)}: the file has {count} lines; give 1 <= first <= last")
    return first, last


def _numbered(lines: Sequence[str], first: int) -> str:
    return "\n".join(f"{number:6}\t{line}" for number, line in enumerate(lines, first))


def _shown(path: str, text: str, before: int, count: int) -> str:
    """The lines around an edit. `before` lines stand before it."""
    lines = text.split("\n")
    start, stop = max(0, before - _AROUND), min(len(lines), before + count + _AROUND)
    return f"{path} was edited. It now reads:\n{_numbered(lines[start:stop], start + 1)}"
