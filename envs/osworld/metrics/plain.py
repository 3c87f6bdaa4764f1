"""Metrics on texts and on files of text."""

from __future__ import annotations

import csv
import difflib
import re
from collections.abc import Mapping, Sequence
from typing import Any

from .reading import similarity, text_of
from .registry import METRICS, chosen

Rules = Mapping[str, Any]


@METRICS.add("check_include_exclude")
def check_include_exclude(result: str | None, rules: Rules) -> float:
    """Every text of `include` is in it and none of `exclude`."""
    if result is None:
        return 0.0
    included = all(text in result for text in rules.get("include", []))
    return float(included and not any(text in result for text in rules.get("exclude", [])))


@METRICS.add("exact_match")
def exact_match(result: Any, rules: Rules) -> float:
    """It is `expected`, blanks and all."""
    return float(result == rules["expected"])


@METRICS.add("match_in_list")
def match_in_list(result: Any, rules: Rules) -> float:
    """It is one of `expected`."""
    return float(result in rules["expected"])


@METRICS.add("is_in_list")
def is_in_list(result: Sequence[Any] | None, rules: Rules) -> float:
    """`expected` is one of its members, or a part of it where it is a text."""
    return float(result is not None and rules["expected"] in result)


@METRICS.add("literal_match")
def literal_match(result: Any, expected: Any, *, type: str = "str", ignore_case: bool = False) -> float:
    """Both are the same as texts, or (`type` "list") member by member."""
    if chosen("options.type", type, ("str", "list")) == "str":
        result, expected = [result], [expected]
    if not (isinstance(result, list | tuple) and isinstance(expected, list | tuple)):
        return 0.0
    first, second = [str(item) for item in result], [str(item) for item in expected]
    if ignore_case:
        first, second = [item.lower() for item in first], [item.lower() for item in second]
    return float(first == second)


@METRICS.add("fuzzy_match")
def fuzzy_match(result: str | None, rules: Rules) -> float:
    """How alike it is to `expected`."""
    return 0.0 if result is None else similarity(result, rules["expected"])


@METRICS.add("is_extension_installed")
def is_extension_installed(result: str | None, rules: Rules) -> float:
    """`expected` is in the list of extensions (`type` "contain"), or is not ("not_contain")."""
    wanted = chosen("rules.type", rules["type"], ("contain", "not_contain")) == "contain"
    return float(result is not None and (rules["expected"] in result) == wanted)


@METRICS.add("compare_answer")
def compare_answer(result: str | None, rules: Rules) -> float:
    """It is `expected`, and something."""
    return float(bool(result) and result == rules["expected"])


@METRICS.add("check_list")
def check_list(result: str | None, rules: Rules) -> float:
    """Some line of the file matches each pattern of `expect`, and none matches one of `unexpect`."""
    if result is None:
        return 0.0
    lines = text_of(result).splitlines(keepends=True)
    found = all(any(re.search(pattern, line) for line in lines) for pattern in rules.get("expect", []))
    unwanted = any(re.search(pattern, line) for pattern in rules.get("unexpect", []) for line in lines)
    return float(found and not unwanted)


@METRICS.add("check_csv")
def check_csv(result: str | None, rules: Rules) -> float:
    """Some record of the CSV file has the fields of each entry of `expect`, none those of `unexpect`."""
    if result is None:
        return 0.0
    records = list(csv.DictReader(text_of(result).splitlines()))

    def some_record_has(fields: Mapping[str, str]) -> bool:
        return any(fields.items() <= record.items() for record in records)

    found = all(some_record_has(fields) for fields in rules.get("expect", []))
    return float(found and not any(some_record_has(fields) for fields in rules.get("unexpect", [])))


@METRICS.add("compare_text_file")
def compare_text_file(
    result: str | None, expected: str, *, ignore_blanks: bool = False, ignore_case: bool = False
) -> float:
    """Both files have the same text; `ignore_blanks` counts a run of blanks as one and strips the ends."""
    if not result:
        return 0.0
    texts = [text_of(result), text_of(expected)]
    if ignore_blanks:
        texts = [" ".join(text.split()) for text in texts]
    if ignore_case:
        texts = [text.lower() for text in texts]
    return float(texts[0] == texts[1])


@METRICS.add("diff_text_file")
def diff_text_file(result: str | None, expected: str) -> float:
    """How many of both files' lines match, over all of them."""
    if result is None:
        return 0.0
    lines = [text_of(result).splitlines(), text_of(expected).splitlines()]
    return difflib.SequenceMatcher(a=lines[0], b=lines[1]).ratio()


@METRICS.add("compare_config")
def compare_config(result: str | None, rules: Rules) -> float:
    """The file is the text `expected`."""
    return float(bool(result) and text_of(str(result)) == rules["expected"])


@METRICS.add("file_contains")
def file_contains(result: str | None, rules: Rules) -> float:
    """Every text of `expected` is in the file."""
    if not result:
        return 0.0
    text = text_of(result)
    return float(all(part in text for part in rules["expected"]))


@METRICS.add("compare_terminal_and_txt")
def compare_terminal_and_txt(result: str | None, expected: str | None) -> float:
    """The file is what the terminal shows."""
    return float(bool(result and expected) and text_of(str(result)) == expected)


@METRICS.add("compare_python_pure_text")
def compare_python_pure_text(result: str | None, expected: str) -> float:
    """Both programs have the same lines; empty lines, ends of lines and a leading shebang do not count."""
    if not result:
        return 0.0
    return float(_code_lines(text_of(result)) == _code_lines(text_of(expected)))


def _code_lines(text: str) -> list[str]:
    lines = text.splitlines()
    heads = ("#!", "# -*- coding:", "# coding:", "# coding=")
    start = 0
    while start < min(len(lines), 3) and lines[start].strip().startswith(heads):
        start += 1
    return [line.expandtabs(4).rstrip() for line in lines[start:] if line.strip()]
