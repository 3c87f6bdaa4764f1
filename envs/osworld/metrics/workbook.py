"""An XLSX file as tables are compared by: values as they are stored, styles, and what lies upon a sheet.

Invariants: a number is a float, also where its cell shows a date or a duration (its serial number); an error
and a formula's cached result are what the program wrote last, for nothing is calculated here.
"""

from __future__ import annotations

import datetime as dt
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import openpyxl
from openpyxl.cell.cell import MergedCell
from openpyxl.utils.datetime import to_excel

from .reading import opened, text_of
from .registry import chosen

_MAIN = "{http://schemas.openxmlformats.org/spreadsheetml/2006/main}"
_RELATION = "{http://schemas.openxmlformats.org/officeDocument/2006/relationships}"
_X14 = "{http://schemas.microsoft.com/office/spreadsheetml/2009/9/main}"
_XM = "{http://schemas.microsoft.com/office/excel/2006/main}"
MAX_CELLS = 2_000_000


@dataclass(frozen=True)
class Workbook:
    """One file, opened when something is asked of it. `Unreadable` then, where it is no workbook."""

    path: str

    @cached_property
    def formatted(self) -> Any:
        """The workbook with formulas and styles."""
        return opened(self.path, openpyxl.load_workbook)

    @cached_property
    def computed(self) -> Any:
        """The workbook with the values that formulas had."""
        return opened(self.path, lambda path: openpyxl.load_workbook(path, data_only=True))

    @property
    def names(self) -> list[str]:
        return list(self.formatted.sheetnames)

    def sheet(self, name: str) -> Any:
        """The sheet with formulas and styles. KeyError where there is none."""
        return self.formatted[name]

    def value(self, name: str, coordinate: str) -> Any:
        """A float, a text, or None. KeyError for a sheet there is none of."""
        return self._stored(self.computed[name][coordinate].value)

    def rows(self, name: str) -> list[list[Any]]:
        """All values, without empty rows at the bottom and empty columns at the right."""
        sheet = self.computed[name]
        if sheet.max_row * sheet.max_column > MAX_CELLS:
            raise ValueError(f"sheet {name} has more than {MAX_CELLS} cells")
        rows = [[self._stored(value) for value in row] for row in sheet.iter_rows(values_only=True)]
        while rows and not any(value is not None for value in rows[-1]):
            rows.pop()
        width = max((i + 1 for row in rows for i, value in enumerate(row) if value is not None), default=0)
        return [row[:width] for row in rows]

    def printed(self, name: str) -> list[str]:
        """Lines of the CSV file BOOK-SHEET.csv beside the workbook, stripped, no empty ones at the end."""
        lines = [
            line.strip() for line in text_of(f"{Path(self.path).with_suffix('')}-{name}.csv").splitlines()
        ]
        while lines and not lines[-1]:
            lines.pop()
        return lines

    def sparklines(self, name: str) -> dict[str, str]:
        """Cell -> the range it draws. openpyxl does not read them."""

        def read(path: str) -> dict[str, str]:
            with zipfile.ZipFile(path) as archive:
                lines = list(_part(archive, _sheet_part(archive, name)).iter(f"{_X14}sparkline"))
            return {line.findtext(f"{_XM}sqref", ""): line.findtext(f"{_XM}f", "") for line in lines}

        return opened(self.path, read)

    def _stored(self, value: Any) -> Any:
        if isinstance(value, dt.date | dt.time | dt.timedelta):
            value = to_excel(value, self.computed.epoch)
        return float(value) if isinstance(value, int | float) else value


def _part(archive: zipfile.ZipFile, name: str) -> ElementTree.Element:
    with archive.open(name) as part:
        return ElementTree.parse(part).getroot()


def _sheet_part(archive: zipfile.ZipFile, name: str) -> str:
    """The file of a sheet: the workbook has its relation, and the relations where that leads."""
    sheets = _part(archive, "xl/workbook.xml").iter(f"{_MAIN}sheet")
    relation = next(sheet.get(f"{_RELATION}id") for sheet in sheets if sheet.get("name") == name)
    relations = {
        link.get("Id"): link.get("Target", "") for link in _part(archive, "xl/_rels/workbook.xml.rels")
    }
    target = relations[relation]
    return target.lstrip("/") if target.startswith("/") else f"xl/{target}"


def last_row(path: str) -> list[str]:
    """The last row of the first sheet, as texts; a whole number without its point."""
    workbook = Workbook(path)
    rows = workbook.rows(workbook.names[0])
    last = rows[-1] if rows else []
    return [
        str(int(value)) if isinstance(value, float) and value.is_integer() else str(value) for value in last
    ]


def style(cell: Any, name: str) -> Any:
    """A property of a cell's look; None where an empty cell has none."""
    return STYLES[chosen("props", name, STYLES)](cell)


def _filled(read: Any) -> Any:
    """Read from a cell that has a value; the others' looks cannot be seen."""
    return lambda cell: read(cell) if cell.value is not None else None


STYLES: Mapping[str, Any] = {
    "number_format": lambda cell: (
        cell.number_format if cell.value is not None and cell.data_type == "n" else None
    ),
    "font_name": _filled(lambda cell: cell.font.name),
    "font_family": _filled(lambda cell: cell.font.family),
    "font_color": _filled(lambda cell: cell.font.color.rgb if cell.font.color else None),
    "font_bold": _filled(lambda cell: bool(cell.font.bold)),
    "font_italic": _filled(lambda cell: bool(cell.font.italic)),
    "font_underline": _filled(lambda cell: cell.font.underline),
    "font_size": _filled(lambda cell: cell.font.size),
    "fill_type": lambda cell: cell.fill.tagname,
    "bgcolor": lambda cell: cell.fill.fgColor.rgb,
    "fgcolor": lambda cell: cell.fill.fgColor.rgb,
    "hyperlink": _filled(lambda cell: (cell.hyperlink.target or "") if cell.hyperlink else ""),
    "merge": lambda cell: isinstance(cell, MergedCell),
}
