"""What an agent may leave for its judge: bombs. None holds up, fills or ends the process that has the run."""

from __future__ import annotations

import asyncio
import json
import operator
import os
import sqlite3
import time
import zipfile
from collections.abc import AsyncIterator, Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rz_agent.envs.failure import InfraFailure
from rz_agent.envs.osworld import judge as judging
from rz_agent.envs.osworld.evaluator import evaluate
from rz_agent.envs.osworld.getters import GETTERS, Place
from rz_agent.envs.osworld.judge import Judge, NotJudged
from rz_agent.envs.osworld.setup import run_steps
from rz_agent.envs.osworld.task_file import parse_task
from test_osworld_tasks import FolderMachine

pytestmark = pytest.mark.anyio
SECRET = "what only this machine knows"


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
async def judge(anyio_backend: str) -> AsyncIterator[Judge]:
    judge = Judge()
    yield judge
    await judge.aclose()


@pytest.fixture
def place(judge: Judge, tmp_path: Path) -> Place:
    (tmp_path / "home").mkdir()
    return Place(machine=FolderMachine(tmp_path / "home"), folder=tmp_path / "episode", judge=judge)


def packed(path: Path, **parts: str) -> None:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, text in parts.items():
            archive.writestr(name, text)


def entities(text: str) -> str:
    """XML whose one entity would be 10^9 texts."""
    levels = "".join(f'<!ENTITY e{n} "{f"&e{n - 1};" * 10}">' for n in range(1, 10))
    return f'<?xml version="1.0"?><!DOCTYPE a [<!ENTITY e0 "{text}">{levels}]><a><p>&e9;</p></a>'


def endless_view(path: Path) -> None:
    path.parent.mkdir(parents=True)
    endless = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT i AS url, 1 AS title"
    with closing(sqlite3.connect(path)) as database:
        database.execute(f"CREATE VIEW urls AS {endless}, 1 AS last_visit_time FROM n")


def host_file(path: Path) -> None:
    """Names a file of the host's in an external entity."""
    secret = path.parent / "secret"
    secret.write_text(SECRET)
    doctype = f'<?xml version="1.0"?><!DOCTYPE a [<!ENTITY s SYSTEM "file://{secret}">]>'
    text = "urn:oasis:names:tc:opendocument:xmlns:text:1.0"
    packed(path, **{"content.xml": f'{doctype}<a xmlns:t="{text}"><t:p>&s;</t:p></a>'})


FILE = {"type": "vm_file", "path": "f", "dest": "f"}
HISTORY = ".config/chromium/Default/History"
PREFERENCES = ".config/chromium/Default/Preferences"
ODT = {"type": "vm_file", "path": "f.odt", "dest": "f.odt"}
SAME = {"type": "vm_file", "path": "same.odt", "dest": "same.odt"}
RULE = {"type": "rule", "rules": {"expected": SECRET, "type": "keywords", "keywords": []}}
# what it is -> (file, how it is made, the evaluator)
BOMBS: dict[str, tuple[str, Callable[[Path], Any], dict[str, Any]]] = {
    "a pattern that never ends": (
        "f",
        lambda path: path.write_text("a" * 60 + "b"),
        {"func": "check_list", "result": FILE, "expected": {"type": "rule", "rules": {"expect": ["(a+)+$"]}}},
    ),
    "a table that is an endless view": (
        HISTORY,
        endless_view,
        {"func": "check_history_deleted", "result": {"type": "history", "dest": "h"}, "expected": RULE},
    ),
    "JSON a million levels deep": (
        "f",
        lambda path: path.write_text("[" * 1_000_000),
        {"func": "check_json_settings", "result": FILE, "expected": RULE},
    ),
    "an entity of a billion texts": (
        "f.odt",
        lambda path: packed(path, **{"content.xml": entities("lol")}),
        {"func": "compare_docx_files", "result": ODT, "expected": ODT},
    ),
    "text that unpacks to a hundred times itself": (
        "f.odt",
        lambda path: packed(path, **{"content.xml": f"<a>{'<b/>' * 30_000_000}</a>"}),
        {"func": "compare_docx_files", "result": ODT, "expected": ODT},
    ),
    "a file of the host's": (
        "f.odt",
        host_file,
        {"func": "compare_docx_files", "result": ODT, "expected": ODT, "options": {"fuzzy_match": True}},
    ),
}


@pytest.mark.parametrize("what", list(BOMBS))
async def test_a_bomb_is_worth_0_and_nobody_waits_for_it(
    place: Place, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    monkeypatch.setattr(judging, "DEADLINE_S", 2.0)
    name, make, evaluator = BOMBS[what]
    make(Path(place.machine.home) / name)
    task = parse_task({"id": "t", "instruction": "Do it.", "evaluator": evaluator}, "os", "t.json")
    began = last = time.monotonic()
    running = asyncio.create_task(evaluate(task, place, last_action="DONE", run_steps=run_steps))
    longest = 0.0
    while not running.done():
        await asyncio.sleep(0.02)
        longest, last = max(longest, time.monotonic() - last), time.monotonic()
    verdict = await running
    assert (verdict.score, SECRET in str(verdict)) == (0.0, False)
    assert time.monotonic() - began < 60
    assert longest < 1.5  # the event loop went on


async def test_a_profile_that_is_no_settings_is_one_that_was_never_written(place: Place) -> None:
    await place.machine.write(PREFERENCES, b"[" * 1_000_000)
    assert await GETTERS["default_search_engine"](place, {}) == "Google"


async def test_a_tree_that_is_no_xml_is_not_judged(place: Place) -> None:
    broken = replace(place, machine=FolderMachine(Path(place.machine.home)))
    broken.machine.tree = entities("x")  # type: ignore[attr-defined]
    for getter in ("vm_terminal_output", "active_url_from_accessTree"):
        with pytest.raises(NotJudged, match="ParseError"):
            await GETTERS[getter](broken, {})


async def test_a_call_has_memory_of_its_own_and_an_end(judge: Judge, monkeypatch: pytest.MonkeyPatch) -> None:
    assert await judge.call(operator.mul, "ab", 2) == "abab"
    with pytest.raises(NotJudged, match="MemoryError"):
        await judge.call(operator.mul, "ab", judging.MEMORY)
    monkeypatch.setattr(judging, "DEADLINE_S", 0.3)
    with pytest.raises(NotJudged, match=r"it had 0\.3 s"):
        await judge.call(time.sleep, 60)


async def test_what_is_nested_too_deep_to_be_passed_on_is_not_judged(judge: Judge) -> None:
    seen = set()
    for levels in (10, 900, 950, 980, 5000):  # one of them the child can just read, and this process not
        try:
            await judge.call(json.loads, "[" * levels + "]" * levels)
            seen.add("read")
        except NotJudged:
            seen.add("not judged")
    assert seen == {"read", "not judged"}
    deep: list[Any] = []
    for _ in range(5000):
        deep = [deep]
    with pytest.raises(NotJudged, match="handed on"):
        await judge.call(operator.not_, deep)


async def test_a_judge_that_is_lost_while_it_judges_is_nobodys_answer() -> None:
    judge = Judge()
    try:
        leader = await judge.call(os.getppid)
        judging_now = asyncio.create_task(judge.call(time.sleep, 60))
        await asyncio.sleep(0.3)
        os.killpg(leader, 9)
        with pytest.raises(InfraFailure, match="lost while it judged"):
            await judging_now
    finally:
        await judge.aclose()


async def test_no_more_calls_run_at_once_than_there_is_memory_for(judge: Judge) -> None:
    running = [asyncio.create_task(judge.call(time.sleep, 0.5)) for _ in range(2 * judging.AT_ONCE)]
    began = time.monotonic()
    await asyncio.gather(*running)
    assert time.monotonic() - began >= 1.0


async def test_a_judge_that_is_lost_is_made_anew_and_one_that_is_closed_leaves_nothing() -> None:
    judge = Judge()
    try:
        first = await judge.call(os.getppid)
        os.kill(first, 9)
        await asyncio.sleep(0.2)
        second = await judge.call(os.getppid)
        assert first != second
        assert judge._folder is not None
        folder = judge._folder.name
    finally:
        await judge.aclose()
    assert [path for path in (folder, f"/proc/{second}") if os.path.lexists(path)] == []  # noqa: ASYNC240


async def test_a_judge_that_cannot_start_is_nobodys_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.executable", "/bin/false")
    with pytest.raises(InfraFailure, match="the judge did not start"):
        await Judge().call(os.getpid)
