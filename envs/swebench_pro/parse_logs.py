"""Runs in the grading sandbox once the tests have ended: an instance's own parser, and what it saw.

    python3 -I parse_logs.py parser.py stdout.log stderr.log output.json -> {"reported": [...], "seen": [...]}

Most parsers keep one status for each name; `seen` is the list before that, so a test with two is noticed.
Standard library only.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import subprocess
import sys
from typing import Any


def reported(parser: str, logs: list[str], output: str) -> list[list[str]]:
    """What the parser writes when it is run as it was meant to be."""
    done = subprocess.run(
        [sys.executable, "-I", parser, *logs, output], stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    if done.returncode:
        sys.exit(f"the parser failed: {done.stdout.decode(errors='replace').strip()[-400:]}")
    with open(output) as file:
        return [[str(test["name"]), str(test["status"])] for test in json.load(file)["tests"]]


def seen(parser: str, logs: list[str]) -> list[list[str]]:
    """What its function found, each time that it found it; [] where it is built otherwise."""
    try:
        return _found(parser, logs)
    except (Exception, SystemExit):  # a program that is not made to be imported
        return []


def _found(parser: str, logs: list[str]) -> list[list[str]]:
    texts = []
    for log in logs:
        with open(log) as file:
            texts.append(file.read())
    spec = importlib.util.spec_from_file_location("instance_parser", parser)
    assert spec is not None
    assert spec.loader is not None
    module: Any = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses look for it
    with contextlib.redirect_stdout(io.StringIO()):
        spec.loader.exec_module(module)
        return [[str(test.name), str(test.status.name)] for test in module.parse_test_output(*texts)]


if __name__ == "__main__":
    _, parser, *logs, output = sys.argv
    print(json.dumps({"reported": reported(parser, logs, output), "seen": seen(parser, logs)}))
