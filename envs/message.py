"""What is said in an episode: messages, and the observation that carries the new ones.

Invariant: an observation holds only what is new since the last action (at reset: the whole prompt), so
whoever renders it appends and never rewrites. Plain dictionaries of strings: they travel through JSON,
pickle and Gymnasium's vector environments unchanged.
"""

from __future__ import annotations

from typing import Literal, NotRequired

from typing_extensions import TypedDict

Role = Literal["system", "user", "assistant", "tool"]


class Message(TypedDict):
    """One message. `name` is the tool that answered; `tool_calls` are those of an assistant's turn.

    >>> Message(role="tool", name="python", content="42")["content"]
    '42'
    """

    role: Role
    content: str
    name: NotRequired[str]
    tool_calls: NotRequired[list[dict[str, object]]]


class Observation(TypedDict):
    """What the policy is shown next: the new messages, and the new images as PNG files in order."""

    messages: tuple[Message, ...]
    images: tuple[bytes, ...]


def observation(shown: object, role: Role, *, name: str | None = None) -> Observation:
    """What an author returned, as an observation: a text becomes one message of that role.

    >>> observation("42", "tool", name="python")["messages"]
    ({'role': 'tool', 'content': '42', 'name': 'python'},)
    """
    if isinstance(shown, dict):
        return Observation(messages=tuple(shown["messages"]), images=tuple(shown.get("images", ())))
    if isinstance(shown, list | tuple):
        return Observation(messages=tuple(shown), images=())
    message = Message(role=role, content=str(shown))
    if name:
        message["name"] = name
    return Observation(messages=(message,), images=())


NOTHING = Observation(messages=(), images=())
