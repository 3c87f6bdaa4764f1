"""What the policy is shown of the machine: the screenshot, and in words what is on the screen."""

from __future__ import annotations

import asyncio
from xml.etree import ElementTree

from ..message import Observation, pictured
from .backends.tree import COMPONENT, STATE
from .machine import Hindered, Machine
from .options import OsworldOptions


async def look(machine: Machine, options: OsworldOptions, text: str) -> Observation:
    """One message: the screen, then the text, then the accessibility tree where it is asked for."""
    png = await machine.screenshot()
    if options.accessibility_tree:
        tree = await machine.accessibility_tree()
        try:
            words = await asyncio.to_thread(in_words, tree, options.tree_chars)
        except ElementTree.ParseError as error:
            raise Hindered(f"its accessibility tree is no XML: {error}", provider="machine") from error
        text = f"{text}\n\n{words}"
    return pictured("user", text, png)


def in_words(tree: str, limit: int) -> str:
    """The nodes that are on the screen, one a line: role, name, text, position and size.

    limit   characters at most; what does not fit is counted
    """
    lines, left, cut = ["role\tname\ttext\tposition\tsize"], limit, 0
    for node in ElementTree.fromstring(tree).iter():
        place = node.get(f"{{{COMPONENT}}}screencoord", "")
        if node.get(f"{{{STATE}}}showing") != "true" or not place:
            continue
        values = (
            node.tag,
            node.get("name", ""),
            node.text or "",
            place,
            node.get(f"{{{COMPONENT}}}size", ""),
        )
        line = "\t".join(" ".join(value.split()) for value in values)
        left -= len(line) + 1
        if left < 0:
            cut += 1
        else:
            lines.append(line)
    return "\n".join([*lines, *([f"[... {cut} more ...]"] if cut else [])])
