"""What is said in an episode: messages, and the observation that carries the new ones.

Invariants: an observation holds only what is new since the last action (at reset: the whole prompt), so
whoever renders it appends and never rewrites; its images are those of its messages' image parts, in order.
Plain dictionaries: they travel through pickle and Gymnasium's vector environments unchanged, and messages
through JSON, for the images are beside them.
"""

from __future__ import annotations

import reprlib
from collections.abc import AsyncIterator, Awaitable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from copy import deepcopy
from types import FunctionType, MethodType
from typing import Any, Literal, NotRequired, get_args

from typing_extensions import TypedDict

Role = Literal["system", "user", "assistant", "tool"]


class TextPart(TypedDict):
    """A piece of a content that also has images."""

    type: Literal["text"]
    text: str


class ImagePart(TypedDict):
    """Where an image stands; which one, its place among the image parts of all messages says."""

    type: Literal["image"]


Part = TextPart | ImagePart
Content = str | list[Part]
# Kinds of which Python's own text says nothing to a policy.
_NO_TEXT = (
    dict, AbstractSet, bytes, bytearray, Iterator, AsyncIterator, Awaitable, FunctionType, MethodType, type
)  # fmt: skip
IMAGE = ImagePart(type="image")


class Message(TypedDict):
    """One message. `name` is the tool that answered; `tool_calls` are those of an assistant's turn.

    >>> Message(role="tool", name="python", content="42")["content"]
    '42'
    """

    role: Role
    content: Content
    name: NotRequired[str]
    tool_calls: NotRequired[list[dict[str, object]]]


class Observation(TypedDict):
    """What the policy is shown next: the new messages, and as PNG files the images of their image parts."""

    messages: tuple[Message, ...]
    images: tuple[bytes, ...]


def observation(shown: object, role: Role, *, name: str | None = None) -> Observation:
    """What an author returned, as an observation: a text becomes one message of that role. TypeError for what
    would be shown as something that nobody meant: data, a generator, messages of another shape.

    >>> observation("42", "tool", name="python")["messages"]
    ({'role': 'tool', 'content': '42', 'name': 'python'},)
    """
    if isinstance(shown, dict) and "messages" in shown:
        return _checked(tuple(shown["messages"]), tuple(shown.get("images", ())))
    if isinstance(shown, list | tuple):
        return _checked(tuple(shown), ())
    if isinstance(shown, _NO_TEXT):
        raise TypeError(
            f"it returned {reprlib.repr(shown)} ({type(shown).__name__}); return a text (json.dumps of data, "
            "decoded bytes), messages, or an observation"
        )
    message = Message(role=role, content=str(shown))
    if name:
        message["name"] = name
    return Observation(messages=(message,), images=())


def _checked(messages: tuple[Any, ...], images: tuple[Any, ...]) -> Observation:
    for message in messages:
        if not is_message(message):
            raise TypeError(
                f"it returned {reprlib.repr(message)} as a message; write {{'role': R, 'content': C}}: R is "
                f"one of {', '.join(get_args(Role))}, C a text or a list of text and image parts"
            )
    if count_images(messages) != len(images) or not all(isinstance(image, bytes) for image in images):
        raise TypeError(
            f"it returned {len(images)} images for {count_images(messages)} image parts; give the bytes of "
            "one PNG file for each (`pictured` does)"
        )
    return Observation(messages=messages, images=images)


def is_message(message: object) -> bool:
    """Whether it has a role and a content: a text, or a list of text parts and image parts."""
    if not isinstance(message, dict) or message.get("role") not in get_args(Role):
        return False
    content = message.get("content")
    return isinstance(content, str) or (isinstance(content, list) and all(map(_is_part, content)))


def _is_part(part: object) -> bool:
    if not isinstance(part, dict):
        return False
    return part.get("type") == "image" or (part.get("type") == "text" and isinstance(part.get("text"), str))


def pictured(role: Role, text: str, *pngs: bytes, name: str | None = None) -> Observation:
    """One message: the images, then the text.

    >>> pictured("user", "The screen.", b"png")["messages"][0]["content"]
    [{'type': 'image'}, {'type': 'text', 'text': 'The screen.'}]
    """
    parts: list[Part] = [ImagePart(type="image") for _ in pngs]
    message = Message(role=role, content=[*parts, TextPart(type="text", text=text)])
    if name:
        message["name"] = name
    return Observation(messages=(message,), images=pngs)


def joined(observations: Iterable[Observation]) -> Observation:
    """One observation after the other."""
    parts = list(observations)
    return Observation(
        messages=tuple(message for part in parts for message in part["messages"]),
        images=tuple(image for part in parts for image in part["images"]),
    )


def copied(shown: Observation) -> Observation:
    """One that may be changed and leave this one as it is; a message of texts only needs no deep copy."""
    return Observation(messages=tuple(map(_copied, shown["messages"])), images=shown["images"])


def _copied(message: Message) -> Message:
    flat = all(isinstance(value, str) for value in message.values())
    return message.copy() if flat else deepcopy(message)


def text_of(content: str | Sequence[Mapping[str, Any]], *, image: str = "[image]") -> str:
    """A message's content as a text, with a word for each image.

    >>> text_of(pictured("user", "The screen.", b"png")["messages"][0]["content"])
    '[image]The screen.'
    """
    if isinstance(content, str):
        return content
    return "".join(str(part["text"]) if part["type"] == "text" else image for part in content)


def count_images(messages: Sequence[Message]) -> int:
    """How many image parts they have."""
    return sum(
        part["type"] == "image"
        for message in messages
        if not isinstance(message["content"], str)
        for part in message["content"]
    )


NOTHING = Observation(messages=(), images=())
