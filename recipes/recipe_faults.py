"""Turns what pydantic found wrong in a recipe into one ConfigError that a person can act on."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from ..errors import ConfigError
from ..sandboxes.secret import HIDDEN, is_secret

_KINDS = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "string_type": 'a "string"',
    "dict_type": "a [table]",
    "model_type": "a [table]",
    "list_type": "an [array]",
    "tuple_type": "an [array]",
}

_LIMITS = {"gt": "above", "ge": "at least", "lt": "below", "le": "at most"}


def first_fault(error: ValidationError, model: type[BaseModel], source: str) -> ConfigError:
    """The first fault, unknown keys before wrong values: a misspelt key explains a missing one."""
    faults = sorted(error.errors(), key=lambda fault: fault["type"] != "extra_forbidden")
    fault = faults[0]
    path = [str(part) for part in fault["loc"] if not str(part).startswith(("function-", "tagged-"))]
    more = f" ({len(faults) - 1} more after this one.)" if len(faults) > 1 else ""
    shown = HIDDEN if is_secret(path, model) else fault["input"]
    if fault["type"] == "extra_forbidden":
        return ConfigError(
            source=source,
            key=".".join(path),
            value=shown,
            why="is no key of a recipe.",
            remedy=_near_miss(path, model) + more,
        )
    value = "(missing)" if fault["type"] == "missing" else shown
    if isinstance(value, Mapping):
        value = "(this table)"
    return ConfigError(
        source=source, key=".".join(path), value=value, why=_reason(fault), remedy=_remedy(path, model) + more
    )


def _reason(fault: ErrorDetails) -> str:
    if kind := _KINDS.get(fault["type"]):
        return f"is not {kind}."
    message = fault["msg"].removeprefix("Value error, ")
    return f"is refused: {message[:1].lower()}{message[1:].rstrip('.')}."


def _remedy(path: Sequence[str], model: type[BaseModel]) -> str:
    named = [part for part in path if not part.isdecimal()]  # an array is described as a whole
    owner = _model_at(named[:-1], model)
    field = owner.model_fields.get(named[-1]) if owner and named else None
    said = [f"{'.'.join(named)}: {field.description}."] if field and field.description else []
    if field and (allowed := _bounds(field)):
        said.append(f"Allowed: {allowed}.")
    return " ".join(said) or "Write another value, or leave the key out to use the default."


def _bounds(field: FieldInfo) -> str:
    """The field's limits in words, such as "above 0 and at most 1"; empty where it has none."""
    limits = (
        f"{words} {_plain(getattr(constraint, name))}"
        for constraint in field.metadata
        for name, words in _LIMITS.items()
        if hasattr(constraint, name)
    )
    return " and ".join(limits)


def _plain(limit: float) -> str:
    return str(limit) if isinstance(limit, int) else f"{limit:g}"


def _near_miss(path: Sequence[str], model: type[BaseModel]) -> str:
    """What the writer probably meant: a near name in the same table, or the same name in another."""
    owner = _model_at(path[:-1], model)
    siblings = list(owner.model_fields) if owner else []
    prefix = ".".join([*path[:-1], ""]) if path[:-1] else ""
    everywhere = _all_keys(model)
    if same := [key for key in everywhere if key.rpartition(".")[2] == path[-1]]:
        return f"Did you mean {' or '.join(same)}?"
    if close := difflib.get_close_matches(path[-1], siblings, n=1, cutoff=0.6):
        return f"Did you mean {prefix}{close[0]}?"
    last = {key.rpartition(".")[2]: key for key in everywhere}
    if close := difflib.get_close_matches(path[-1], list(last), n=1, cutoff=0.75):
        return f"Did you mean {last[close[0]]}?"
    return f"{'Keys of [' + prefix.rstrip('.') + ']' if prefix else 'Keys'}: {', '.join(siblings)}."


def _submodel(annotation: Any) -> type[BaseModel] | None:
    for candidate in (annotation, *get_args(annotation)):
        if isinstance(candidate, type) and issubclass(candidate, BaseModel):
            return candidate
    return None


def _model_at(path: Sequence[str], model: type[BaseModel]) -> type[BaseModel] | None:
    here: type[BaseModel] | None = model
    for part in path:
        field = here.model_fields.get(part) if here else None
        here = _submodel(field.annotation) if field else None
    return here


def _all_keys(model: type[BaseModel], prefix: str = "") -> list[str]:
    keys: list[str] = []
    for name, field in model.model_fields.items():
        inner = _submodel(field.annotation)
        keys.extend(_all_keys(inner, f"{prefix}{name}.") if inner else [f"{prefix}{name}"])
    return keys
