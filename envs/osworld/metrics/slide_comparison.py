"""compare_pptx_files: whether two presentations are the same in what the task asks to be looked at.

Its options, `examine_X`, each switch one look on or off. Five of them (`TASK_LOOKS`) are OSWorld's for one
task each, with that task's text and slide number in them; they are kept as published, for that is what the
tasks mean.

Shape by shape, paragraph by paragraph, run by run; the first difference ends it. A LibreOffice that saves a
file unchanged writes absent properties out: so absent is the same as off for bold and italic, and as left for
alignment.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

from pptx.enum.shapes import MSO_SHAPE_TYPE
from pptx.enum.text import PP_ALIGN
from pptx.oxml.ns import qn

from .registry import METRICS, chosen
from .slides import background_colour, presentation, rgb

DEFAULTS: Mapping[str, Any] = {
    "examine_number_of_slides": True,
    "examine_shape": True,
    "examine_text": True,
    "examine_indent": True,
    "examine_font_name": True,
    "examine_font_size": True,
    "examine_font_bold": True,
    "examine_font_italic": True,
    "examine_color_rgb": True,
    "examine_font_underline": True,
    "examine_strike_through": True,
    "examine_alignment": True,
    "examine_title_bottom_position": False,
    "examine_table_bottom_position": False,
    "examine_right_position": False,
    "examine_top_position": False,
    "examine_shape_for_shift_size": False,
    "examine_image_size": False,
    "examine_modify_height": False,
    "examine_bullets": True,
    "examine_background_color": True,
    "examine_note": True,
    "approximately_tolerance": 0.005,
    "enable_debug": True,  # OSWorld's logging; says nothing about the score
}
# EMU: where a shape counts as moved to the bottom, the right, the top of its slide.
BOTTOM, RIGHT, TOP = 3_600_000, 4_320_000, 1_980_000
Options = Mapping[str, Any]


@METRICS.add("compare_pptx_files")
def compare_pptx_files(result: str | None, expected: str | None, **options: Any) -> float:
    """1.0 where nothing that is looked at differs."""
    for name in options:
        chosen("options", name, DEFAULTS)
    if not result or not expected:
        return 0.0
    looks = {**DEFAULTS, **options}
    slides = [list(presentation(path).slides) for path in (result, expected)]
    if looks["examine_number_of_slides"] and len(slides[0]) != len(slides[1]):
        return 0.0
    pairs = enumerate(zip(*slides, strict=False), start=1)
    return float(all(_same_slide(number, one, other, looks) for number, (one, other) in pairs))


def _same_slide(number: int, one: Any, other: Any, looks: Options) -> bool:
    if looks["examine_background_color"] and background_colour(one) != background_colour(other):
        return False
    if looks["examine_note"] and _notes(one) != _notes(other):
        return False
    if len(one.shapes) != len(other.shapes):
        return False
    if not all(_same_shape(number, *pair, looks) for pair in zip(one.shapes, other.shapes, strict=True)):
        return False
    if looks["examine_bullets"] and _bullets(one) != _bullets(other):
        return False
    # Shapes inside groups too, for their text and its alignment.
    texts = [list(_text_shapes(slide.shapes)) for slide in (one, other)]
    if len(texts[0]) != len(texts[1]):
        return False
    return not looks["examine_alignment"] or all(
        (not looks["examine_text"] or first.text.strip() == second.text.strip())
        and [_alignment(p) for p in first.text_frame.paragraphs]
        == [_alignment(p) for p in second.text_frame.paragraphs]
        for first, second in zip(*texts, strict=True)
    )


def _notes(slide: Any) -> str:
    frame = slide.notes_slide.notes_text_frame if slide.has_notes_slide else None
    return frame.text.strip() if frame is not None else ""


def _text_shapes(shapes: Any) -> Iterator[Any]:
    for shape in shapes:
        if shape.has_text_frame:
            yield shape
        if shape.shape_type == MSO_SHAPE_TYPE.GROUP:
            yield from _text_shapes(shape.shapes)


def _bullets(slide: Any) -> list[tuple[str, str, str]]:
    """(level, bullet, text) of each paragraph that says something."""
    found = []
    for paragraph in slide.element.iter(qn("a:p")):
        text = "".join(node.text or "" for node in paragraph.iter(qn("a:t")))
        properties = paragraph.find(qn("a:pPr"))
        bullet = properties.find(qn("a:buChar")) if properties is not None else None
        level = properties.get("lvl", "0") if properties is not None else ""
        if text.strip():
            found.append((level, bullet.get("char") if bullet is not None else "", text))
    return found


def _same_shape(number: int, one: Any, other: Any, looks: Options) -> bool:
    if not all(look(number, one, other, looks) for name, look in TASK_LOOKS.items() if looks[name]):
        return False
    if looks["examine_shape"] and not _same_place(one, other, looks):
        return False
    for name, look in SIZE_LOOKS.items():
        if looks[name] and not look(one, other, looks):
            return False
    if one.has_table and other.has_table and not _same_table(one.table, other.table, looks):
        return False
    if not (one.has_text_frame and other.has_text_frame):
        return True
    if looks["examine_text"] and one.text.strip() != other.text.strip():
        return False
    return _same_paragraphs(one.text_frame.paragraphs, other.text_frame.paragraphs, looks)


def _near(one: int | None, other: int | None, looks: Options) -> bool:
    """The same to `approximately_tolerance` of the larger."""
    if one == other:
        return True
    if not one or not other:
        return False
    return bool(abs(one - other) / max(abs(one), abs(other)) <= looks["approximately_tolerance"])


def _same_place(one: Any, other: Any, looks: Options) -> bool:
    return all(
        _near(getattr(one, side), getattr(other, side), looks) for side in ("left", "top", "width", "height")
    )


def _both(one: Any, other: Any, kind: MSO_SHAPE_TYPE) -> bool:
    return bool(one.shape_type == other.shape_type == kind)


def _title_at_bottom(number: int, one: Any, other: Any, looks: Options) -> bool:
    if one.has_text_frame and other.has_text_frame and one.text == other.text:
        return bool(one.text != "Product Comparison" or (one.top > other.top and one.top >= BOTTOM))
    return _same_place(one, other, looks)


def _table_at_bottom(number: int, one: Any, other: Any, looks: Options) -> bool:
    if number == 3 and _both(one, other, MSO_SHAPE_TYPE.TABLE):
        return bool(one.top > other.top and one.top >= BOTTOM)
    return _same_place(one, other, looks)


def _at_right(number: int, one: Any, other: Any, looks: Options) -> bool:
    if number != 2 or one.has_text_frame or other.has_text_frame:
        return True
    return bool(one.left > other.left and one.left >= RIGHT)


def _at_top(number: int, one: Any, other: Any, looks: Options) -> bool:
    if number != 2 or not _both(one, other, MSO_SHAPE_TYPE.PICTURE):
        return True
    return bool(one.top < other.top and one.top <= TOP)


def _shifted_only(number: int, one: Any, other: Any, looks: Options) -> bool:
    text = "Elaborate on what you want to discuss."
    shiftable = one.has_text_frame and other.has_text_frame and one.text == other.text == text
    return shiftable or _same_place(one, other, looks)


TASK_LOOKS: Mapping[str, Callable[[int, Any, Any, Options], bool]] = {
    "examine_title_bottom_position": _title_at_bottom,
    "examine_table_bottom_position": _table_at_bottom,
    "examine_right_position": _at_right,
    "examine_top_position": _at_top,
    "examine_shape_for_shift_size": _shifted_only,
}


def _same_image_size(one: Any, other: Any, looks: Options) -> bool:
    if not _both(one, other, MSO_SHAPE_TYPE.PICTURE):
        return _same_place(one, other, looks)
    return _near(one.width, other.width, looks) and _near(one.height, other.height, looks)


def _same_height(one: Any, other: Any, looks: Options) -> bool:
    free = _both(one, other, MSO_SHAPE_TYPE.FREEFORM)
    if free or not (one.has_text_frame or other.has_text_frame):
        return _near(one.height, other.height, looks)
    return _same_place(one, other, looks)


SIZE_LOOKS: Mapping[str, Callable[[Any, Any, Options], bool]] = {
    "examine_image_size": _same_image_size,
    "examine_modify_height": _same_height,
}


def _same_table(one: Any, other: Any, looks: Options) -> bool:
    """Cell by cell the runs' emphasis and colour; what they say is not compared, as in OSWorld."""
    tables = [[cell for row in table.rows for cell in row.cells] for table in (one, other)]
    if len(one.rows) != len(other.rows) or len(tables[0]) != len(tables[1]):
        return False
    for first, second in zip(*tables, strict=True):
        runs = [[p.runs for p in cell.text_frame.paragraphs] for cell in (first, second)]
        if [len(part) for part in runs[0]] != [len(part) for part in runs[1]]:
            return False
        pairs = zip(chain.from_iterable(runs[0]), chain.from_iterable(runs[1]), strict=True)
        if not all(_same_emphasis(*pair, {**looks, **EMPHASIS}) for pair in pairs):
            return False
    return True


# In tables these are looked at whatever the task switches off; colour alone can be.
EMPHASIS = {"examine_font_bold": True, "examine_font_italic": True, "examine_font_underline": True}


def _same_paragraphs(one: Sequence[Any], other: Sequence[Any], looks: Options) -> bool:
    if len(one) != len(other):
        return False
    return all(_same_paragraph(first, second, looks) for first, second in zip(one, other, strict=True))


def _same_paragraph(one: Any, other: Any, looks: Options) -> bool:
    if looks["examine_alignment"] and _alignment(one) != _alignment(other):
        return False
    if looks["examine_text"] and one.text != other.text:
        return False
    if looks["examine_indent"] and one.level != other.level:
        return False
    if len(one.runs) != len(other.runs):
        return False
    return all(_same_run(first, second, looks) for first, second in zip(one.runs, other.runs, strict=True))


def _alignment(paragraph: Any) -> Any:
    return PP_ALIGN.LEFT if paragraph.alignment is None else paragraph.alignment


def _same_run(one: Any, other: Any, looks: Options) -> bool:
    if looks["examine_font_name"] and one.font.name != other.font.name:
        return False
    if looks["examine_font_size"] and one.font.size != other.font.size:
        return False
    strikes = [run.font._element.get("strike", "noStrike") for run in (one, other)]
    if looks["examine_strike_through"] and strikes[0] != strikes[1]:
        return False
    return _same_emphasis(one, other, looks)


def _same_emphasis(one: Any, other: Any, looks: Options) -> bool:
    if looks["examine_font_bold"] and bool(one.font.bold) != bool(other.font.bold):
        return False
    if looks["examine_font_italic"] and bool(one.font.italic) != bool(other.font.italic):
        return False
    if looks["examine_font_underline"] and not _same_underline(one.font.underline, other.font.underline):
        return False
    colours = rgb(one.font.color), rgb(other.font.color)
    # A theme's colour has no rgb here, and is then not compared.
    return not looks["examine_color_rgb"] or None in colours or colours[0] == colours[1]


def _same_underline(one: Any, other: Any) -> bool:
    """Absent is no underline and also whatever is not the plain one: OSWorld tells only those two apart."""
    if one is None or other is None:
        return True not in (one, other)
    return bool(one == other)
