"""Reads `python3 -m unittest -v`: python3 parser.py stdout.log stderr.log output.json."""

import enum
import json
import re
import sys
from typing import NamedTuple

# "test_x (package.Class.test_x)", before Python 3.11 "test_x (package.Class)"; a docstring may follow.
TEST = re.compile(r"^(\w+) \(([\w.]+)\)")
END = re.compile(r"(?:^|\.\.\. )(ok|FAIL|ERROR|skipped .*|expected failure|unexpected success)$")


class Status(enum.Enum):
    PASSED = 1
    FAILED = 2
    SKIPPED = 3
    ERROR = 4


class TestResult(NamedTuple):
    name: str
    status: Status


WORDS = {
    "ok": Status.PASSED,
    "FAIL": Status.FAILED,
    "ERROR": Status.ERROR,
    "expected failure": Status.SKIPPED,
    "unexpected success": Status.FAILED,
}


def parse_test_output(stdout: str, stderr: str) -> list[TestResult]:
    found, running = [], ""
    for line in stderr.splitlines():
        test = TEST.match(line)
        if test:
            method, place = test.groups()
            running = place if place.endswith("." + method) else place + "." + method
        end = END.search(line)
        if end and running:
            found.append(TestResult(running, WORDS.get(end.group(1), Status.SKIPPED)))
            running = ""
    return found


def main(stdout_path: str, stderr_path: str, output_path: str) -> None:
    with open(stdout_path) as out, open(stderr_path) as err:
        found = parse_test_output(out.read(), err.read())
    with open(output_path, "w") as file:
        json.dump({"tests": [{"name": t.name, "status": t.status.name} for t in found]}, file)


if __name__ == "__main__":
    main(*sys.argv[1:])
