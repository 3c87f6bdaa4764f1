"""From a test run's log to a verdict: resolved if and only if every test that decides has PASSED.

    statuses(found, log) -> {name: status}

`found` is what the instance's parser says. Some parsers read only the lines of tests that passed, and most
keep the last of two statuses; but what runs is the policy's code, and it can print. So the log is read a
second time for failures, in the words of the runners of all published instances; a test seen both PASSED and
FAILED has FAILED. Invariant: the second reading can only turn PASSED into FAILED.
Not covered: code that prints a PASS and ends the runner before it can print the FAIL.
`statuses` is called in a sandbox (`parse_logs.py`), where a log that is made to be slow to read has a
deadline: so this file imports nothing of the package. Nothing here waits.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Literal

Status = Literal["PASSED", "FAILED", "SKIPPED", "ERROR"]

_COLOUR = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_GO = re.compile(r"^\s*--- FAIL: (\S+)")
_PYTEST_LINE = re.compile(r"^(\S+::.+?)\s+(?:FAILED|ERROR)\b")
_PYTEST_SUMMARY = re.compile(r"^(?:FAILED|ERROR) (\S+::.+?)(?: - .*)?$")
_XDIST = re.compile(r"^\[gw\d+\].*?(?:FAILED|ERROR)\s+(\S+::.+?)\s*$")
_SUITE = re.compile(r"^(?:PASS|FAIL)\s+(\S+\.[jt]sx?)\b")
_JEST = re.compile(r"^[\u2715\u00d7\u2717]\s+(.+?)(?:\s+\(\d+(?:\.\d+)? ?m?s\))?$")
_JSON = re.compile(r"^\{$", re.MULTILINE)
_MAX_JSON = 1000


def statuses(found: Iterable[tuple[str, str]], log: str) -> dict[str, str]:
    """One status for each test: the worst that the parser saw; FAILED where the log tells of a failure."""
    result: dict[str, str] = {}
    for name, status in found:
        result[name] = min((status, result.get(name, status)), key=_rank)
    failed = set(failures(log))
    return {n: "FAILED" if s == "PASSED" and n in failed else s for n, s in result.items()}


def missing(tests: Iterable[str], found: Mapping[str, str]) -> list[str]:
    """The tests that have not passed, by name."""
    return sorted(name for name in tests if found.get(name) != "PASSED")


def failures(log: str) -> Iterator[str]:
    """Names of failed tests as parsers would call them, from a log in the words of any known runner."""
    plain = _COLOUR.sub("", log)
    suite = ""
    for line in plain.splitlines():
        text = line.strip()
        if header := _SUITE.match(text):
            suite = header[1]
        elif test := _JEST.match(text):
            yield f"{suite} | {test[1]}" if suite else test[1]
        else:
            for pattern in (_GO, _XDIST, _PYTEST_LINE, _PYTEST_SUMMARY):
                if told := pattern.match(text):
                    yield told[1]
    yield from _mocha(plain)


def _mocha(log: str) -> Iterator[str]:
    """Failures in the JSON reports of mocha, wherever in the log they begin."""
    decoder = json.JSONDecoder()
    for start in itertools.islice(_JSON.finditer(log), _MAX_JSON):
        try:
            report, _ = decoder.raw_decode(log, start.start())
            for test in report.get("failures", ()):
                yield f"{str(test['file']).removeprefix('/app/')} | {test['fullTitle']}"
        except (ValueError, TypeError, KeyError, RecursionError):
            continue


def _rank(status: str) -> int:
    """SKIPPED beside PASSED is a test that ran once; FAILED and ERROR stand whatever is beside them."""
    return {"FAILED": 0, "ERROR": 1, "PASSED": 2}.get(status, 3)
