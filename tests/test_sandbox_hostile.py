"""The hostile programs of the conformance suite on the local provider as a plain user without cgroups.

As whoever runs the tests they are tried by `conformance/test_conformance.py`; here is what root cannot show,
and what is the local provider's own: how much of the machine is not there at all.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys

import pytest
from rz_agent.sandboxes.conformance import PROMISES, Place
from rz_agent.sandboxes.local.provider import LocalProvider
from rz_agent.sandboxes.spec import SandboxSpec
from rz_agent.sandboxes.tables import LocalTable

pytestmark = pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not installed")

# Everything is imported before root gives up its rights: a plain user may not read where Python lies.
PLAIN_USER = """
import asyncio, concurrent.futures.thread, ctypes, encodings.idna, json, os, statistics, sys, zipfile
from rz_agent.sandboxes.conformance import PROMISES, try_all
from rz_agent.sandboxes.conformance import place
from rz_agent.sandboxes.ledger import Ledger
from rz_agent.sandboxes.local import census, check, janitor
from rz_agent.sandboxes.local.provider import LocalProvider
from rz_agent.sandboxes.tables import LocalTable
from pathlib import Path

async def main():
    provider = LocalProvider(LocalTable(), Ledger(Path(sys.argv[1])))
    chosen = [promise for promise in PROMISES if promise.topic in ("hostile", "files")]
    outcomes = {o.promise.name: (o.status, o.detail) async for o in try_all(provider, chosen)}
    bounded = provider.capabilities().bounds_session_memory
    await provider.aclose()
    print(json.dumps({"uid": os.getuid(), "bounded": bounded, "outcomes": outcomes}))

if os.geteuid() == 0:
    os.setgroups([])
    os.setgid(54321)
    os.setuid(54321)
    ctypes.CDLL(None).prctl(4, 1, 0, 0, 0)
asyncio.run(main())
"""


@pytest.mark.slow
def test_a_plain_user_contains_every_hostile_program_that_root_contains() -> None:
    folder = subprocess.run(["mktemp", "-d"], capture_output=True, text=True, check=True).stdout.strip()
    try:
        os.chmod(folder, 0o777)
        command = [sys.executable, "-c", PLAIN_USER, folder]
        ran = subprocess.run(command, capture_output=True, text=True, timeout=280, cwd="/")
    finally:
        shutil.rmtree(folder)
    assert ran.returncode == 0, ran.stderr
    said = json.loads(ran.stdout)
    assert said["uid"] != 0
    outcomes = said["outcomes"]
    assert {name: found for name, found in outcomes.items() if found[0] == "broken"} == {}
    not_tried = {name for name, (status, _) in outcomes.items() if status == "not tried"}
    assert not_tried <= {p.name for p in PROMISES if "bounds_session_memory" in p.needs}
    assert len(outcomes) - len(not_tried) >= 40


def test_the_machines_other_folders_are_not_there_at_all() -> None:
    code = (
        "import os\nfor path in ('/etc/shadow', '/root', '/var', '/sys/kernel'):\n"
        "  try: open(path); print('OPENED', path)\n  except FileNotFoundError: pass\n"
        "assert os.listdir('/home') == ['user'] and os.readlink('/home/user') == '/box'"
    )

    async def scenario() -> None:
        provider = LocalProvider(LocalTable())
        async with Place(provider, SandboxSpec()) as place:
            for result in await place.both_ways(code):
                assert (result.stdout, result.exit_code) == (b"", 0)
        await provider.aclose()

    asyncio.run(scenario())
