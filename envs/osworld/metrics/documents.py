"""Metrics on text documents: DOCX, and where it says so ODT."""

from __future__ import annotations

import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from docx import Document
from docx.enum.text import WD_PARAGRAPH_ALIGNMENT
from docx.oxml.ns import qn

from .reading import opened, similarity
from .registry import METRICS

Rules = Mapping[str, Any]
_ODT_PARAGRAPH = "{urn:oasis:names:tc:opendocument:xmlns:text:1.0}p"


def document(path: str) -> Any:
    """A DOCX file as python-docx reads it."""
    return opened(path, Document)


def paragraphs(path: str) -> list[str]:
    """The text of each paragraph of a DOCX or an ODT file."""
    if Path(path).suffix == ".odt":
        return opened(path, _odt_paragraphs)
    return [paragraph.text for paragraph in document(path).paragraphs]


def _odt_paragraphs(path: str) -> list[str]:
    with zipfile.ZipFile(path) as archive, archive.open("content.xml") as content:
        return ["".join(node.itertext()) for node in ElementTree.parse(content).iter(_ODT_PARAGRAPH)]


@METRICS.add("compare_docx_files")
def compare_docx_files(
    result: str | None,
    expected: str | None,
    *,
    ignore_blanks: bool = True,
    ignore_case: bool = False,
    ignore_order: bool = False,
    content_only: bool = False,
    fuzzy_match: bool = False,
    delete_empty_lines: bool = False,
) -> float:
    """Both files, DOCX or both ODT, have the same text.

    ignore_blanks   a run of blanks, counts as one, an end of a paragraph too; else paragraph by paragraph
    ignore_order    sort the paragraphs first; ignore_case, delete_empty_lines: as they say
    fuzzy_match     the score is how alike they are; content_only: likewise, of all the text as one
    """
    if not result or not expected or Path(result).suffix != Path(expected).suffix:
        return 0.0
    sides = [paragraphs(result), paragraphs(expected)]
    if ignore_order:
        sides = [sorted(side) for side in sides]
    if delete_empty_lines:
        sides = [[text for text in side if text.strip()] for side in sides]
    if ignore_case:
        sides = [[text.lower() for text in side] for side in sides]
    if content_only or ignore_blanks:
        sides = [[" ".join("\n".join(side).split())] for side in sides]
    if not (content_only or fuzzy_match):
        return float(sides[0] == sides[1])
    return _mean_similarity(*sides)


def _mean_similarity(first: Sequence[str], second: Sequence[str]) -> float:
    if len(first) != len(second):
        return 0.0
    scores = [similarity(one, other) for one, other in zip(first, second, strict=True)]
    return sum(scores) / len(scores) if scores else 1.0


@METRICS.add("compare_line_spacing")
def compare_line_spacing(result: str | None, expected: str | None) -> float:
    """The same text, and paragraph by paragraph the same line spacing."""
    if not result or not expected or not compare_docx_files(result, expected):
        return 0.0
    spacings = [
        [paragraph.paragraph_format.line_spacing for paragraph in document(path).paragraphs]
        for path in (result, expected)
    ]
    return float(spacings[0] == spacings[1])


@METRICS.add("compare_init_lines")
def compare_init_lines(result: str | None, expected: str | None) -> float:
    """The same paragraphs, as far as the shorter of the two goes."""
    if not result or not expected:
        return 0.0
    pairs = zip(paragraphs(result), paragraphs(expected), strict=False)
    return float(all(one == other for one, other in pairs))


@METRICS.add("compare_docx_tables")
def compare_docx_tables(result: str | None, expected: str | None) -> float:
    """Both have the same tables, cell by cell; blanks at a cell's ends do not count."""
    if not result or not expected:
        return 0.0
    tables = [[_cells(table) for table in document(path).tables] for path in (result, expected)]
    return float(tables[0] == tables[1])


def _cells(table: Any) -> list[list[str]]:
    return [[cell.text.strip() for cell in row.cells] for row in table.rows]


@METRICS.add("compare_docx_images")
def compare_docx_images(result: str | None, expected: str | None) -> float:
    """Both have the same pictures in the same order."""
    if not result or not expected:
        return 0.0
    images = [
        [rel.target_part.blob for rel in document(path).part.rels.values() if "image" in rel.reltype]
        for path in (result, expected)
    ]
    return float(images[0] == images[1])


@METRICS.add("compare_font_names")
def compare_font_names(result: str | None, rules: Rules) -> float:
    """Every run of every paragraph has the font `font_name`."""
    if not result:
        return 0.0
    runs = [run for paragraph in document(result).paragraphs for run in paragraph.runs]
    return float(all(run.font.name == rules["font_name"] for run in runs))


@METRICS.add("contains_page_break")
def contains_page_break(result: str | None, rules: Rules | None = None) -> float:
    """There is a page break; with `page_break_count`, exactly so many."""
    if not result:
        return 0.0
    runs = (run for paragraph in document(result).paragraphs for run in paragraph.runs)
    breaks = [
        part for run in runs for part in run.element.iter(qn("w:br")) if part.get(qn("w:type")) == "page"
    ]
    wanted = (rules or {}).get("page_break_count")
    return float(bool(breaks) and (wanted is None or len(breaks) == wanted))


@METRICS.add("is_first_line_centered")
def is_first_line_centered(result: str | None) -> float:
    """The first paragraph is centred."""
    found = document(result).paragraphs[:1] if result else []
    return float(any(first.paragraph_format.alignment == WD_PARAGRAPH_ALIGNMENT.CENTER for first in found))


@METRICS.add("has_page_numbers_in_footers")
def has_page_numbers_in_footers(result: str | None) -> float:
    """The first line of every section's footer has a digit."""
    if not result:
        return 0.0
    footers = [section.footer.paragraphs[:1] for section in document(result).sections]
    return float(all(any(char.isdigit() for line in lines for char in line.text) for lines in footers))
