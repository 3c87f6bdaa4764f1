"""Metrics on presentations, but for the comparison of two (`slide_comparison.py`)."""

from __future__ import annotations

import math
import zipfile
from collections.abc import Mapping, Sequence
from typing import Any
from xml.etree import ElementTree

from pptx import Presentation
from pptx.enum.dml import MSO_FILL
from pptx.enum.shapes import MSO_SHAPE_TYPE
from pptx.util import Inches

from .reading import opened
from .registry import METRICS

Rules = Mapping[str, Any]
_P = "{http://schemas.openxmlformats.org/presentationml/2006/main}"


def presentation(path: str) -> Any:
    """A PPTX file as python-pptx reads it."""
    return opened(path, Presentation)


def background_colour(slide: Any) -> tuple[int, int, int] | None:
    """The solid colour behind a slide, its master's where it has none of its own; None for anything else."""
    fill = slide.background.fill
    if fill.type == MSO_FILL.BACKGROUND:
        fill = slide.slide_layout.slide_master.background.fill
    if fill.type != MSO_FILL.SOLID:
        return None
    return rgb(fill.fore_color)


def rgb(colour: Any) -> tuple[int, int, int] | None:
    """A colour's red, green and blue; None where it is a theme's or none."""
    try:
        value = colour.rgb
    except AttributeError:
        return None
    return tuple(value) if value is not None else None


@METRICS.add("check_image_stretch_and_center")
def check_image_stretch_and_center(result: str | None, original: str | None) -> float:
    """The original's first picture fills the first slide to half an inch, and is in its middle."""
    if not result or not original:
        return 0.0
    before, after = presentation(original), presentation(result)
    pictures = _pictures(before.slides[0])
    if not pictures or not after.slides:
        return 0.0
    same = [shape for shape in _pictures(after.slides[0]) if shape.image.blob == pictures[0].image.blob]
    if not same:
        return 0.0
    shape, width, height = same[-1], before.slide_width, before.slide_height
    off = (
        shape.width - width,
        shape.height - height,
        shape.left - (width - shape.width) / 2,
        shape.top - (height - shape.height) / 2,
    )
    return float(all(abs(distance) <= Inches(0.5) for distance in off))


def _pictures(slide: Any) -> list[Any]:
    return [shape for shape in slide.shapes if shape.shape_type == MSO_SHAPE_TYPE.PICTURE]


@METRICS.add("check_slide_orientation_Portrait")
def check_slide_orientation_portrait(result: str | None) -> float:
    """Slides are higher than wide."""
    if not result:
        return 0.0
    found = presentation(result)
    return float(found.slide_width < found.slide_height)


@METRICS.add("check_transition")
def check_transition(result: str | None, rules: Rules) -> float:
    """Slide `slide_idx` has a transition of `transition_type`."""
    if not result:
        return 0.0

    def transitions(path: str) -> list[ElementTree.Element]:
        name = f"ppt/slides/slide{rules['slide_idx'] + 1}.xml"
        with zipfile.ZipFile(path) as archive, archive.open(name) as slide:
            return list(ElementTree.parse(slide).iter(f"{_P}transition"))

    wanted = f".//{_P}{rules['transition_type']}"
    return float(any(found.find(wanted) is not None for found in opened(result, transitions)))


@METRICS.add("check_strikethrough")
def check_strikethrough(result: str | None, rules: Rules) -> float:
    """The first run of each named paragraph, of each named shape, of each named slide is struck through."""
    if not result:
        return 0.0
    found = presentation(result)
    try:
        runs = [
            found.slides[slide].shapes[shape].text_frame.paragraphs[paragraph].runs[0]
            for slide in rules["slide_index_s"]
            for shape in rules["shape_index_s"]
            for paragraph in rules["paragraph_index_s"]
        ]
    except (IndexError, AttributeError):
        return 0.0
    return float(all("strike" in run.font._element.attrib for run in runs))


@METRICS.add("evaluate_presentation_fill_to_rgb_distance")
def evaluate_presentation_fill_to_rgb_distance(result: str | None, rules: Rules) -> float:
    """How near the slides' backgrounds are to `rgb` on average; one still at `original_rgb` counts 0."""
    slides = list(presentation(result).slides) if result else []
    return sum(_nearness(slide, rules) for slide in slides) / len(slides) if slides else 0.0


def _nearness(slide: Any, rules: Rules) -> float:
    colour = background_colour(slide)
    original: Sequence[int] | None = rules.get("original_rgb")
    if colour is None or (original is not None and colour == tuple(original)):
        return 0.0
    return 1 - math.dist(colour, rules["rgb"]) / math.dist((0, 0, 0), (255, 255, 255))
