"""What a repository and its tests need of a sandbox: the recipe's spec, raised, and never with a network."""

from __future__ import annotations

from dataclasses import replace

from ...sandboxes.spec import SandboxSpec, roomier
from ..task import Resources
from .instance import Instance
from .options import SWEBenchProOptions

# In place of what is the default for a command: a repository with its history, and all of a test suite.
ROOM = {
    "memory_mb": 4096, "pids": 1024, "disk_mb": 2048, "cpu_s": 7200, "open_files": 4096,
    "flood_bytes": 64 << 20,
}  # fmt: skip
FOLDERS = ("/root",)  # of a published image, besides its repository: its caches are there, made by root


def room(
    spec: SandboxSpec,
    instance: Instance,
    options: SWEBenchProOptions,
    resources: Resources,
) -> SandboxSpec:
    """The spec of the sandbox for one instance."""
    asked = replace(spec, network="none")
    if resources.cpus is not None:
        asked = replace(asked, total=replace(asked.total, cpus=resources.cpus))
    if (memory := resources.memory_mb) is not None:
        whole = max(memory, asked.total.memory_mb)
        asked = replace(
            asked,
            limits=replace(asked.limits, memory_mb=memory),
            total=replace(asked.total, memory_mb=whole),
        )
    if resources.disk_mb is not None:
        asked = replace(asked, limits=replace(asked.limits, disk_mb=resources.disk_mb))
    if instance.local is None:
        owned = (options.repo_path, *FOLDERS)
        asked = replace(asked, image=instance.image(options.images), owned=owned)
    return roomier(asked, ROOM)
