"""Reads `pytest -v`: python3 parser.py stdout.log stderr.log output.json."""

import enum
import json
import re
import sys
from typing import NamedTuple

LINE = re.compile(r"^(\S+\.py::.+?) (PASSED|FAILED|SKIPPED|ERROR|XFAIL|XPASS)(?: \(.*\))?\s*(?:\[ *\d+%\])?$")
UNCOLLECTED = re.compile(r"^ERROR (\S+\.py)(?: - .*)?$")  # a file that cannot be imported


class Status(enum.Enum):
    PASSED = 1
    FAILED = 2
    SKIPPED = 3
    ERROR = 4


class TestResult(NamedTuple):
    name: str
    status: Status


WORDS = {"XFAIL": Status.SKIPPED, "XPASS": Status.PASSED}


def parse_test_output(stdout: str, stderr: str) -> list[TestResult]:
    found = []
    for line in stdout.splitlines():
        test = LINE.match(line.strip())
        if test:
            word = test.group(2)
            found.append(TestResult(test.group(1), WORDS.get(word) or Status[word]))
            continue
        file = UNCOLLECTED.match(line.strip())
        if file:
            found.append(TestResult(file.group(1), Status.ERROR))
    return found


def main(stdout_path: str, stderr_path: str, output_path: str) -> None:
    with open(stdout_path) as out, open(stderr_path) as err:
        found = parse_test_output(out.read(), err.read())
    with open(output_path, "w") as file:
        json.dump({"tests": [{"name": t.name, "status": t.status.name} for t in found]}, file)


if __name__ == "__main__":
    main(*sys.argv[1:])
