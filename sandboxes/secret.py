"""A secret by its place, never by its value: `{ env = "NAME" }` or `{ file = "PATH" }`.

A recipe is copied into every run's folder and its journal; so it says where a key is, and the key is read
when it is used. Nothing of it is printed: `str`, `repr` and the model's dump show the place.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Self

from pydantic import BaseModel, ConfigDict, model_validator

from ..errors import ConfigError

HIDDEN = "(not shown)"
_WORDS = ("key", "token", "secret", "password", "passwd", "credential", "auth")


class Secret(BaseModel):
    """Exactly one of `env` and `file`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    env: str | None = None
    file: str | None = None

    @model_validator(mode="after")
    def _one_place(self) -> Self:
        if (self.env is None) == (self.file is None):
            raise ValueError('write { env = "NAME" } or { file = "PATH" }, one of the two')
        return self

    def read(self, *, source: str, key: str) -> str:
        """The secret itself. ConfigError that names the key and the place when it is not there or empty."""
        if self.env is not None:
            value, remedy = os.environ.get(self.env, ""), f"Set it: export {self.env}=..."
        else:
            value, remedy = _content(str(self.file)), f"Write the key into {self.file}, for you alone."
        if not value:
            place = self.model_dump(exclude_none=True)
            raise ConfigError(source=source, key=key, value=place, why="has nothing in it", remedy=remedy)
        return value


def is_secret(path: Sequence[str], model: type[BaseModel]) -> bool:
    """Whether a key of a table is a secret's place, or below it: what stands there is never shown.

    A person who wrote the key itself there must not find it in the error, in a terminal or in a log.
    """
    for part in path:
        field = model.model_fields.get(part)
        inner = field.annotation if field else None
        if not (isinstance(inner, type) and issubclass(inner, BaseModel)):
            return False
        if issubclass(inner, Secret):
            return True
        model = inner
    return False


def sounds_secret(path: Sequence[str]) -> bool:
    """Whether a key that no table has, or a variable, is called like one that holds a secret.

    >>> sounds_secret(["e2b", "apikey"]), sounds_secret(["env", "HF_TOKEN"]), sounds_secret(["max_live"])
    (True, True, False)

    "[key]" is pydantic's own, for a name in a table of any names.
    """
    return any(word in part.lower() for part in path if part != "[key]" for word in _WORDS)


def _content(path: str) -> str:
    try:
        return Path(path).expanduser().read_text().strip()
    except (OSError, UnicodeDecodeError):
        return ""
