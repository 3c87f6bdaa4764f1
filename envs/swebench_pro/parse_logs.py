"""Runs in a sandbox of its own once the tests have ended: an instance's parser, and the verdict on its list.

    python3 -I parse_logs.py verdict.py parser.py wanted.json stdout.log stderr.log output.json
    -> {test: status}

wanted.json lists the tests that are asked for; null: all that are seen. Most parsers keep one status for each
name; `seen` is the list before that, so a test with two is noticed. All that reads a log runs here, where it
has a deadline and bounded memory, for the policy's code has written it. Standard library only.
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


def verdict(module: str, parser: str, wanted: str, stdout: str, stderr: str, output: str) -> dict[str, str]:
    """The status of each wanted test."""
    logs, names = [stdout, stderr], json.loads(_read(wanted))
    pairs = [*reported(parser, logs, output), *seen(parser, logs)]
    found: dict[str, str] = _loaded("verdict", module).statuses(pairs, "\n".join(map(_read, logs)))
    return found if names is None else {name: found[name] for name in names if name in found}


def _found(parser: str, logs: list[str]) -> list[list[str]]:
    texts = [_read(log) for log in logs]
    with contextlib.redirect_stdout(io.StringIO()):
        module = _loaded("instance_parser", parser)
        return [[str(test.name), str(test.status.name)] for test in module.parse_test_output(*texts)]


def _read(path: str) -> str:
    with open(path) as file:
        return file.read()


def _loaded(name: str, path: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # where dataclasses look for it
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    print(json.dumps(verdict(*sys.argv[1:])))
