"""OSWorld's metrics: each scores what is right, refuses what is wrong, and survives what is odd.

Files are made here by the libraries that read them; a damaged one is bytes that are no such file.
"""

from __future__ import annotations

import datetime as dt
import io
import json
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import docx
import numpy as np
import openpyxl
import pptx
import pytest
import xlsxwriter
from docx.enum.text import WD_BREAK, WD_PARAGRAPH_ALIGNMENT
from openpyxl.formatting.rule import CellIsRule
from openpyxl.pivot import cache as pivot
from openpyxl.pivot import record as pivot_records
from openpyxl.pivot import table as pivot_table
from openpyxl.styles import Font, PatternFill
from openpyxl.worksheet.datavalidation import DataValidation
from PIL import Image, ImageEnhance, ImageOps
from pptx.dml.color import RGBColor
from pptx.enum.text import PP_ALIGN
from pptx.util import Inches, Pt
from pypdf import PdfWriter
from pypdf.generic import DecodedStreamObject, DictionaryObject, NameObject
from rz_agent.envs.osworld.metrics import METRICS
from rz_agent.envs.osworld.metrics.images import structural_similarity
from rz_agent.envs.osworld.metrics.reading import Unreadable
from rz_agent.envs.osworld.metrics.rule_values import obeys
from rz_agent.errors import ConfigError

Save = Callable[[str, Any], str]
FIXTURES = Path(__file__).parent / "fixtures"


@pytest.fixture
def save(tmp_path: Path) -> Save:
    """Write a text, bytes, a JSON value or a library's document; returns the path."""

    def write(name: str, content: Any) -> str:
        path = tmp_path / name
        if isinstance(content, bytes):
            path.write_bytes(content)
        elif hasattr(content, "save"):
            content.save(path)
        else:
            path.write_text(content if isinstance(content, str) else json.dumps(content))
        return str(path)

    return write


# --- values -------------------------------------------------------------------------------------------------


def cases(name: str) -> list[dict[str, Any]]:
    """Rows of a fixture: for each metric what is right, what is wrong, what is odd."""
    return [json.loads(line) for line in (FIXTURES / f"{name}.jsonl").read_text().splitlines()]


def score(metric: str, result: Any, expected: Any = None, **options: Any) -> float:
    values = [result] if expected is None else [result, expected]
    return METRICS[metric](*values, **options)


@pytest.mark.parametrize(
    "case", cases("osworld_values"), ids=lambda case: f"{case['metric']}-{case['score']}"
)
def test_a_value_is_scored(case: dict[str, Any]) -> None:
    assert score(case["metric"], case["result"], case["expected"], **case["options"]) == case["score"]


# --- files of text ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", cases("osworld_texts"), ids=lambda case: f"{case['metric']}-{case['score']}")
def test_a_file_of_text_is_scored(save: Save, case: dict[str, Any]) -> None:
    file = save("file", case["file"].encode(case.get("encoding", "utf-8")))
    assert score(case["metric"], file, case["expected"]) == case["score"]


@pytest.mark.parametrize(
    ("metric", "one", "other", "options", "right"),
    [
        ("compare_text_file", "a  b\n", "A b", {"ignore_blanks": True, "ignore_case": True}, 1),
        ("compare_text_file", "a b", "a b\n", {}, 0),
        ("diff_text_file", "a\nb\n", "a\nc\n", {}, 0.5),
        ("compare_csv", "a,b \n", "A,b\n", {"strict": False, "ignore_case": True}, 1),
        ("compare_csv", "a,b \n", "a,b\n", {}, 0),
        ("compare_python_pure_text", "#!/bin/python\n\nif a:\n\tb\n", "if a:\n    b", {}, 1),
        ("compare_python_pure_text", "```\nif a:\n    b", "if a:\n    b", {}, 0),
        ("is_included_all_json_objects", {"a": 1}, {"a": 1, "b": 2}, {}, 1),
        ("is_included_all_json_objects", {"a": 1}, [], {}, 0),
    ],
)
def test_two_files_of_text_are_compared(
    save: Save, metric: str, one: Any, other: Any, options: dict[str, Any], right: float
) -> None:
    assert score(metric, save("one", one), save("other", other), **options) == right
    assert score(metric, None, save("other", other), **options) == 0


# --- rules for values ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "method", "ref", "right"),
    [
        (191.6667, "approx:0.001", 191.66671, True),
        ("191.7", "approx:0.001", 191.6667, False),
        ("eight", "approx:0.001", 8, False),
        ("Cell A", "re.I", "^cell", True),
        (None, "re", ".*", False),
        (2, "range.te", [0, 2], True),
        (0, "range.te", [0, 2], False),
        ("text", "lt", 3, False),
        ('"Pass,Fail"', "str_list_eq", ["Pass", "Fail"], True),
        ('"Fail,Pass"', "str_list_eq", ["Pass", "Fail"], False),
        ('"Fail,Pass"', "str_set_eq", ["Pass", "Fail"], True),
    ],
)
def test_a_rule_says_what_a_value_must_be(value: Any, method: str, ref: Any, right: bool) -> None:
    assert obeys(value, {"method": method, "ref": ref}) is right


def test_a_method_that_nobody_knows_is_the_tasks_fault() -> None:
    with pytest.raises(ConfigError, match=r"rules\.method = 'aprox:1'"):
        obeys(1, {"method": "aprox:1", "ref": 1})


# --- tables -------------------------------------------------------------------------------------------------


def table() -> Any:
    """Two sheets: names and numbers; nothing."""
    book = openpyxl.Workbook()
    sheet = book.active
    sheet.title = "Data"
    for row in (["Name", "Hours"], ["Ann", 191.66671], ["Bob", 8]):
        sheet.append(row)
    book.create_sheet("Empty")
    return book


def changed(change: Callable[[Any, Any], object]) -> Any:
    """The table after a change to the book and its first sheet."""
    book = table()
    change(book, book["Data"])
    return book


def validated(book: Any, sheet: Any) -> None:
    rule = DataValidation(type="list", formula1='"Pass,Fail"')
    rule.add("C2:C9")
    sheet.add_data_validation(rule)


def coloured(book: Any, sheet: Any) -> None:
    fill = PatternFill(bgColor="FFFF0000")
    sheet.conditional_formatting.add("B2:B9", CellIsRule(operator="greaterThan", formula=["60"], fill=fill))


def charted(book: Any, sheet: Any) -> None:
    chart = openpyxl.chart.BarChart()
    chart.title = "Hours"
    chart.add_data(openpyxl.chart.Reference(sheet, min_col=2, min_row=2, max_row=3))
    sheet.add_chart(chart, "D2")


def filtered(book: Any, sheet: Any) -> None:
    sheet.auto_filter.ref = "A1:B3"
    sheet.auto_filter.add_filter_column(0, ["Ann"])


def pivoted(book: Any, sheet: Any) -> None:
    """The sum of Hours by Name."""
    source = pivot.CacheSource(
        type="worksheet", worksheetSource=pivot.WorksheetSource(ref="A1:B3", sheet="Data")
    )
    names = [pivot.CacheField(name=name, sharedItems=pivot.SharedItems()) for name in ("Name", "Hours")]
    cache = pivot.CacheDefinition(cacheSource=source, cacheFields=names, id="rId1")
    cache.records = pivot_records.RecordList()
    rows = pivot_table.PivotField(
        axis="axisRow", items=[pivot_table.FieldItem(x=index) for index in range(2)]
    )
    found = pivot_table.TableDefinition(
        name="Pivot",
        cacheId=1,
        dataCaption="Values",
        location=pivot_table.Location(ref="D1:E4", firstHeaderRow=1, firstDataRow=1, firstDataCol=1),
        pivotFields=[rows, pivot_table.PivotField(dataField=True)],
        rowFields=[pivot_table.RowColField(x=0)],
        dataFields=[pivot_table.DataField(fld=1, name="Sum", subtotal="sum")],
    )
    found.cache = cache
    sheet.add_pivot(found)


BOTH = {"sheet_idx0": 0, "sheet_idx1": "EI0"}
BY_NAME = {"type": "sheet_data", "sheet_idx0": "RNData", "sheet_idx1": "ENData"}
TRIMMED = {"type": "fuzzy_match", "ignore_case": True, "trim_leadings": "+ ", "threshold": 85}
LIST = {
    "type": {"method": "eq", "ref": "list"},
    "formula1": {"method": "str_set_eq", "ref": ["Fail", "Pass"]},
}
VALIDATION = {"type": "data_validation", "sheet_idx": 0, "dv_props": [LIST]}
RED = {"font_color": {"method": "eq", "ref": "FFFF0000"}}


def fuzzy(rule: dict[str, Any]) -> dict[str, Any]:
    return {"type": "sheet_fuzzy", **BOTH, "rules": [{"range": ["A2:A3"], **rule}]}


def both(kind: str, *props: str) -> dict[str, Any]:
    return {"type": kind, **BOTH, "props": list(props), "chart_props": list(props)}


def cell(**props: Any) -> dict[str, Any]:
    return {"type": "check_cell", "sheet_idx": 0, "coordinate": "B2", "props": props}


def zoom(method: str, ref: float) -> dict[str, Any]:
    return {"type": "zoom", "sheet_idx": 0, "method": method, "ref": ref}


def value(method: str, ref: float) -> dict[str, Any]:
    return cell(value={"method": method, "ref": ref})


# what the agent made of the table, the rule against the untouched table, score
TABLES: list[tuple[Callable[[Any, Any], object], dict[str, Any], float]] = [
    (lambda b, s: None, {"type": "sheet_name"}, 1),
    (lambda b, s: b.create_sheet("More"), {"type": "sheet_name"}, 0),
    (lambda b, s: s.cell(2, 2, 191.666712), both("sheet_data"), 1),
    (lambda b, s: s.cell(2, 2, 191.7), both("sheet_data"), 0),
    (lambda b, s: s.cell(2, 2, "191.66671"), both("sheet_data"), 1),
    (lambda b, s: s.cell(1, 2, "hours"), both("sheet_data"), 0),
    (lambda b, s: b.remove(s), BY_NAME, 0),
    (lambda b, s: s.cell(2, 1, "+ anne"), fuzzy(TRIMMED), 1),
    (lambda b, s: s.cell(2, 1, "Kim"), fuzzy({"type": "includes"}), 0),
    (lambda b, s: setattr(s["A2"], "font", Font(bold=True)), both("style", "font_italic", "bgcolor"), 1),
    (lambda b, s: setattr(s["A2"], "font", Font(bold=True)), both("style", "font_bold"), 0),
    (coloured, both("style", "font_bold"), 0),
    (lambda b, s: setattr(s, "freeze_panes", "A2"), both("freeze"), 0),
    (lambda b, s: None, both("freeze"), 1),
    (lambda b, s: setattr(s.sheet_view, "zoomScale", 260), zoom("eq", 260), 1),
    (lambda b, s: None, zoom("gt", 100), 0),
    (validated, VALIDATION, 1),
    (lambda b, s: None, VALIDATION, 0),
    (lambda b, s: setattr(s.row_dimensions[2], "hidden", True), both("row_props", "hidden"), 0),
    (lambda b, s: setattr(s.column_dimensions["A"], "width", 40), both("col_props", "width"), 0),
    (lambda b, s: None, both("col_props", "width"), 1),
    (filtered, both("filter"), 0),
    (charted, both("chart", "type", "title"), 0),
    (lambda b, s: None, both("pivot_table"), 1),
    (pivoted, both("pivot_table"), 0),
    (lambda b, s: None, both("sparkline"), 1),
    (lambda b, s: None, value("approx:0.001", 191.6667), 1),
    (lambda b, s: s.cell(2, 2, dt.timedelta(hours=12)), value("eq", 0.5), 1),
    (lambda b, s: setattr(s["B2"], "value", None), value("gt", 0), 0),
    (lambda b, s: setattr(s["B2"], "font", Font(color="FFFF0000")), cell(**RED), 1),
]


@pytest.mark.parametrize(("change", "rule", "right"), TABLES)
def test_a_workbook_obeys_a_rule_or_not(
    save: Save, change: Callable[[Any, Any], object], rule: dict[str, Any], right: float
) -> None:
    result, expected = save("result.xlsx", changed(change)), save("gold.xlsx", table())
    assert score("compare_table", result, expected, rules=[rule]) == right


@pytest.mark.parametrize("change", [coloured, charted, filtered, validated, pivoted])
def test_workbooks_that_were_changed_alike_are_the_same(save: Save, change: Any) -> None:
    result, expected = save("result.xlsx", changed(change)), save("gold.xlsx", changed(change))
    everything = {
        "chart_props": ["type", "title", "legend", "anchor", "direction", "xtitle"],
        "pivot_props": ["name", "location", "filter", "selection", "row_fields", "data_fields"],
        "props": ["bgcolor"],
    }
    rules = [{"type": kind, **BOTH, **everything} for kind in ("chart", "filter", "style", "pivot_table")]
    assert score("compare_table", result, expected, rules=rules) == 1


@pytest.mark.filterwarnings("ignore:Sparkline Group extension")
def test_sparklines_are_those_of_the_sheet_by_its_name(save: Save, tmp_path: Path) -> None:
    def sparkling(name: str, cells: str) -> str:
        with xlsxwriter.Workbook(tmp_path / name) as book:
            book.add_worksheet("Data").write_row("A1", [3, 1, 2])
            book.add_worksheet("Lines").add_sparkline("D1", {"range": cells})
        return str(tmp_path / name)

    pairs = {"1.xlsx": "Data!A1:C1", "2.xlsx": "Data!A1:C1", "3.xlsx": "Data!A1:B1"}
    one, same, other = (sparkling(*pair) for pair in pairs.items())
    rule = {"type": "sparkline", "sheet_idx0": "RNLines", "sheet_idx1": "ENLines"}
    assert score("compare_table", one, same, rules=[rule]) == 1
    assert score("compare_table", one, other, rules=[rule]) == 0


def test_the_first_rule_that_fails_ends_it_and_values_alone_need_no_expected_file(save: Save) -> None:
    result = save("result.xlsx", table())
    right, wrong, gold = zoom("eq", 100.0), zoom("eq", 90), {**zoom("eq", 100.0), "sheet_idx": "EI0"}
    assert score("compare_table", result, rules=[right, right]) == 1
    assert score("compare_table", result, rules=[wrong, gold]) == 0
    with pytest.raises(ConfigError, match="no expected workbook"):
        score("compare_table", result, rules=[gold])


def test_what_a_table_shows_is_compared_by_the_csv_files_beside_it(save: Save) -> None:
    result, expected = save("result.xlsx", table()), save("gold.xlsx", table())
    rule = {"type": "sheet_print", "sheet_idx0": "RNData", "sheet_idx1": "ENData", "ignore_case": True}
    save("gold-Data.csv", "NAME,HOURS\nAnn,191.67\n\n")
    assert score("compare_table", result, expected, rules=[rule]) == 0
    save("result-Data.csv", "name,hours\nann,191.67")
    assert score("compare_table", result, expected, rules=[rule]) == 1


def test_a_rule_or_a_sheet_index_that_nobody_knows_is_the_tasks_fault(save: Save) -> None:
    result = save("result.xlsx", table())
    for rule, told in (
        ({"type": "sheet_dta"}, "Did you mean 'sheet_data'"),
        ({"type": "zoom", "sheet_idx": "XI0", "method": "eq", "ref": 1}, "sheet_idx = 'XI'"),
        ({"type": "style", **BOTH, "sheet_idx1": 0, "props": ["font_bolt"]}, "Did you mean 'font_bold'"),
    ):
        with pytest.raises(ConfigError, match=told):
            score("compare_table", result, rules=[rule])


# --- text documents -----------------------------------------------------------------------------------------


def text(*paragraphs: str, change: Callable[[Any], object] = lambda document: None) -> Any:
    document = docx.Document()
    for paragraph in paragraphs:
        document.add_paragraph(paragraph)
    change(document)
    return document


def odt(*paragraphs: str) -> bytes:
    text = "urn:oasis:names:tc:opendocument:xmlns:text:1.0"
    body = "".join(f"<t:p>{paragraph}</t:p>" for paragraph in paragraphs)
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        archive.writestr("content.xml", f'<o xmlns:t="{text}">{body}</o>')
    return packed.getvalue()


def double(document: Any) -> None:
    document.paragraphs[0].paragraph_format.line_spacing = 2.0


def celled(word: str) -> Callable[[Any], object]:
    return lambda document: setattr(document.add_table(1, 1).cell(0, 0), "text", word)


@pytest.mark.parametrize(
    ("one", "other", "options", "right"),
    [
        (("a  b", "c"), ("a b", "c"), {}, 1),
        (("a", "c"), ("a", "b"), {}, 0),
        (("a  b",), ("a b",), {"ignore_blanks": False}, 0),
        (("b", "a"), ("a", "b"), {"ignore_order": True}, 1),
        (("A", "", "b"), ("a", "b"), {"ignore_case": True, "delete_empty_lines": True}, 1),
        (("abcd",), ("abce",), {"content_only": True}, 0.75),
        (("abcd", "x"), ("abce", "x"), {"fuzzy_match": True, "ignore_blanks": False}, 0.875),
    ],
)
def test_documents_have_the_same_text(
    save: Save, one: Any, other: Any, options: dict[str, Any], right: float
) -> None:
    docx_files = save("one.docx", text(*one)), save("other.docx", text(*other))
    odt_files = save("one.odt", odt(*one)), save("other.odt", odt(*other))
    for files in (docx_files, odt_files):
        assert score("compare_docx_files", *files, **options) == right
    assert score("compare_docx_files", docx_files[0], odt_files[0], **options) == 0
    assert score("compare_docx_files", None, docx_files[0], **options) == 0


@pytest.mark.parametrize(
    ("metric", "change", "same"),
    [
        ("compare_line_spacing", double, 0),
        ("compare_docx_tables", celled("x"), 0),
        ("compare_init_lines", lambda d: d.add_paragraph("more"), 1),
        ("compare_docx_images", lambda d: d.add_picture(png(noise())), 0),
    ],
)
def test_documents_have_the_same_looks(
    save: Save, metric: str, change: Callable[[Any], object], same: float
) -> None:
    plain, edited = save("plain.docx", text("a", "b")), save("edited.docx", text("a", "b", change=change))
    assert score(metric, edited, edited) == 1
    assert score(metric, edited, plain) == same
    assert score(metric, None, plain) == 0


def broken(document: Any) -> None:
    document.paragraphs[0].runs[0].add_break(WD_BREAK.PAGE)


def named(document: Any) -> None:
    document.paragraphs[0].runs[0].font.name = "Times"


def centred(document: Any) -> None:
    document.paragraphs[0].alignment = WD_PARAGRAPH_ALIGNMENT.CENTER


def numbered(document: Any) -> None:
    document.sections[0].footer.paragraphs[0].text = "Page 1"


@pytest.mark.parametrize(
    ("metric", "change", "rules"),
    [
        ("contains_page_break", broken, {"page_break_count": 1}),
        ("compare_font_names", named, {"font_name": "Times"}),
        ("is_first_line_centered", centred, None),
        ("has_page_numbers_in_footers", numbered, None),
    ],
)
def test_a_document_has_a_look(save: Save, metric: str, change: Callable[[Any], object], rules: Any) -> None:
    assert score(metric, save("yes.docx", text("a", change=change)), rules) == 1
    assert score(metric, save("no.docx", text("a")), rules) == 0
    assert score(metric, None, rules) == 0


# --- presentations ------------------------------------------------------------------------------------------


def show(change: Callable[[Any, Any], object] = lambda shown, shape: None) -> Any:
    """One slide with a box of two words, after a change to the presentation and that box."""
    shown = pptx.Presentation()
    slide = shown.slides.add_slide(shown.slide_layouts[6])
    box = slide.shapes.add_textbox(Inches(1), Inches(1), Inches(4), Inches(1))
    box.text_frame.text = "two words"
    change(shown, box)
    return shown


def first(box: Any) -> Any:
    return box.text_frame.paragraphs[0]


def run_of(box: Any) -> Any:
    return first(box).runs[0]


def struck(shown: Any, box: Any) -> None:
    run_of(box).font._element.set("strike", "sngStrike")


def reddened(shown: Any, box: Any) -> None:
    fill = shown.slides[0].background.fill
    fill.solid()
    fill.fore_color.rgb = RGBColor(255, 0, 0)


def red_run(shown: Any, box: Any) -> None:
    run_of(box).font.color.rgb = RGBColor(255, 0, 0)


def blue_run(shown: Any, box: Any) -> None:
    run_of(box).font.color.rgb = RGBColor(0, 0, 255)


def bulleted(shown: Any, box: Any) -> None:
    properties = box.text_frame.paragraphs[0]._p.get_or_add_pPr()
    bullet = properties.makeelement(
        "{http://schemas.openxmlformats.org/drawingml/2006/main}buChar", {"char": "•"}
    )
    properties.append(bullet)


def tabled(bold: bool) -> Callable[[Any, Any], object]:
    def change(shown: Any, box: Any) -> None:
        cell = shown.slides[0].shapes.add_table(1, 1, 0, 0, Inches(2), Inches(1)).table.cell(0, 0)
        cell.text = "cell"
        cell.text_frame.paragraphs[0].runs[0].font.bold = bold

    return change


def noted(shown: Any, box: Any) -> None:
    shown.slides[0].notes_slide.notes_text_frame.text = "say this"


# a change, the options under which it does not matter
SHOWS: list[tuple[Callable[[Any, Any], object], dict[str, bool]]] = [
    (lambda p, b: p.slides.add_slide(p.slide_layouts[6]), {"examine_number_of_slides": False}),
    (lambda p, b: setattr(b, "left", Inches(2)), {"examine_shape": False}),
    (lambda p, b: setattr(run_of(b), "text", "two"), {"examine_text": False, "examine_bullets": False}),
    (lambda p, b: setattr(first(b), "level", 1), {"examine_indent": False, "examine_bullets": False}),
    (lambda p, b: setattr(first(b), "alignment", PP_ALIGN.CENTER), {"examine_alignment": False}),
    (lambda p, b: setattr(run_of(b).font, "name", "Times"), {"examine_font_name": False}),
    (lambda p, b: setattr(run_of(b).font, "size", Pt(60)), {"examine_font_size": False}),
    (lambda p, b: setattr(run_of(b).font, "bold", True), {"examine_font_bold": False}),
    (lambda p, b: setattr(run_of(b).font, "italic", True), {"examine_font_italic": False}),
    (lambda p, b: setattr(run_of(b).font, "underline", True), {"examine_font_underline": False}),
    (struck, {"examine_strike_through": False}),
    (bulleted, {"examine_bullets": False}),
    (reddened, {"examine_background_color": False}),
    (noted, {"examine_note": False}),
]


@pytest.mark.parametrize(("change", "without"), SHOWS)
def test_presentations_differ_in_what_is_examined_and_in_nothing_else(
    save: Save, change: Callable[[Any, Any], object], without: dict[str, bool]
) -> None:
    one, other = save("one.pptx", show(change)), save("other.pptx", show())
    assert score("compare_pptx_files", one, one) == 1
    assert score("compare_pptx_files", one, other) == 0
    assert score("compare_pptx_files", one, other, **without) == 1


@pytest.mark.parametrize(
    ("change", "other", "right"),
    [
        (lambda p, b: setattr(run_of(b).font, "bold", False), lambda p, b: None, 1),
        (lambda p, b: setattr(first(b), "alignment", PP_ALIGN.LEFT), lambda p, b: None, 1),
        (lambda p, b: setattr(b, "left", Inches(1.001)), lambda p, b: None, 1),
        (red_run, blue_run, 0),
        (tabled(True), tabled(True), 1),
        (tabled(True), tabled(False), 0),
        (lambda p, b: p.slides[0].shapes.add_group_shape(), lambda p, b: None, 0),
    ],
)
def test_what_saving_writes_out_is_no_difference_and_a_colour_or_a_table_is(
    save: Save, change: Any, other: Any, right: float
) -> None:
    assert (
        score("compare_pptx_files", save("one.pptx", show(change)), save("other.pptx", show(other))) == right
    )


def test_an_option_of_a_comparison_that_nobody_knows_is_the_tasks_fault(save: Save) -> None:
    one = save("one.pptx", show())
    with pytest.raises(ConfigError, match="Did you mean 'examine_shape'"):
        score("compare_pptx_files", one, one, examine_shapes=False)


def test_a_picture_that_fills_its_slide_is_told_from_one_that_does_not(save: Save) -> None:
    def pictured(*place: float) -> Any:
        shown = pptx.Presentation()
        slide = shown.slides.add_slide(shown.slide_layouts[6])
        slide.shapes.add_picture(png(noise()), *(Inches(side) for side in place))
        return shown

    original = save("original.pptx", pictured(1, 1, 2, 2))
    stretched, high = save("full.pptx", pictured(0, 0, 10, 7.5)), save("high.pptx", pictured(0, 3, 10, 7.5))
    assert score("check_image_stretch_and_center", stretched, original) == 1
    assert score("check_image_stretch_and_center", high, original) == 0
    assert score("check_image_stretch_and_center", save("none.pptx", show()), original) == 0


def test_a_presentation_has_a_look(save: Save) -> None:
    plain, red = save("plain.pptx", show()), save("red.pptx", show(reddened))
    upright = save("upright.pptx", show(lambda p, b: setattr(p, "slide_width", Inches(3))))
    assert [score("check_slide_orientation_Portrait", path) for path in (upright, plain, None)] == [1, 0, 0]
    fill = {"rgb": [255, 0, 0], "original_rgb": [0, 0, 255]}
    assert [
        score("evaluate_presentation_fill_to_rgb_distance", path, fill) for path in (red, plain, None)
    ] == [1, 0, 0]
    place = {"slide_index_s": [0], "shape_index_s": [0], "paragraph_index_s": [0]}
    line = save("struck.pptx", show(struck))
    assert [score("check_strikethrough", path, place) for path in (line, plain, None)] == [1, 0, 0]
    assert score("check_strikethrough", line, {**place, "shape_index_s": [7]}) == 0


def test_a_slides_transition_is_found_by_its_kind(save: Save) -> None:
    p = "http://schemas.openxmlformats.org/presentationml/2006/main"

    def moving(shown: Any, box: Any) -> None:
        slide = shown.slides[0].element
        transition = slide.makeelement(f"{{{p}}}transition", {})
        transition.append(slide.makeelement(f"{{{p}}}dissolve", {}))
        slide.append(transition)

    path = save("moving.pptx", show(moving))
    assert score("check_transition", path, {"slide_idx": 0, "transition_type": "dissolve"}) == 1
    assert score("check_transition", path, {"slide_idx": 0, "transition_type": "fade"}) == 0
    assert score("check_transition", None, {"slide_idx": 0, "transition_type": "fade"}) == 0


# --- PDF and pictures ---------------------------------------------------------------------------------------


def pdf(words: str, pages: int = 1) -> bytes:
    """A PDF file with a line of text on its first page."""
    writer, name = PdfWriter(), NameObject
    kind = {
        name("/Type"): name("/Font"),
        name("/Subtype"): name("/Type1"),
        name("/BaseFont"): name("/Helvetica"),
    }
    fonts = DictionaryObject({name("/F1"): DictionaryObject(kind)})
    line = DecodedStreamObject()
    line.set_data(f"BT /F1 12 Tf 20 50 Td ({words}) Tj ET".encode())
    first = writer.add_blank_page(300, 100)
    first[name("/Resources")] = DictionaryObject({name("/Font"): fonts})
    first[name("/Contents")] = writer._add_object(line)
    for _ in range(pages - 1):
        writer.add_blank_page(300, 100)
    written = io.BytesIO()
    writer.write(written)
    return written.getvalue()


def test_pdf_files_are_compared_by_their_text_and_counted_by_their_pages(save: Save) -> None:
    one, other, long = (
        save("1.pdf", pdf("abcd")),
        save("2.pdf", pdf("abce")),
        save("3.pdf", pdf("abcd", pages=3)),
    )
    assert score("compare_pdfs", one, long) == 1
    assert score("compare_pdfs", one, other) == 0.75
    assert score("compare_pdfs", [one, None], [one, other]) == 0.5
    assert score("check_pdf_pages", long, {"relation": "eq", "ref_value": 3}) == 1
    assert score("check_pdf_pages", long, {"relation": "lt", "ref_value": 3}) == 0
    with pytest.raises(ConfigError, match=r"rules\.relation"):
        score("check_pdf_pages", long, {"relation": "__class__", "ref_value": 3})


def noise(size: tuple[int, int] = (40, 30), seed: int = 0) -> Image.Image:
    """A picture with structure everywhere, neither dark nor bright."""
    pixels = np.random.default_rng(seed).integers(60, 190, (size[1], size[0], 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def png(image: Image.Image) -> io.BytesIO:
    written = io.BytesIO()
    image.save(written, "PNG")
    written.seek(0)
    return written


def test_structural_similarity_is_the_published_one() -> None:
    """The reference is what scikit-image 0.26 says of these two arrays."""
    ramp = np.add.outer(np.arange(12) * 7, np.arange(16) * 5).astype(np.uint8)
    one, other = Image.fromarray(ramp), Image.fromarray(ramp // 2 + 40)
    assert structural_similarity(one, one) == pytest.approx(1.0)
    assert structural_similarity(one, other) == pytest.approx(0.8178460630198273)


@pytest.mark.parametrize(
    ("metric", "edit", "right"),
    [
        ("check_brightness_decrease_and_structure_sim", lambda i: ImageEnhance.Brightness(i).enhance(0.6), 1),
        ("check_brightness_decrease_and_structure_sim", lambda i: ImageEnhance.Brightness(i).enhance(1.2), 0),
        ("check_brightness_decrease_and_structure_sim", lambda i: Image.new("RGBA", i.size), 0),
        ("check_contrast_increase_and_structure_sim", lambda i: ImageEnhance.Contrast(i).enhance(1.5), 1),
        ("check_contrast_increase_and_structure_sim", lambda i: ImageEnhance.Contrast(i).enhance(0.5), 0),
        ("check_saturation_increase_and_structure_sim", lambda i: i, 0),
        ("check_structure_sim", lambda i: i, 1),
        ("check_structure_sim", lambda i: noise(seed=1), 0),
        ("check_structure_sim", lambda i: i.resize((5, 5)), 0),
        ("check_file_exists_and_structure_sim", lambda i: i.convert("RGBA"), 1),
        ("check_image_mirror", ImageOps.mirror, 1),
        ("check_image_mirror", lambda i: i, 0),
        ("compare_images", lambda i: i, 1),
        ("compare_images", lambda i: i.resize((3, 3)), 0),
        ("compare_image_list", lambda i: i.convert("RGBA"), 1),
        ("compare_image_list", lambda i: noise(seed=1), 0),
    ],
)
def test_a_picture_is_an_edited_other(
    save: Save, metric: str, edit: Callable[[Image.Image], Image.Image], right: float
) -> None:
    original = save("original.png", noise())
    assert score(metric, save("edited.png", edit(noise())), original) == pytest.approx(right)
    assert score(metric, None, original) == 0


def test_more_saturation_of_the_same_picture_is_found(save: Save) -> None:
    hsv = np.dstack([np.asarray(noise(seed=seed))[..., 0] for seed in range(3)])
    hsv[..., 1] //= 2
    pale = Image.fromarray(hsv, "HSV")
    hsv[..., 1] *= 2
    paths = (
        save("pale.png", pale.convert("RGB")),
        save("rich.png", Image.fromarray(hsv, "HSV").convert("RGB")),
    )
    assert score("check_saturation_increase_and_structure_sim", paths[1], paths[0]) == 1
    assert score("check_saturation_increase_and_structure_sim", *paths) == 0


def test_pictures_are_measured(save: Save) -> None:
    framed = Image.new("RGBA", (60, 50))
    framed.paste(noise().convert("RGBA"), (3, 4))
    path, seen = save("framed.png", framed), {"width": 40, "height": 30, "ignore_transparent": True}
    assert score("check_image_size", path, seen) == 1
    assert score("check_image_size", path, {"width": 40}) == 0
    assert score("check_image_size", save("empty.png", Image.new("RGBA", (9, 9))), seen) == 0
    assert score("check_image_file_size", path, {"max_size": 1 << 20}) == 1
    assert score("check_image_file_size", path, {"max_size": 10}) == 0


def test_how_far_a_picture_is_above_a_reference_is_its_score(save: Save) -> None:
    path = save("one.png", noise())
    assert score("compare_images", path, path, reference_base_result=0.5) == pytest.approx(1)
    assert score("compare_images", save("two.png", noise(seed=1)), path, reference_base_result=0.5) == 0


# --- what is no such file -----------------------------------------------------------------------------------


def bomb() -> bytes:
    """A small archive that would unpack to more than a machine has."""
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        archive.writestr("content.xml", b"x")
    return packed.getvalue().replace((1).to_bytes(4, "little") * 2, b"\1\0\0\0\xff\xff\xff\x7f")


@pytest.mark.parametrize(
    "content", [b"", b"no such file", odt("a"), bomb()], ids=["empty", "text", "zip", "bomb"]
)
@pytest.mark.parametrize(
    ("metric", "suffix", "options"),
    [
        ("compare_table", "xlsx", {"rules": [{"type": "sheet_name"}]}),
        ("compare_docx_tables", "docx", {}),
        ("compare_pptx_files", "pptx", {}),
        ("compare_pdfs", "pdf", {}),
        ("compare_images", "png", {}),
        ("is_included_all_json_objects", "json", {}),
    ],
)
def test_a_damaged_file_is_told_by_its_path(
    save: Save, metric: str, suffix: str, options: dict[str, Any], content: bytes
) -> None:
    damaged = save(f"damaged.{suffix}", content)
    with pytest.raises(Unreadable) as told:
        score(metric, damaged, damaged, **options)
    assert told.value.path == damaged


def test_every_metric_has_a_case() -> None:
    """By name, here or in a fixture; a new metric without one fails this test."""
    files = [*FIXTURES.glob("osworld_*.jsonl"), *FIXTURES.parent.glob("test_osworld_*.py")]
    text = "".join(file.read_text() for file in files)
    assert [name for name in METRICS if f'"{name}"' not in text] == []
