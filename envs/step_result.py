"""What `areset` and `astep` return, checked where an author wrote them: before anything is made of it.

    checked_step(returned, place) -> (observation, reward, terminated, truncated, info)

Invariant: a reward that passes is a finite float and a metric a finite one; whatever else was returned is an
error that names environment, call, episode and task, and says what to return. A reward of NaN is `NonFinite`.
Nothing here waits.
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from numbers import Real
from typing import Any

import numpy as np

from ..errors import EnvironmentBug, NonFinite
from .bug import source_of, told
from .message import Observation, count_images, is_message

Info = dict[str, Any]
_DICTIONARY = (dict, Mapping)  # in this order: asking for a Mapping is slow, and most are dictionaries
Step = tuple[Observation, float, bool, bool, Info]
_SHOWN = 'Return {"messages": ({"role": "user", "content": "..."},), "images": ()} there.'


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Who returned it: for the message of an error, which looks up the line of `function`."""

    environment: str
    hook: str
    task_id: str
    episode_id: str = ""
    function: Callable[..., Any] | None = None

    def words(self, what: str, remedy: str) -> str:
        return told(
            self.environment,
            self.hook,
            self.task_id,
            what,
            source_of(self.function) or "(no source)",
            episode_id=self.episode_id,
            remedy=f"{remedy} Then resume the run.",
        )

    def bug(self, what: str, remedy: str) -> EnvironmentBug:
        return EnvironmentBug(self.words(what, remedy))


def checked_reset(returned: object, place: Place) -> tuple[Observation, Info]:
    """The result of a reset; raises `EnvironmentBug`."""
    if not isinstance(returned, tuple) or len(returned) != 2:
        raise place.bug(f"it returned {reprlib.repr(returned)}, not 2 values", "Return observation, info.")
    shown, info = returned
    return _observation(shown, place), _info(info, place)


def checked_step(returned: object, place: Place) -> Step:
    """The result of a step; raises `EnvironmentBug`, and `NonFinite` for the reward. The reward of a masked
    step counts for nothing and is given as 0."""
    if not isinstance(returned, tuple) or len(returned) != 5:
        raise place.bug(
            f"it returned {reprlib.repr(returned)}, not 5 values",
            "Return observation, reward, terminated, truncated, info.",
        )
    shown, reward, terminated, truncated, info = returned
    checked = _info(info, place)
    return (
        _observation(shown, place),
        0.0 if checked.get("mask") else _reward(reward, place),
        _flag("terminated", terminated, place),
        _flag("truncated", truncated, place),
        checked,
    )


def metrics_of(info: Info, place: Place) -> dict[str, float]:
    """`info["metrics"]` as floats; raises `EnvironmentBug` for what is no number or not finite."""
    if "metrics" not in info:
        return {}
    given = info["metrics"]
    if not isinstance(given, _DICTIONARY):
        raise place.bug(
            f'info["metrics"] is {reprlib.repr(given)}', "Make it a dictionary of names and numbers."
        )
    found = {}
    for name, value in given.items():
        number = _number(value)
        if not isinstance(name, str) or number is None or not math.isfinite(number):
            raise place.bug(
                f"the metric {name!r} is {reprlib.repr(value)}, which is no finite number",
                "Return a float, and leave a metric out where there is none.",
            )
        found[name] = number
    return found


def _reward(given: object, place: Place) -> float:
    number = _number(given)
    if number is None:
        what = f"the reward is {reprlib.repr(given)}, which is no number"
        raise place.bug(what, "Return a float, as in float(right).")
    if not math.isfinite(number):
        raise NonFinite(place.words(f"the reward is {number}", "Return a finite float."))
    return number


def _number(given: object) -> float | None:
    """The number as a float, NumPy's included; None for what is none, or too large to be a float."""
    if type(given) is float:  # asking for a Real is slow, and this is what most steps return
        return given
    if isinstance(given, bool) or not isinstance(given, Real):
        return None
    try:
        return float(given)
    except (OverflowError, TypeError, ValueError):
        return None


def _flag(name: str, given: object, place: Place) -> bool:
    if not isinstance(given, bool | np.bool_):
        raise place.bug(f"{name} is {reprlib.repr(given)}", "Return True or False there.")
    return bool(given)


def _observation(given: object, place: Place) -> Observation:
    messages = given.get("messages") if isinstance(given, _DICTIONARY) else None
    if not isinstance(given, _DICTIONARY) or not isinstance(messages, list | tuple):
        raise place.bug(f"the observation is {reprlib.repr(given)}", _SHOWN)
    for message in messages:
        if not is_message(message):
            raise place.bug(
                f"the message {reprlib.repr(message)} of the observation has no role and content", _SHOWN
            )
    images = tuple(given.get("images", ()))
    if len(images) != (wanted := count_images(messages)):
        raise place.bug(
            f"the observation has {len(images)} images, and its messages have {wanted} image parts",
            'Give each image a part {"type": "image"} in a message; pictured("user", text, png) does.',
        )
    return Observation(messages=tuple(messages), images=images)


def _info(given: object, place: Place) -> Info:
    if not isinstance(given, _DICTIONARY):
        raise place.bug(f"info is {reprlib.repr(given)}", "Return a dictionary there; {} says nothing.")
    return dict(given)
