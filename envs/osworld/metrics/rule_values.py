"""Whether a value obeys a rule `{"method": ..., "ref": ...}`, as rules of tables and JSON files have it.

eq ne le lt ge gt            Python's comparisons with ref
approx:0.001                 a number no further from ref
re  re.I                     a regular expression is found in it; flags behind dots
range.te  [0, 2]             0 < value <= 2: t or e for each end
str_list_eq  str_set_eq      a quoted, comma-separated text is that list or set
spreadsheet_range            cell ranges between two others
"""

from __future__ import annotations

import functools
import operator
import re
from collections.abc import Callable, Mapping
from typing import Any

from openpyxl.worksheet.cell_range import MultiCellRange

from .registry import chosen

METHODS = ("eq", "ne", "le", "lt", "ge", "gt")
CONTAINERS: Mapping[str, Callable[[Any], Any]] = {"str_list_eq": list, "str_set_eq": set}


def obeys(value: Any, rule: Mapping[str, Any]) -> bool:
    """Whether it does; a value of another kind does not.

    >>> obeys(191.66669, {"method": "approx:0.001", "ref": 191.6667}), obeys(None, {"method": "lt", "ref": 1})
    (True, False)
    """
    method, ref = str(rule["method"]), rule["ref"]
    try:
        return _obeys(value, method, ref)
    except (TypeError, AttributeError):  # an order between a text and a number, a text that is none
        return False


def _obeys(value: Any, method: str, ref: Any) -> bool:
    if method in METHODS:
        return bool(getattr(operator, method)(value, ref))
    if method.startswith("approx:"):
        return bool(abs(_number(value) - ref) <= float(method.partition(":")[2]))
    if method == "re" or method.startswith("re."):
        flags = (re.RegexFlag[name] for name in method.split(".")[1:])
        return re.search(ref, value, functools.reduce(operator.or_, flags, re.RegexFlag(0))) is not None
    if re.fullmatch(r"range\.[te][te]", method):
        low, high = (getattr(operator, f"l{end}") for end in method[-2:])
        return bool(low(ref[0], value) and high(value, ref[1]))
    if method in CONTAINERS:
        container = CONTAINERS[method]
        return bool(container(value.strip("\"'").split(",")) == container(ref))
    if method == "spreadsheet_range":
        smallest, largest = MultiCellRange(ref[0]), MultiCellRange(ref[1])
        return all(part in value for part in smallest) and all(part in largest for part in value)
    chosen(
        "rules.method", method, (*METHODS, "approx:0.1", "re", "range.te", *CONTAINERS, "spreadsheet_range")
    )
    return False


def _number(value: Any) -> float:
    try:
        return float(value)
    except ValueError:
        return float("nan")  # no distance to it is small enough
