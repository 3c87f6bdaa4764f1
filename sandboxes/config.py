"""The `[sandbox]` table of a recipe: what a person may write, and why something cannot be.

Every key that is accepted works. `SandboxConfig.load` turns a table into the model and every mistake into
a `ConfigError` that names the key, its value and the remedy.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from ..errors import ConfigError
from .provider import Limits, SandboxSpec, Total


class _Table(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class LimitsTable(_Table):
    """`[sandbox.limits]`: of one command or one session; see `provider.Limits` for units."""

    memory_mb: int = Field(default=512, ge=16)
    pids: int = Field(default=64, ge=1)
    disk_mb: int = Field(default=64, ge=1)
    cpu_s: int = Field(default=300, ge=1)
    open_files: int = Field(default=256, ge=16)
    timeout_s: float = Field(default=10.0, gt=0)
    output_bytes: int = Field(default=65536, ge=256)
    flood_bytes: int = Field(default=16 << 20, ge=4096)


class TotalTable(_Table):
    """`[sandbox.total]`: of one whole sandbox; see `provider.Total`."""

    memory_mb: int = Field(default=4096, ge=64)
    pids: int = Field(default=4096, ge=16)
    cpus: float | None = Field(default=None, gt=0)


class NetworkTable(_Table):
    """`[sandbox.network]`."""

    mode: Literal["none"] = "none"


class LocalTable(_Table):
    """`[sandbox.local]`: how this machine isolates, and with which Python.

    isolation   "namespaces" needs bubblewrap; "none" runs the policy's code as this user, with rlimits only
    python      the interpreter inside; its own folders are shown read-only as well
    read_only   folders of this machine that programs may see
    preload     modules that every session finds already imported
    """

    isolation: Literal["namespaces", "none"] = "namespaces"
    python: str = "/usr/bin/python3"
    read_only: tuple[str, ...] = ("/usr",)
    preload: tuple[str, ...] = (
        "math",
        "random",
        "itertools",
        "collections",
        "functools",
        "fractions",
        "decimal",
    )


class _Clash(ValueError):
    """Two keys that cannot both hold."""

    def __init__(self, key: str, value: object, remedy: str) -> None:
        super().__init__(remedy)
        self.key, self.value, self.remedy = key, value, remedy


class SandboxConfig(_Table):
    """`[sandbox]`.

    provider             "local", the name of an installed plug-in, or "package.module:Class"
    shared               sandboxes of the run; episodes share them, each in a session of its own
    on_infra_failure     "mask" the episode, "retry" it once on a new sandbox and then mask, or "stop" the run
    infra_failed_share   of the last episodes that may fail for the place's sake before the run stops
    """

    provider: str = "local"
    shared: int = Field(default=1, ge=1)
    on_infra_failure: Literal["mask", "retry", "stop"] = "mask"
    infra_failed_share: float = Field(default=0.25, gt=0, le=1)
    limits: LimitsTable = LimitsTable()
    total: TotalTable = TotalTable()
    network: NetworkTable = NetworkTable()
    local: LocalTable = LocalTable()

    @model_validator(mode="after")
    def _one_program_fits(self) -> Self:
        for key in ("memory_mb", "pids"):
            one, whole = getattr(self.limits, key), getattr(self.total, key)
            if one > whole:
                remedy = f"One program may not have more than the sandbox, total.{key} = {whole}: raise that."
                raise _Clash(f"sandbox.limits.{key}", one, remedy)
        return self

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
            labels=dict(labels or {}),
        )


# Keys of providers and modes to come: a recipe written for them should hear that, not "unknown key".
_LATER = ("docker", "e2b", "desktop", "lifetime_s", "scoring_buffer_s", "max_live", "max_starting", "warm")


def _explain(error: ValidationError, source: str) -> ConfigError:
    first = error.errors(include_url=False)[0]
    path = [str(part) for part in first["loc"]]
    key = ".".join(["sandbox", *path])
    if first["type"] == "extra_forbidden":
        later = path[0] in _LATER or path[-2:] == ["limits", "cpus"]
        why = "is not supported by this version" if later else "is not a key of this table"
        return ConfigError(
            source=source, key=key, value=first["input"], why=why, remedy=f"Remove it. {_known(path[:-1])}"
        )
    clash = first.get("ctx", {}).get("error")
    if isinstance(clash, _Clash):
        return ConfigError(source=source, key=clash.key, value=clash.value, remedy=clash.remedy)
    return ConfigError(source=source, key=key, value=first["input"], remedy=f"{first['msg']}.")


def _known(path: list[str]) -> str:
    table: type[BaseModel] = SandboxConfig
    for part in path:
        inner = table.model_fields[part].annotation
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            table = inner
    return "Known keys: " + ", ".join(table.model_fields) + "."
