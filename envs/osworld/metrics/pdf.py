"""Metrics on PDF files."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

from pypdf import PdfReader

from .reading import opened, similarity
from .registry import METRICS, chosen

RELATIONS = ("eq", "ne", "lt", "le", "gt", "ge")
MAX_PAGES = 500


@METRICS.add("compare_pdfs")
def compare_pdfs(result: str | Sequence[str | None] | None, expected: str | Sequence[str]) -> float:
    """How alike the texts are; of several files the mean, in which a missing one counts 0."""
    results = [result] if isinstance(result, str) or result is None else list(result)
    golds = [expected] if isinstance(expected, str) else list(expected)
    scores = [
        similarity(opened(path, _text), opened(gold, _text)) if path else 0.0
        for path, gold in zip(results, golds, strict=False)
    ]
    return sum(scores) / len(golds)


def _text(path: str) -> str:
    pages = PdfReader(path).pages
    return "".join(page.extract_text() for page in pages[:MAX_PAGES]).strip()


@METRICS.add("check_pdf_pages")
def check_pdf_pages(result: str | None, rules: Mapping[str, Any]) -> float:
    """The number of pages is in that `relation` (eq, lt, ...) to `ref_value`."""
    relation = chosen("rules.relation", rules["relation"], RELATIONS)
    if result is None:
        return 0.0
    pages = opened(result, lambda path: len(PdfReader(path).pages))
    return float(getattr(operator, relation)(pages, rules["ref_value"]))
