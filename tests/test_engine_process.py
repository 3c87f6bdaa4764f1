"""An engine in a process of its own ends with the process that started it, whenever that one is killed."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from rz_agent.kernels.vllm_child import leave_launcher

START = """
import asyncio
from tiny_engine import EngineHarness
from tiny_qwen import TIED
harness = EngineHarness(TIED, "aligned", "async")
asyncio.run(harness.engine.start())
"""


def engine_processes(parent: int) -> list[int]:
    """Children of a process that are fresh interpreters for something other than counting resources."""
    found = [
        int(child)
        for listed in Path(f"/proc/{parent}/task").glob("*/children")
        for child in listed.read_text().split()
    ]
    return [
        child for child in found if "spawn_main" in command_of(child) or "EngineCore" in command_of(child)
    ]


def command_of(process: int) -> str:
    try:
        return Path(f"/proc/{process}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except (FileNotFoundError, ProcessLookupError):
        return ""


def has_ended(process: int) -> bool:
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return True
    return state == "Z"  # ended, and nobody has asked how


def wait_for(condition: Callable[[], bool], seconds: float) -> float:
    """Seconds that it took to come true."""
    started = time.monotonic()
    while not condition():
        assert time.monotonic() - started < seconds, f"not within {seconds} s"
        time.sleep(0.05)
    return time.monotonic() - started


@pytest.fixture
def short_folder() -> Iterator[str]:
    """For sockets: pytest's own folders may be longer than the name of one can be."""
    with tempfile.TemporaryDirectory(prefix="rz-") as folder:
        yield folder


@pytest.mark.slow
@pytest.mark.parametrize(
    "moment", [pytest.param("as soon as it is there", marks=pytest.mark.long), "when it has begun"]
)
def test_an_engine_whose_parent_is_killed_while_it_starts_ends_within_seconds(
    short_folder: str, moment: str
) -> None:
    """The first finds that out when it has imported vLLM, and shakes no hands with the dead."""
    here = {"PYTHONPATH": os.pathsep.join(sys.path), "TMPDIR": short_folder, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen([sys.executable, "-c", START], env={**os.environ, **here}) as parent:
        try:
            wait_for(lambda: bool(engine_processes(parent.pid)) or parent.poll() is not None, 120)
            (engine,) = engine_processes(parent.pid)
            if moment == "when it has begun":
                wait_for(lambda: os.getpgid(engine) == engine, 120)  # it has left the terminal's group
            assert not has_ended(engine)
        finally:
            parent.send_signal(signal.SIGKILL)
    try:
        wait_for(lambda: has_ended(engine), 5 if moment == "when it has begun" else 60)
    finally:
        if not has_ended(engine):
            os.kill(engine, signal.SIGKILL)


def launcher_seen_by_a_child(answer: Any) -> None:
    before = os.environ.get("TORCHELASTIC_USE_AGENT_STORE")
    leave_launcher()
    answer.send((before, os.environ.get("TORCHELASTIC_USE_AGENT_STORE")))


@pytest.mark.slow
def test_an_engine_does_not_take_the_launcher_of_its_parent_for_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """torch would look for the engine's store at torchrun's, and wait for a server that nobody starts."""
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    leave_launcher()
    assert os.environ["TORCHELASTIC_USE_AGENT_STORE"] == "True"  # this process may be a rank
    fresh = multiprocessing.get_context("spawn")
    ours, theirs = fresh.Pipe()
    child = fresh.Process(target=launcher_seen_by_a_child, args=(theirs,))
    child.start()
    try:
        assert ours.poll(180)
        assert ours.recv() == ("True", None)
    finally:
        child.join(10)
