"""The `[sandbox]` table of a recipe: what a person may write, and why something cannot be.

Every key that is accepted works. `SandboxConfig.load` turns a table into the model and every mistake into
a `ConfigError` that names the key, its value and the remedy.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, Self

from pydantic import BaseModel, Field, ValidationError, model_validator

from ..errors import ConfigError
from .secret import HIDDEN, is_secret, sounds_secret
from .spec import Limits, SandboxSpec, Total
from .tables import (
    DesktopTable,
    DockerTable,
    E2bTable,
    LimitsTable,
    LocalTable,
    NetworkTable,
    Table,
    TotalTable,
)

_FOLDERS, _AGENT_MB = 4, 64  # what programs may fill; an agent that has no room for an answer is killed
START_S = 60.0  # that a sandbox may take to start
# What a person has to write, by the type of what pydantic says; for other types it says it well.
_KINDS = {
    **dict.fromkeys(("int_type", "int_parsing", "int_from_float"), "a whole number"),
    **dict.fromkeys(("float_type", "float_parsing"), "a number"),
    **dict.fromkeys(("bool_type", "bool_parsing"), "true or false"),
    **dict.fromkeys(("dict_type", "model_type", "model_attributes_type"), "a table"),
    "string_type": "text in quotes",
    "tuple_type": "an [array]",
}


class _Clash(ValueError):
    """Two keys that cannot both hold."""

    def __init__(self, key: str, value: object, remedy: str) -> None:
        super().__init__(remedy)
        self.key, self.value, self.remedy = key, value, remedy


class SandboxConfig(Table):
    """`[sandbox]`.

    provider             "local", "docker", "e2b", "desktop", an installed plug-in, or "package.module:Class"
    shared               sandboxes of the run; episodes share them, each in a session of its own
    lifetime_s           s that a sandbox lives unless it is renewed, as a held one is at a third of it
    scoring_buffer_s     s of that life kept for scoring an episode that ran to its deadline
    max_live             sandboxes of this provider that all runs of this user on this machine hold together
    max_starting         of those, how many may be starting at once
    creates_per_s        sandboxes that they ask for in a second; left out: any number
    warm                 ready sandboxes kept for who asks next; a used one is never handed out again
    on_infra_failure     "mask" the episode, "retry" it once on a new sandbox and then mask, or "stop" the run
    infra_failed_share   of the last episodes that may fail for the place's sake before the run stops
    env                  variables of every program, in plain words: a recipe is copied into its runs
    options              of a provider of another package, which judges them itself
    """

    provider: str = "local"
    shared: int = Field(default=1, ge=1)
    lifetime_s: float = Field(default=3600.0, gt=0)
    scoring_buffer_s: float = Field(default=300.0, ge=0)
    max_live: int = Field(default=64, ge=1)
    max_starting: int = Field(default=8, ge=1)
    creates_per_s: float | None = Field(default=None, gt=0)
    warm: int = Field(default=0, ge=0)
    on_infra_failure: Literal["mask", "retry", "stop"] = "mask"
    infra_failed_share: float = Field(default=0.25, gt=0, le=1)
    limits: LimitsTable = LimitsTable()
    total: TotalTable = TotalTable()
    network: NetworkTable = NetworkTable()
    env: dict[str, str] = Field(default_factory=dict)
    local: LocalTable = LocalTable()
    docker: DockerTable = DockerTable()
    e2b: E2bTable = E2bTable()
    desktop: DesktopTable = DesktopTable()
    options: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _options_are_for_another_provider(self) -> Self:
        own = {"local", "docker", "e2b", "desktop"} & {self.provider}
        if self.options and own:
            remedy = f"They are for a provider of another package: write [sandbox.{self.provider}]."
            raise _Clash("sandbox.options", HIDDEN, remedy)  # there may be a key in it
        return self

    @model_validator(mode="after")
    def _variables_can_be_set(self) -> Self:
        for name, value in self.env.items():
            if not name or "=" in name or "\0" in name + value:
                remedy = 'A variable has a name without "=", and no NUL in it or in its value.'
                raise _Clash("sandbox.env", {name: HIDDEN}, remedy)
        return self

    @model_validator(mode="after")
    def _one_program_fits(self) -> Self:
        for key in ("memory_mb", "pids"):
            one, whole = getattr(self.limits, key), getattr(self.total, key)
            if one > whole:
                remedy = f"One program may not have more than the sandbox, total.{key} = {whole}: raise that."
                raise _Clash(f"sandbox.limits.{key}", one, remedy)
        return self

    @model_validator(mode="after")
    def _files_fit(self) -> Self:
        need = _FOLDERS * self.limits.disk_mb + _AGENT_MB
        if need > self.total.memory_mb and self.provider != "e2b":
            remedy = (
                f"Files are memory, in {_FOLDERS} folders, beside which the agent needs {_AGENT_MB} MB: "
                f"lower it, or raise total.memory_mb to {need}."
            )
            raise _Clash("sandbox.limits.disk_mb", self.limits.disk_mb, remedy)
        return self

    @model_validator(mode="after")
    def _all_fit_at_once(self) -> Self:
        held = self.shared + self.warm
        if held > self.max_live:
            remedy = f"shared + warm = {held} are held at once: raise it to that, or lower those."
            raise _Clash("sandbox.max_live", self.max_live, remedy)
        return self

    @property
    def needed_s(self) -> float:
        """Seconds of a sandbox's life that are not the episode's own: to start it, and to score after it."""
        return START_S + self.scoring_buffer_s

    @classmethod
    def load(cls, table: Mapping[str, Any], *, source: str) -> SandboxConfig:
        """The table as TOML gives it; ConfigError for the first thing that is wrong in it."""
        try:
            return cls.model_validate(dict(table))
        except ValidationError as error:
            raise _explain(error, source) from None

    def spec(self, labels: Mapping[str, str] | None = None) -> SandboxSpec:
        """What to ask a provider for."""
        return SandboxSpec(
            limits=Limits(**self.limits.model_dump()),
            total=Total(**self.total.model_dump()),
            network=self.network.mode,
            env=self.env,
            lifetime_s=self.lifetime_s,
            labels=dict(labels or {}),
        )


def _explain(error: ValidationError, source: str) -> ConfigError:
    first = error.errors(include_url=False)[0]
    path = [str(part) for part in first["loc"]]
    key = ".".join(["sandbox", *path])
    hidden = is_secret(path, SandboxConfig) or sounds_secret(path)
    value = HIDDEN if hidden else first["input"]
    if first["type"] == "extra_forbidden":
        why, remedy = "is not a key of this table.", f"Remove it. {_known(path[:-1])}"
        return ConfigError(source=source, key=key, value=value, why=why, remedy=remedy)
    clash = first.get("ctx", {}).get("error")
    if isinstance(clash, _Clash):
        return ConfigError(source=source, key=clash.key, value=clash.value, remedy=clash.remedy)
    if hidden and first["type"] == "model_type":
        remedy = f'Write {path[-1]} = {{ env = "NAME" }} or {{ file = "PATH" }}; the secret itself stays out.'
        return ConfigError(source=source, key=key, value=value, why="is not a secret's place.", remedy=remedy)
    if kind := _KINDS.get(first["type"]):
        where = f": [{key}]" if kind == "a table" else ""
        return ConfigError(
            source=source, key=key, value=value, why=f"is not {kind}.", remedy=f"Write {kind}{where}."
        )
    return ConfigError(source=source, key=key, value=value, remedy=_said(first["msg"]))


def _said(message: str) -> str:
    """
    >>> _said("Input should be greater than 0"), _said("Input should be 'a' or 'b'")
    ('Use a number greater than 0.', "Use 'a' or 'b'.")
    """
    wanted = message.removeprefix("Input should be ")
    if wanted == message:
        return f"{message.removeprefix('Value error, ')}."
    number = "a number " if wanted.startswith(("greater", "less")) else ""
    return f"Use {number}{wanted}."


def _known(path: list[str]) -> str:
    table: type[BaseModel] = SandboxConfig
    for part in path:
        inner = table.model_fields[part].annotation
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            table = inner
    return "Known keys: " + ", ".join(table.model_fields) + "."
