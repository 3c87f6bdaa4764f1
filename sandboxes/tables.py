"""The tables below `[sandbox]`, one a provider: what a person may write for it.

Every key that is accepted works. `config.py` puts them together and explains every mistake.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from .secret import Secret
from .spec import NetworkMode

PRELOAD = ("math", "random", "itertools", "collections", "functools", "fractions", "decimal")


Names = Annotated[tuple[str, ...], Field(strict=False)]  # TOML has lists


class Table(BaseModel):
    """A table: unknown keys and values of another type are refused, nothing changes once it is read."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class LimitsTable(Table):
    """`[sandbox.limits]`: of one command or one session; see `spec.Limits` for units."""

    memory_mb: int = Field(default=512, ge=16, le=1 << 24)
    pids: int = Field(default=64, ge=1, le=1 << 20)
    disk_mb: int = Field(default=64, ge=1, le=1 << 20)
    cpu_s: int = Field(default=300, ge=1, le=1 << 30)
    open_files: int = Field(default=256, ge=16, le=1 << 20)
    timeout_s: float = Field(default=10.0, gt=0)
    output_bytes: int = Field(default=65536, ge=256, le=64 << 20)
    flood_bytes: int = Field(default=16 << 20, ge=4096, le=1 << 40)


class TotalTable(Table):
    """`[sandbox.total]`: of one whole sandbox; see `spec.Total`."""

    memory_mb: int = Field(default=4096, ge=64, le=1 << 24)
    pids: int = Field(default=4096, ge=16, le=1 << 21)
    cpus: float | None = Field(default=None, ge=0.01)


class NetworkTable(Table):
    """`[sandbox.network]`: "none", or "open" where the provider can give one."""

    mode: NetworkMode = "none"


class LocalTable(Table):
    """`[sandbox.local]`: how this machine isolates, and with which Python.

    isolation   "namespaces" needs bubblewrap; "none" runs the policy's code as this user, with rlimits only
    python      the interpreter inside; its own folders are shown read-only as well
    read_only   folders of this machine that programs may see
    preload     modules that every session finds already imported
    """

    isolation: Literal["namespaces", "none"] = "namespaces"
    python: str = "/usr/bin/python3"
    read_only: Names = ("/usr",)
    preload: Names = PRELOAD


def _absolute(path: str) -> str:
    if not path.startswith("/"):
        raise ValueError('Write absolute paths of folders, {"/usr" = "/usr"}')
    return path


Folder = Annotated[str, AfterValidator(_absolute)]


class DockerTable(Table):
    """`[sandbox.docker]`: a docker daemon, or podman's socket.

    host      of the daemon: unix:///path, or tcp://host:port, which is not encrypted
    image     with Python of at least 3.9 in it; pulled when it is not there
    pull      "missing" images, "never", or "always" for what a tag means today
    runtime   "runc" and others that the daemon knows; None is its default
    python    the interpreter in the image that runs the agent
    volumes   folders of the daemon's machine shown read-only: {"/usr" = "/usr"}
    preload   modules of that interpreter that every session finds already imported
    """

    host: str = "unix:///var/run/docker.sock"
    image: str = "python:3.11-slim"
    pull: Literal["missing", "never", "always"] = "missing"
    runtime: str | None = None
    python: str = "python3"
    volumes: dict[Folder, Folder] = {}
    preload: Names = PRELOAD


class E2bTable(Table):
    """`[sandbox.e2b]`: the hosted service, or one's own at `domain`.

    template        what sandboxes are made of; needs python3 and unshare
    sessions        stateful Python by our own "agent", as everywhere, or by E2B's code "interpreter", which
                    needs template = "code-interpreter-v1" or one built on it
    api_key         where the key is: {env = "NAME"} or {file = "PATH"}; never the key itself
    domain          of the service; api_url and sandbox_url name other addresses of it
    preload         modules that every session of the agent's finds already imported
    ttl_s           s that a sandbox lives without being kept alive
    request_s       s that one request to the service may take
    """

    template: str = "base"
    sessions: Literal["agent", "interpreter"] = "agent"
    api_key: Secret = Secret(env="E2B_API_KEY")
    domain: str | None = None
    api_url: str | None = None
    sandbox_url: str | None = None
    preload: Names = PRELOAD
    ttl_s: float = Field(default=60.0, ge=15)
    request_s: float = Field(default=30.0, gt=0)


Side = Annotated[int, Field(ge=64, le=8192)]  # pixels


class DesktopTable(Table):
    """`[sandbox.desktop]`: a screen, a window manager and input devices inside a sandbox.

    over       the provider whose sandboxes hold the desktops; its own table applies
    size       width and height in pixels
    settle_s   s between an action and the next look: programs draw and take input with a delay
    a11y       whether the accessibility tree can be asked for (programs start slower)
    python     the interpreter in the sandbox that holds the desktop, at least 3.9
    """

    over: Literal["local", "docker", "e2b"] = "local"
    size: Annotated[tuple[Side, Side], Field(strict=False)] = (1280, 800)
    settle_s: float = Field(default=0.5, ge=0)
    a11y: bool = False
    python: str = "python3"
