"""What lies on a sheet beside values and looks: charts, pivot tables, filters, rows and columns.

Each function takes a sheet and a rule of the task, and returns what is to be equal.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from openpyxl.utils import coordinate_to_tuple

from .registry import chosen

Rule = Mapping[str, Any]


def charts(sheet: Any, rule: Rule) -> dict[str, dict[str, Any]]:
    """The data of each chart -> its properties in `chart_props`."""
    props = [chosen("rules.chart_props", name, CHART_PROPS) for name in rule.get("chart_props", [])]
    return {
        ";".join(f"{_reference(series.val)},{_reference(series.cat)}" for series in chart.series): {
            name: CHART_PROPS[name](chart) for name in props
        }
        for chart in sheet._charts
    }


def _reference(data: Any) -> str:
    """The range that a series takes its values or names from."""
    found = (_below(data, kind, "f") for kind in ("numRef", "strRef"))
    return next((str(reference) for reference in found if reference is not None), "")


def _title(titled: Any) -> str | None:
    """The first run of a title; None where there is none."""
    paragraphs = _below(titled, "title", "tx", "rich", "p") or []
    return next((run.t for paragraph in paragraphs for run in paragraph.r or []), None)


def _anchor(chart: Any) -> list[Any]:
    """What it moves with, its first column, its last column and row; its first row is free, as in OSWorld."""
    places = (("_from", "col"), ("to", "col"), ("to", "row"))
    return [_below(chart.anchor, "editAs"), *(_below(chart.anchor, *place) for place in places)]


def _below(found: Any, *names: str) -> Any:
    """What these attributes lead to; None where a chart of this kind does not have one of them."""
    for name in names:
        if not hasattr(found, name):
            return None
        found = getattr(found, name)
    return found


CHART_PROPS: Mapping[str, Callable[[Any], Any]] = {
    "title": _title,
    "legend": lambda chart: _below(chart, "legend", "position"),
    "anchor": _anchor,
    "width": lambda chart: chart.width,
    "height": lambda chart: chart.height,
    "type": lambda chart: chart.tagname,
    "direction": lambda chart: _below(chart, "barDir"),
    "xtitle": lambda chart: _title(_below(chart, "x_axis")),
    "ytitle": lambda chart: _title(_below(chart, "y_axis")),
    "ztitle": lambda chart: _title(_below(chart, "z_axis")),
}


def pivots(sheet: Any, rule: Rule) -> dict[str, dict[str, Any]]:
    """The source of each pivot table -> its properties in `pivot_props`.

    Columns of the source that no field uses, at its ends, do not count: programs differ in how wide it is.
    """
    return dict(_pivot(pivot, frozenset(rule.get("pivot_props", []))) for pivot in sheet._pivots)


def _pivot(pivot: Any, props: frozenset[str]) -> tuple[str, dict[str, Any]]:
    fields = [[(item.h, item.x) for item in field.items if item.x is not None] for field in pivot.pivotFields]
    used = [index for index, field in enumerate(fields) if field]
    left, right = (used[0], len(fields) - 1 - used[-1]) if used else (len(fields), 0)
    selection = fields[left : len(fields) - right]
    source = pivot.cache.cacheSource
    start, end = (coordinate_to_tuple(corner) for corner in source.worksheetSource.ref.split(":"))
    corners = f"{(start[0], start[1] + left)}:{(end[0], end[1] - right)}"

    def data_field(field: Any) -> str:
        name = field.name if "data_fields_name" in props else ""
        return f"{field.fld - left};{name};{field.subtotal};{field.showDataAs}"

    read: dict[str, Callable[[], Any]] = {
        "name": lambda: pivot.name,
        "show_total": lambda: pivot.visualTotals,
        "show_empty_row": lambda: pivot.showEmptyRow,
        "show_empty_col": lambda: pivot.showEmptyCol,
        "show_headers": lambda: pivot.showHeaders,
        "location": lambda: pivot.location,
        "selection": lambda: selection if "ordered" in props else [set(field) for field in selection],
        "filter": lambda: ([set(field) for field in selection], {field.fld for field in pivot.pageFields}),
        "col_fields": lambda: [field.x - left for field in pivot.colFields],
        "row_fields": lambda: [field.x - left for field in pivot.rowFields],
        "data_fields": lambda: [data_field(field) for field in pivot.dataFields],
    }
    found = {name: value() for name, value in read.items() if name in props}
    return f"{source.type};{corners};{source.worksheetSource.sheet}", found


def filters(sheet: Any, rule: Rule) -> tuple[Any, ...]:
    """The range of the sheet's filter, what each column lets through, and how the rows are sorted."""
    found = sheet.auto_filter
    columns = sorted(
        (_filter_column(column) for column in found.filterColumn), key=lambda entry: entry["col_id"]
    )
    order = found.sortState
    keys = ("columnSort", "caseSensitive", "sortMethod", "ref")
    sort = [getattr(order, key) for key in keys] if order is not None else None
    conditions = [(c.descending, c.sortBy, c.ref, c.customList) for c in order.sortCondition] if order else []
    return found.ref, columns, sort, conditions


def _filter_column(column: Any) -> dict[str, Any]:
    found = {"col_id": column.colId, "hidden": column.hiddenButton, "shown": column.showButton}
    if column.filters is not None:
        found["filters"] = (column.filters.blank, set(column.filters.filter))
    if column.customFilters is not None:
        custom = column.customFilters
        found["custom"] = (custom._and, {(part.operator, part.val) for part in custom.customFilter})
    return found


def rows(sheet: Any, rule: Rule) -> dict[Any, dict[str, Any]]:
    """Row -> its properties in `props` (hidden, height, ...)."""
    return _dimensions(sheet.row_dimensions, rule)


def columns(sheet: Any, rule: Rule) -> dict[Any, dict[str, Any]]:
    """Column -> its properties in `props` (hidden, width, ...)."""
    return _dimensions(sheet.column_dimensions, rule)


def _dimensions(dimensions: Mapping[Any, Any], rule: Rule) -> dict[Any, dict[str, Any]]:
    return {
        key: {prop: getattr(found, prop) for prop in rule.get("props", [])}
        for key, found in dimensions.items()
    }
