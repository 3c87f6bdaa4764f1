"""What a caller asks of one sandbox: bounds of each program, bounds of the whole, image, network, life.

Two unused sandboxes of an equal spec are interchangeable; `SandboxSpec.key` is what the warm pool sorts by.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Literal

NetworkMode = Literal["none", "open"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Bounds of one program: a command, or a session with everything it starts.

    memory_mb      MiB   all its processes together with a memory cgroup, else the address space of each
    pids           1     processes and threads
    disk_mb        MiB   files in its /box, /tmp and /dev/shm (held in memory, counted there too)
    cpu_s          s     CPU time of each of its processes over their life
    open_files     1     file descriptors of each process
    timeout_s      s     wall time of a call that names none
    output_bytes   B     kept of stdout, and as many of stderr: the first and the last half
    flood_bytes    B     output after which the program is stopped
    """

    memory_mb: int = 512
    pids: int = 64
    disk_mb: int = 64
    cpu_s: int = 300
    open_files: int = 256
    timeout_s: float = 10.0
    output_bytes: int = 65536
    flood_bytes: int = 16 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Total:
    """Bounds of a whole sandbox, enforced where there are cgroups: MiB, processes and threads, cores."""

    memory_mb: int = 4096
    pids: int = 4096
    cpus: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxSpec:
    """One sandbox.

    image       for providers with images; None is the one that the recipe names
    network     "none", or "open" where the provider can
    env         variables of every program, besides PATH, HOME and LANG; nothing else of the host gets in
    owned       folders of the image that programs own, in a writable copy; for providers with images
    screen      width and height in pixels of its desktop; None is the recipe's
    lifetime_s  s, after which it ends unless it was kept alive; a `Keeper` keeps alive what is held
    labels      travel to providers that can list by them; they say whose it is, not what it is

    >>> SandboxSpec(labels={"rz.run": "a"}).key == SandboxSpec(labels={"rz.run": "b"}).key
    True
    """

    limits: Limits = field(default_factory=Limits)
    total: Total = field(default_factory=Total)
    network: NetworkMode = "none"
    image: str | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    owned: tuple[str, ...] = ()
    screen: tuple[int, int] | None = None
    lifetime_s: float = 3600.0
    labels: Mapping[str, str] = field(default_factory=dict)

    @property
    def key(self) -> str:
        """A hash of everything but the labels."""
        asked = asdict(self) | {"labels": None}
        return hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()[:16]


def roomier(spec: SandboxSpec, room: Mapping[str, int]) -> SandboxSpec:
    """The spec with each bound of `room` that is a command's default raised to it, within the total.

    >>> small = SandboxSpec(limits=Limits(memory_mb=700))
    >>> raised = roomier(small, {"memory_mb": 2048, "pids": 1024}).limits
    >>> raised.memory_mb, raised.pids
    (700, 1024)
    """
    usual = Limits()
    # a full disk is memory, of four folders, beside which the agent has to live
    disk_mb = max(usual.disk_mb, (spec.total.memory_mb - 64) // 4)
    whole = {"memory_mb": spec.total.memory_mb, "pids": spec.total.pids, "disk_mb": disk_mb}
    raised = {
        key: min(value, whole.get(key, value))
        for key, value in room.items()
        if getattr(spec.limits, key) == getattr(usual, key)
    }
    return replace(spec, limits=replace(spec.limits, **raised))
