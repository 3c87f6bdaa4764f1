"""What is on the screen: sizes of windows, and what the accessibility tree says."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from xml.etree import ElementTree

from .registry import GETTERS, Place

# How OSWorld's server names an element's states.
FOCUSED = "{https://accessibility.ubuntu.example.org/ns/state}focused"
BROWSERS = ("Google Chrome", "Chromium")


@GETTERS.add("vm_screen_size")
async def vm_screen_size(place: Place, config: Mapping[str, Any]) -> dict[str, int]:
    """`{"width": ..., "height": ...}` of the screen."""
    return {"width": place.machine.width, "height": place.machine.height}


@GETTERS.add("vm_window_size")
async def vm_window_size(place: Place, config: Mapping[str, Any]) -> dict[str, int] | None:
    """Width and height of the first window of a class; None where there is none."""
    try:
        width, height = await place.machine.window_size(str(config["app_class_name"]))
    except LookupError:
        return None
    return {"width": width, "height": height}


@GETTERS.add("accessibility_tree")
async def accessibility_tree(place: Place, config: Mapping[str, Any]) -> str:
    """The tree as XML."""
    return await place.machine.accessibility_tree()


@GETTERS.add("vm_terminal_output")
async def vm_terminal_output(place: Place, config: Mapping[str, Any]) -> str | None:
    """The text in the terminal that has the focus, or in the last one; None where there is no terminal."""
    text: str | None = await place.judge.call(terminal_text, await place.machine.accessibility_tree())
    return text


def terminal_text(tree: str) -> str | None:
    """See `vm_terminal_output`."""
    terminals = list(ElementTree.fromstring(tree).iter("terminal"))
    focused = [terminal for terminal in terminals if terminal.get(FOCUSED) == "true"]
    shown = (focused or terminals)[-1:]
    return (shown[0].text or "").rstrip() if shown else None


@GETTERS.add("active_url_from_accessTree")
async def active_url(place: Place, config: Mapping[str, Any]) -> str | None:
    """What the browser's address bar says, behind `goto_prefix`; None where no browser shows an address."""
    address: str | None = await place.judge.call(address_text, await place.machine.accessibility_tree())
    return f"{config.get('goto_prefix', 'https://')}{address}" if address else None


def address_text(tree: str) -> str | None:
    """The first browser's address."""
    for browser in ElementTree.fromstring(tree).iter("application"):
        if browser.get("name") not in BROWSERS:
            continue
        for entry in browser.iter("entry"):
            if entry.get("name") == "Address and search bar" and entry.text:
                return entry.text
    return None
