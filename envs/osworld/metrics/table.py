"""compare_table and compare_csv: whether a workbook is as the task wants it.

A task's `rules` are looked at in order until one fails. In them a sheet is named by `sheet_idx`: 0 or "RI0",
the result's first sheet; "RNData", the result's sheet Data; "EI0" and "ENData", those of the expected
workbook.

One thing is judged more strictly than by OSWorld: a conditional format is the same where its rule is
(condition, cells and look), not where it happens to colour the same cells, for that takes an interpreter of
formulas.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import openpyxl
from openpyxl.utils import get_column_letter
from openpyxl.worksheet.cell_range import MultiCellRange

from ....errors import ConfigError
from .reading import similarity, text_of
from .registry import METRICS, chosen
from .rule_values import obeys
from .sheet_objects import charts, columns, filters, pivots, rows
from .workbook import Workbook, style

Rule = Mapping[str, Any]
NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")
NOTHING = {"", "#N/A", "N/A", "NA", "n/a", "<NA>", "NaN", "nan", "-NaN", "-nan", "NULL", "null", "None"}


@dataclass(frozen=True, slots=True)
class Books:
    """The two workbooks; `expected` is None where the task compares with values only."""

    result: Workbook
    expected: Workbook | None

    def sheet(self, index: int | str) -> tuple[Workbook, str]:
        """The book and the name of the sheet meant. LookupError where it has no such sheet."""
        text = f"RI{index}" if isinstance(index, int) else index
        kind, rest = chosen("sheet_idx", text[:2], ("RI", "RN", "EI", "EN")), text[2:]
        book = self.result if kind[0] == "R" else self.expected
        if book is None:
            remedy = "The task has no expected workbook: name one as evaluator.expected, or write RI or RN."
            raise ConfigError(source="OSWorld task", key="sheet_idx", value=index, remedy=remedy)
        name = rest if kind[1] == "N" else book.names[int(rest)]
        if name not in book.names:
            raise LookupError(f"there is no sheet {name!r}")
        return book, name

    def both(self, rule: Rule) -> tuple[tuple[Workbook, str], tuple[Workbook, str]]:
        """The sheets `sheet_idx0` and `sheet_idx1`."""
        return self.sheet(rule["sheet_idx0"]), self.sheet(rule["sheet_idx1"])


@METRICS.add("compare_table")
def compare_table(result: str | None, expected: str | None = None, *, rules: Sequence[Rule]) -> float:
    """1.0 where every rule holds."""
    for rule in rules:
        chosen("rules.type", rule["type"], RULES)
    if not result:
        return 0.0
    books = Books(Workbook(result), Workbook(expected) if expected else None)
    try:
        return float(all(RULES[rule["type"]](books, rule) for rule in rules))
    except LookupError:  # the agent has removed or renamed a sheet
        return 0.0


@METRICS.add("compare_csv")
def compare_csv(
    result: str | None, expected: str | Sequence[str], *, strict: bool = True, ignore_case: bool = False
) -> float:
    """The lines are those of an expected file; without `strict`, but for blanks at their ends."""
    if result is None:
        return 0.0

    def lines(path: str) -> list[str]:
        text = text_of(path).lower() if ignore_case else text_of(path)
        return text.splitlines() if strict else [line.strip() for line in text.splitlines()]

    golds = [expected] if isinstance(expected, str) else expected
    return float(any(lines(result) == lines(gold) for gold in golds))


def _sheet_name(books: Books, rule: Rule) -> bool:
    return books.expected is not None and books.result.names == books.expected.names


def _sheet_data(books: Books, rule: Rule) -> bool:
    """The values, numbers to `precision` digits behind the point (4); the first row, the names, as it is."""
    digits = int(rule.get("precision", 4))
    one, other = (book.rows(name) for book, name in books.both(rule))
    return one[:1] == other[:1] and _rounded(one[1:], digits) == _rounded(other[1:], digits)


def _rounded(rows: list[list[Any]], digits: int) -> list[list[Any]]:
    return [[_datum(value, digits) for value in row] for row in rows]


def _datum(value: Any, digits: int) -> Any:
    """A number that is stored as a text is that number, and a word for nothing is nothing, as in pandas."""
    if isinstance(value, str):
        if value in NOTHING:
            return None
        value = float(value) if NUMBER.fullmatch(value) else value
    return round(value, digits) if isinstance(value, float) else value


def _sheet_print(books: Books, rule: Rule) -> bool:
    """What is shown, as the CSV files that the task has had written."""
    (one, first), (other, second) = books.both(rule)
    try:
        shown = one.printed(first)
    except FileNotFoundError:
        return False
    lines = [shown, other.printed(second)]
    if rule.get("ignore_case", False):
        lines = [[line.lower() for line in side] for side in lines]
    return lines[0] == lines[1]


def _sheet_fuzzy(books: Books, rule: Rule) -> bool:
    """Cell by cell in each part's `range`, after its trimming and replacing."""
    for part in rule["rules"]:
        for cells in MultiCellRange(part["range"]).ranges:
            for row, column in cells.cells:
                at = f"{get_column_letter(column)}{row}"
                texts = [_trimmed(str(book.value(name, at)), part) for book, name in books.both(rule)]
                if not _alike(texts[0], texts[1], part):
                    return False
    return True


def _trimmed(text: str, part: Rule) -> str:
    for old, new in part.get("normalization", []):
        text = text.replace(old, new)
    if "trim_leadings" in part:
        text = text.lstrip(part["trim_leadings"])
    if "trim_trailings" in part:
        text = text.rstrip(part["trim_trailings"])
    text = "".join(char for char in text if char not in part.get("ignore_chars", ""))
    return text.lower() if part.get("ignore_case", False) else text


def _alike(one: str, other: str, part: Rule) -> bool:
    kinds: dict[str, Callable[[], bool]] = {
        "includes": lambda: other in one,
        "included_by": lambda: one in other,
        "fuzzy_match": lambda: similarity(one, other) * 100 >= part.get("threshold", 85.0),
        "exact_match": lambda: one == other,
    }
    return kinds[chosen("rules.rules.type", part["type"], kinds)]()


def _sparkline(books: Books, rule: Rule) -> bool:
    (one, first), (other, second) = books.both(rule)
    return one.sparklines(first) == other.sparklines(second)


def _style(books: Books, rule: Rule) -> bool:
    """Cell by cell the looks in `props`, and the conditional formats."""
    looks = [_looks(book.sheet(name), rule["props"]) for book, name in books.both(rule)]
    return looks[0] == looks[1]


def _looks(sheet: Any, props: Sequence[str]) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
    blank = [style(openpyxl.Workbook().active["A1"], name) for name in props]
    # Only the cells that the file has: one far away makes a sheet of millions.
    looks = {cell.coordinate: [style(cell, name) for name in props] for cell in sheet._cells.values()}
    conditional: dict[str, list[Any]] = {}
    for formats in sheet.conditional_formatting:
        for rule in formats.rules:
            look = (rule.type, rule.operator, tuple(rule.formula), rule.text, repr(rule.dxf))
            conditional.setdefault(str(formats.sqref), []).append(look)
    return {at: look for at, look in looks.items() if look != blank}, conditional


def _freeze(books: Books, rule: Rule) -> bool:
    panes = [book.sheet(name).freeze_panes for book, name in books.both(rule)]
    return bool(panes[0] == panes[1])


def _zoom(books: Books, rule: Rule) -> bool:
    book, name = books.sheet(rule["sheet_idx"])
    return obeys(book.sheet(name).sheet_view.zoomScale or 100.0, rule)


def _data_validation(books: Books, rule: Rule) -> bool:
    """Every validation of the sheet obeys one entry of `dv_props`, and there are as many."""
    book, name = books.sheet(rule["sheet_idx"])
    validations = book.sheet(name).data_validations.dataValidation
    return len(validations) >= len(rule["dv_props"]) and all(
        any(
            all(obeys(getattr(found, prop), wanted) for prop, wanted in entry.items())
            for entry in rule["dv_props"]
        )
        for found in validations
    )


def _check_cell(books: Books, rule: Rule) -> bool:
    """The cell's `value` and looks obey `props`."""
    book, name = books.sheet(rule["sheet_idx"])
    at = rule["coordinate"]
    for prop, wanted in rule["props"].items():
        found = book.value(name, at) if prop == "value" else style(book.sheet(name)[at], prop)
        if not obeys(found, wanted):
            return False
    return True


def _objects(read: Callable[[Any, Rule], Any]) -> Callable[[Books, Rule], bool]:
    """What lies on both sheets is the same, as far as the rule asks."""

    def same(books: Books, rule: Rule) -> bool:
        found = [read(book.sheet(name), rule) for book, name in books.both(rule)]
        return bool(found[0] == found[1])

    return same


RULES: Mapping[str, Callable[[Books, Rule], bool]] = {
    "sheet_name": _sheet_name,
    "sheet_data": _sheet_data,
    "sheet_print": _sheet_print,
    "sheet_fuzzy": _sheet_fuzzy,
    "sparkline": _sparkline,
    "chart": _objects(charts),
    "style": _style,
    "freeze": _freeze,
    "zoom": _zoom,
    "data_validation": _data_validation,
    "row_props": _objects(rows),
    "col_props": _objects(columns),
    "filter": _objects(filters),
    "pivot_table": _objects(pivots),
    "check_cell": _check_cell,
}
