"""The accessibility tree, as the applications tell it over D-Bus (AT-SPI).

Asked level by level, every node of a level at once: one round trip for each depth, not for each node. An
application that does not answer in time is left out, with the mark that something is missing.
"""

from __future__ import annotations

import time
from typing import Any

from jeepney import (
    DBusAddress,
    HeaderFields,
    Message,
    MessageType,
    Properties,
    message_bus,
    new_method_call,
)
from jeepney.io.blocking import DBusConnection, open_dbus_connection

REGISTRY = ("org.a11y.atspi.Registry", "/org/a11y/atspi/accessible/root")
START_S = 30.0
MAX_NODES = 5000
MAX_DEPTH = 200
MAX_TEXT = 4000  # characters of one node's text
_NOWHERE = -(1 << 31)
_NAMESPACE = "org.a11y.atspi."
# bits of the state set, by number, that say something to who looks at the screen
_STATES = {
    1: "active", 4: "checked", 7: "editable", 8: "enabled", 9: "expandable", 10: "expanded", 11: "focusable",
    12: "focused", 16: "modal", 20: "pressed", 22: "selectable", 23: "selected", 25: "showing", 30: "visible",
    41: "checkable", 43: "read only",
}  # fmt: skip
Place = tuple[str, str]  # bus name and path of one node
Node = dict[str, Any]


class Tree:
    """One walk over all applications."""

    def __init__(self, bus: DBusConnection, deadline: float) -> None:
        self._bus, self._deadline = bus, deadline
        self.complete = True

    def walk(self) -> Node:
        """The root, whose children are the applications."""
        root: Node = {}
        level: list[tuple[Place, Node]] = [(REGISTRY, root)]
        count, depth = 1, 0
        while level:
            depth += 1
            below = []
            for node, places in self._describe(level):
                room = MAX_NODES - count if depth <= MAX_DEPTH else 0
                self.complete &= len(places) <= room
                node["children"] = [{} for _ in places[:room]]
                below += list(zip(places, node["children"]))  # noqa: B905 - Python 3.9 has no strict
                count += len(node["children"])
            level = below
        return root

    def _describe(self, level: list[tuple[Place, Node]]) -> list[tuple[Node, list[Place]]]:
        """Fill in the nodes of one level; each with where its children are."""
        asked = []
        for place, _ in level:
            asked += [
                self._call(place, "Accessible", "GetRoleName"),
                Properties(self._address(place, "Accessible")).get("Name"),
                self._call(place, "Accessible", "GetState"),
                self._call(place, "Accessible", "GetChildren"),
                self._call(place, "Component", "GetExtents", "u", (0,)),
                self._call(place, "Text", "GetText", "ii", (0, MAX_TEXT)),
            ]
        answers = self._all(asked)
        found = []
        for index, (_, node) in enumerate(level):
            role, name, states, children, extents, text = answers[6 * index : 6 * index + 6]
            node["role"], node["name"] = role or "", name[1] if name else ""
            node["states"] = _state_names(states or [])
            shown = extents and extents[0] > _NOWHERE  # a menu that is not open has no place
            node["box"], node["text"] = extents if shown else None, text or ""
            found.append((node, [(place[0], place[1]) for place in children or []]))
        return found

    def _address(self, place: Place, interface: str) -> DBusAddress:
        return DBusAddress(place[1], bus_name=place[0], interface=_NAMESPACE + interface)

    def _call(
        self, place: Place, interface: str, method: str, signature: str = "", body: tuple[Any, ...] = ()
    ) -> Message:
        return new_method_call(self._address(place, interface), method, signature or None, body)

    def _all(self, messages: list[Message]) -> list[Any | None]:
        """The first value of each answer, in order; None for an error or for none in time."""
        answers: list[Any | None] = [None] * len(messages)
        waiting = {}
        for index, message in enumerate(messages):
            serial = next(self._bus.outgoing_serial)
            self._bus.send(message, serial=serial)
            waiting[serial] = index
        while waiting:
            try:
                reply = self._bus.receive(timeout=max(0.0, self._deadline - time.monotonic()))
            except TimeoutError:
                self.complete = False
                break
            index = waiting.pop(reply.header.fields.get(HeaderFields.reply_serial, -1), -1)
            if index >= 0 and reply.header.message_type is MessageType.method_return and reply.body:
                answers[index] = reply.body[0]
        return answers


def _state_names(words: list[int]) -> list[str]:
    bits = sum(word << (32 * index) for index, word in enumerate(words))
    return [name for bit, name in _STATES.items() if bits >> bit & 1]


def enable(session_bus: str) -> None:
    """Start AT-SPI on this session bus and say that somebody reads: Qt and GTK 4 wait for that.

    It writes that into its settings as well, which are to be in memory and not among the user's files.
    """
    status = DBusAddress("/org/a11y/bus", bus_name="org.a11y.Bus", interface="org.a11y.Status")
    for message in (
        _settings_of_services("memory"),
        Properties(status).set("IsEnabled", "b", True),
        _settings_of_services("dconf"),
    ):
        _ask(session_bus, message, START_S)


def _settings_of_services(backend: str) -> Message:
    """Where what the bus starts from now on keeps its settings."""
    variables = {"GSETTINGS_BACKEND": backend}
    return new_method_call(message_bus, "UpdateActivationEnvironment", "a{ss}", (variables,))


def tree(session_bus: str, seconds: float) -> dict[str, Any]:
    """What the applications on this session bus tell within so many seconds. OSError without AT-SPI."""
    deadline = time.monotonic() + seconds
    launcher = DBusAddress("/org/a11y/bus", bus_name="org.a11y.Bus", interface="org.a11y.Bus")
    (address,) = _ask(session_bus, new_method_call(launcher, "GetAddress"), seconds)
    with open_dbus_connection(address, auth_timeout=seconds) as bus:
        walk = Tree(bus, deadline)
        return {"root": walk.walk(), "complete": walk.complete}


def _ask(session_bus: str, message: Message, seconds: float) -> tuple[Any, ...]:
    with open_dbus_connection(session_bus, auth_timeout=seconds) as session:
        answer = session.send_and_get_reply(message, timeout=seconds)
    if answer.header.message_type is not MessageType.method_return:
        raise OSError(f"the accessibility bus (at-spi2-core) did not start: {answer.body}")
    body: tuple[Any, ...] = answer.body
    return body
