"""What a user may set on an environment: a pydantic model, so a wrong key or value is refused by name."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ..errors import ConfigError
from .tool_calls import FormatName


class EnvOptions(BaseModel):
    """The options every environment has; subclass it for more.

    taskset           name of the tasks: a `.jsonl` file, `reasoning-gym:NAME`, `pkg.mod:attribute`;
                      None: the environment's own
    max_turns         actions after which an episode is truncated; None: the environment's own
    tools_in_prompt   whether the chat template is given the tools' schemas
    tool_format       how the policy writes its tool calls: "hermes" (JSON) or "xml" (functions and
                      parameters); a run sets it by the model (`model.tool_format` of its recipe)
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    taskset: str | None = None
    max_turns: int | None = Field(default=None, ge=1)
    tools_in_prompt: bool = True
    tool_format: FormatName = "hermes"


Options = TypeVar("Options", bound=EnvOptions)


def parse_options(model: type[Options], given: Mapping[str, Any], *, source: str) -> Options:
    """Validated options; the first fault as a `ConfigError` that names key, value and remedy."""
    if not (isinstance(model, type) and issubclass(model, EnvOptions)):
        remedy = "Write class MyOptions(EnvOptions): ... and Options = MyOptions."
        raise ConfigError(source=source, key="Options", value=model, why="is no EnvOptions.", remedy=remedy)
    try:
        return model.model_validate(dict(given))
    except ValidationError as error:
        fault = error.errors(include_url=False)[0]
        key = ".".join(map(str, fault["loc"]))
        unknown = fault["type"] == "extra_forbidden"
        remedy = suggestion(key, model.model_fields, "options") if unknown else f"{fault['msg']}."
        why = "is no option" if unknown else ""
        raise ConfigError(source=source, key=key, value=fault["input"], why=why, remedy=remedy) from error


def checked_turns(turns: object, *, source: str) -> int:
    """`max_turns` as an environment's class may say it."""
    if type(turns) is int and turns >= 1:
        return turns
    remedy = "Write a whole number of 1 or more: the actions after which an episode is truncated."
    raise ConfigError(source=source, key="max_turns", value=turns, remedy=remedy)


def suggestion(wrong: str, known: Iterable[str], what: str) -> str:
    """A remedy for a name that does not exist.

    >>> suggestion("pyton", ["python", "osworld"], "environments")
    "Did you mean 'python'? The environments are: osworld, python."
    """
    names = sorted(known)
    if not names:
        return f"There are no {what}."
    near = difflib.get_close_matches(wrong, names, n=1, cutoff=0.5)
    hint = f"Did you mean {near[0]!r}? " if near else ""
    return f"{hint}The {what} are: {', '.join(names)}."
