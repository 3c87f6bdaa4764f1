"""Metrics on JSON: values, and files of settings."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from .reading import Unreadable, json_of, text_of
from .registry import METRICS
from .rule_values import obeys

Rules = Mapping[str, Any]
# What OSWorld's own getters put where they could not compute what is right.
NOT_COMPUTED = "__EVALUATION_FAILED__"


@METRICS.add("check_direct_json_object")
def check_direct_json_object(result: Any, rules: Rules) -> float:
    """Every key of `expected` has that value in the result; a text is read as JSON, also with single quotes.

    expect_in_result           a text is a part of the value, a list holds the value or one of its members
    expected.ignore_list_order sort lists before comparing them
    """
    if isinstance(result, str):
        try:
            result = json.loads(result.strip().replace("'", '"'))
        except ValueError:
            return 0.0
    expected = rules["expected"]
    if not isinstance(result, Mapping) or NOT_COMPUTED in expected.values():
        return 0.0
    if rules.get("expect_in_result", False):
        return float(all(_in_value(wanted, result.get(key)) for key, wanted in expected.items()))
    unordered = bool(expected.get("ignore_list_order", False))
    wanted = {key: value for key, value in expected.items() if key != "ignore_list_order"}
    return float(all(_same(value, result.get(key), unordered=unordered) for key, value in wanted.items()))


def _same(wanted: Any, value: Any, *, unordered: bool) -> bool:
    if unordered and isinstance(wanted, list):
        return isinstance(value, list) and sorted(map(json.dumps, wanted)) == sorted(map(json.dumps, value))
    return bool(wanted == value)


def _in_value(wanted: Any, value: Any) -> bool:
    if isinstance(wanted, list):
        members = value if isinstance(value, list) else [value]
        return any(item in members for item in wanted)
    return isinstance(wanted, str) and isinstance(value, str | list) and wanted in value


@METRICS.add("check_json")
def check_json(result: str | None, rules: Rules) -> float:
    """Every rule of `expect` holds for the value below its `key` (a path), none of `unexpect`."""
    if result is None:
        return 0.0
    content = json_of(result)
    for rule in rules.get("expect", []):
        found, value = _below(content, rule["key"])
        if not found or not obeys(value, rule):
            return 0.0
    return float(not any(obeys(_below(content, rule["key"])[1], rule) for rule in rules.get("unexpect", [])))


def _below(content: Any, keys: list[Any]) -> tuple[bool, Any]:
    for key in keys:
        try:
            content = content[key]
        except (KeyError, IndexError, TypeError):
            return False, None
    return True, content


@METRICS.add("check_json_settings")
def check_json_settings(result: str | None, rules: Rules) -> float:
    """The file is an object that has every setting of `expected`."""
    if not result:
        return 0.0
    settings = json_of(result)
    wanted = rules["expected"].items()
    return float(
        isinstance(settings, dict)
        and all(key in settings and settings[key] == value for key, value in wanted)
    )


@METRICS.add("check_json_keybindings")
def check_json_keybindings(result: str | None, rules: Rules) -> float:
    """`expected` is in the file's list; VS Code writes a comment before it, as its first line."""
    if not result:
        return 0.0
    text = text_of(result)
    for part in (text, text.partition("\n")[2]):
        try:
            bindings = json.loads(part)
        except ValueError:
            continue
        return float(isinstance(bindings, list) and rules["expected"] in bindings)
    raise Unreadable(result, "is no list of key bindings")


@METRICS.add("is_included_all_json_objects")
def is_included_all_json_objects(gold: str | None, result: str | None) -> float:
    """Every entry of the first file's object is in the second's."""
    if not gold or not result:
        return 0.0
    wanted, found = json_of(gold), json_of(result)
    if not isinstance(wanted, dict) or not isinstance(found, dict):
        return 0.0
    return float(all(key in found and found[key] == value for key, value in wanted.items()))
