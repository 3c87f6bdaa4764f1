"""What runs in the sandbox to hold a desktop, as one zip: our part and the pure Python libraries it uses.

Any image with a Python of at least 3.9 can run it: nothing is installed there. Each module is there twice,
compiled (for a Python of the harness's own version) and as source (for any other one).
"""

from __future__ import annotations

import functools
import importlib.util
import io
import marshal
import os
import zipfile
from collections.abc import Iterator
from pathlib import Path

from ..errors import Misconfigured

LIBRARIES = ("Xlib", "six", "mss", "jeepney")
_OURS = ("inside/wire.py", "desktop/inside")
_NEEDLESS = ("tests", "windows", "darwin.py", "nvcontrol.py")
_KEYSYMS = ("__init__.py", "miscellany.py", "latin1.py")  # those that Xlib.XK loads
# argv: bytes of the archive, which stdin begins with, and the settings
BOOT = """
import json, os, sys
fd, left = os.memfd_create("desktop"), int(sys.argv[1])
while left:
    data = os.read(0, min(left, 1 << 20)) or sys.exit()
    left -= os.write(fd, data)
sys.path.insert(0, f"/proc/self/fd/{fd}")
from rz_agent.sandboxes.desktop.inside.main import main
main(json.loads(sys.argv[2]))
"""


@functools.cache
def build() -> bytes:
    """The archive; the first takes about a second of compiling. Misconfigured when a library is missing."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as bundle:
        for name, path in _modules():
            source = path.read_bytes()
            bundle.writestr(name, source)
            bundle.writestr(f"{name}c", _compiled(source, name))
    return buffer.getvalue()


def _compiled(source: bytes, name: str) -> bytes:
    """A .pyc that is not checked against its source (PEP 552): their times mean nothing in an archive."""
    code = compile(source, name, "exec", dont_inherit=True)
    return importlib.util.MAGIC_NUMBER + (1).to_bytes(4, "little") + bytes(8) + marshal.dumps(code)


def _modules() -> Iterator[tuple[str, Path]]:
    """(name in the archive, file); the packages around ours are empty there."""
    sandboxes = Path(__file__).parent.parent
    for package in ("", "sandboxes/", "sandboxes/inside/", "sandboxes/desktop/"):
        yield f"rz_agent/{package}__init__.py", Path(os.devnull)
    for part in _OURS:
        yield from _files(sandboxes / part, f"rz_agent/sandboxes/{part}")
    for library in LIBRARIES:
        spec = importlib.util.find_spec(library)
        if spec is None or spec.origin is None:
            message = f"the Python package {library} is missing\n  Install: pip install 'rz-agent[desktop]'"
            raise Misconfigured(message, provider="desktop")
        place = Path(spec.origin)
        found = place.parent if place.name == "__init__.py" else place
        yield from _files(found, library if found.is_dir() else f"{library}.py")


def _files(place: Path, name: str) -> Iterator[tuple[str, Path]]:
    if place.is_file():
        yield name, place
        return
    for path in sorted(place.rglob("*.py")):
        inner = path.relative_to(place)
        unused = inner.parts[0] == "keysymdef" and path.name not in _KEYSYMS
        if not unused and not set(inner.parts) & set(_NEEDLESS):
            yield f"{name}/{inner.as_posix()}", path
