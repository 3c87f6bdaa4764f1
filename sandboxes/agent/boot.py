"""The agent where it is root: the first process of a container or of a virtual machine, reached by its stdin.

Its sources are the first thing that comes there, so no file of the harness is needed where it runs, and any
Python of at least 3.9 will do.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from ..inside.wire import LENGTH, Header
from ..spec import SandboxSpec
from .interpreter import MODULES, PACKAGE

WRITABLE = ("/box", "/tmp", "/dev/shm")
TOO_OLD = "rz-agent: Python is too old: "
# For `python -c`, with "0,1" behind it: stdin and stdout are the channel
BOOT = f"""
import json, os, sys
if sys.version_info < (3, 9):
    sys.exit("{TOO_OLD}" + sys.version.split()[0])
def read(size):
    data = b""
    while len(data) < size:
        more = os.read(0, size - len(data))
        if not more:
            os._exit(0)
        data += more
    return data
package = type(sys)("{PACKAGE}")
package.__path__ = []
sys.modules["{PACKAGE}"] = package
for name, source in json.loads(read(int.from_bytes(read({LENGTH.size}), "big"))):
    module = type(sys)("{PACKAGE}." + name)
    module.__package__ = "{PACKAGE}"
    sys.modules[module.__name__] = module
    setattr(package, name, module)
    exec(compile(source, name + ".py", "exec", dont_inherit=True), module.__dict__)
sys.modules["{PACKAGE}.supervisor"].main()
"""


def sources() -> bytes:
    """The agent's modules in an order in which each can be imported, as `BOOT` reads them."""
    folder = Path(__file__).parent.parent / "inside"
    text = json.dumps([[name, (folder / f"{name}.py").read_text()] for name in MODULES]).encode()
    return LENGTH.pack(len(text)) + text


def settings(spec: SandboxSpec, preload: Sequence[str]) -> Header:
    """The agent's first frame."""
    return {
        "isolation": "container",
        "owner": -1,
        "join": [],
        "cgroups": [],
        "preload": list(preload),
        "bundle": "",
        "lifetime_s": spec.lifetime_s,
        "writable": list(WRITABLE),
        "owned": list(spec.owned),
    }
