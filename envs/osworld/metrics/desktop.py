"""Metrics on the desktop: its clock, its favourites, its windows."""

from __future__ import annotations

import ast
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal
from xml.etree import ElementTree

from lxml import etree
from lxml.cssselect import CSSSelector

from .reading import similarity
from .registry import METRICS, chosen

Rules = Mapping[str, Any]
_OSWORLD = "https://accessibility.ubuntu.example.org/ns"
NAMESPACES = {
    "st": f"{_OSWORLD}/state",
    "attr": f"{_OSWORLD}/attributes",
    "cp": f"{_OSWORLD}/component",
    "doc": f"{_OSWORLD}/document",
    "docattr": f"{_OSWORLD}/document/attributes",
    "txt": f"{_OSWORLD}/text",
    "val": f"{_OSWORLD}/value",
    "act": f"{_OSWORLD}/action",
}


@METRICS.add("check_gnome_favorite_apps")
def check_gnome_favorite_apps(result: str | None, rules: Rules) -> float:
    """The printed list has the members of `expected`, in any order, each once."""
    try:
        apps = ast.literal_eval((result or "").strip())
    except (ValueError, SyntaxError):
        return 0.0
    return float(isinstance(apps, list) and sorted(map(str, apps)) == sorted(rules["expected"]))


@METRICS.add("is_utc_0")
def is_utc_0(result: str | None) -> float:
    """`timedatectl status` names a time zone at +0000, whatever that is called."""
    lines = [line.strip() for line in (result or "").splitlines()]
    return float(any(line.startswith("Time zone:") and line.endswith("+0000)") for line in lines))


@METRICS.add("check_text_enlarged")
def check_text_enlarged(result: str | None) -> float:
    """The printed scale of text is larger than 1."""
    try:
        return float(float(result or "") > 1.0)
    except ValueError:
        return 0.0


@METRICS.add("check_moved_jpgs")
def check_moved_jpgs(result: Mapping[str, Any] | None, rules: Rules) -> float:
    """The folder holds exactly the files of `expected`."""
    names = sorted(node["name"] for node in result["children"]) if result else []
    return float(names == sorted(rules["expected"]))


@METRICS.add("check_accessibility_tree")
def check_accessibility_tree(
    result: str | None, rules: Sequence[Rules], *, osname: Literal["ubuntu"] = "ubuntu"
) -> float:
    """Every rule finds an element, by `xpath` or by CSS `selectors`; the product of how well their texts fit.

    text    what one of the elements says; `exact` (true): it is that, else how alike it is
    """
    chosen("options.osname", osname, ("ubuntu",))
    if not result:
        return 0.0
    # The programs on the screen have written it: nothing in it is to be looked up elsewhere.
    tree = etree.fromstring(result.encode(), etree.XMLParser(resolve_entities=False, no_network=True))
    return math.prod(_fit(tree, rule) for rule in rules)


def _fit(tree: Any, rule: Rules) -> float:
    if "xpath" in rule:
        elements = tree.xpath(rule["xpath"], namespaces=NAMESPACES)
    else:
        elements = CSSSelector(", ".join(rule["selectors"]), namespaces=NAMESPACES)(tree)
    texts = [element.text or "" for element in elements]
    if "text" not in rule:
        return float(bool(texts))
    if rule.get("exact", True):
        return float(rule["text"] in texts)
    return max((similarity(rule["text"], text) for text in texts), default=0.0)


@METRICS.add("check_left_panel")
def check_left_panel(result: str | None) -> float:
    """The accessibility tree has Impress's slide panel."""
    if not result:
        return 0.0
    frames = ElementTree.fromstring(result).iter("document-frame")
    return float(any(frame.get("name") == "Slides View" for frame in frames))
