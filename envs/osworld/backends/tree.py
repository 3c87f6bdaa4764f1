"""An accessibility tree as OSWorld's server writes it: an element for each node, named by its role.

    <desktop-frame name="main"><application name="gnome-terminal-server"><frame name="Terminal"
        st:active="true" cp:screencoord="(591, 298)" cp:size="(738, 484)">...

`st`, `cp` and others stand for the namespaces below; a node's text is the element's text.
"""

from __future__ import annotations

import re
from xml.etree import ElementTree

from ....sandboxes.desktop.desktop import Accessible

STATE = "https://accessibility.ubuntu.example.org/ns/state"
COMPONENT = "https://accessibility.ubuntu.example.org/ns/component"
_NO_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_NO_NAME = re.compile("[^a-z-]+")


def as_xml(root: Accessible) -> str:
    """The tree below `root`, which is the desktop.

    >>> as_xml(Accessible(role="desktop frame", name="main"))
    '<desktop-frame name="main" />'
    """
    ElementTree.register_namespace("st", STATE)
    ElementTree.register_namespace("cp", COMPONENT)
    return ElementTree.tostring(_element(root), encoding="unicode")


def _element(node: Accessible) -> ElementTree.Element:
    role = _NO_NAME.sub("", node.role.lower().replace(" ", "-")).strip("-") or "unknown"
    element = ElementTree.Element(role, {"name": _NO_XML.sub("", node.name)})
    for state in sorted(node.states):
        element.set(f"{{{STATE}}}{state.replace(' ', '_')}", "true")
    if node.box is not None:
        left, top, width, height = node.box
        element.set(f"{{{COMPONENT}}}screencoord", f"({left}, {top})")
        element.set(f"{{{COMPONENT}}}size", f"({width}, {height})")
    if node.text:
        element.text = _NO_XML.sub("", node.text)
    element.extend(_element(child) for child in node.children)
    return element
