"""What a container is asked to be: the agent as its first process, and as little else as it can do with.

Its root file system is read-only; /box, /tmp, /dev/shm and the sessions' folders are bounded memory, and the
volumes of its image are empty: what else could be written to would be bounded by nothing. Folders that its
programs own (`SandboxSpec.owned`) are copies on the daemon's disk, which nothing bounds. Root in it is the
agent, with seven capabilities: to give each program a uid of its own, and to end it and its files.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from ..agent.boot import BOOT
from ..inside.confine import inodes
from ..inside.container import SESSIONS
from ..owner import EXPIRES_LABEL, LABEL, Owner
from ..spec import SandboxSpec
from ..tables import DockerTable
from .image import Image

# SETPCAP: to take every capability from a program, out of the set that exec could give back as well
# FOWNER: to remove a session's files whatever it made of their folders
_CAPABILITIES = ("SETUID", "SETGID", "SETPCAP", "KILL", "CHOWN", "DAC_OVERRIDE", "FOWNER")


def labels(spec: SandboxSpec) -> Mapping[str, str]:
    """Whose it is, and until when."""
    until = f"{time.time() + spec.lifetime_s:.0f}"
    return {**spec.labels, LABEL: str(Owner.here()), EXPIRES_LABEL: until}


def wish(client: Any, name: str, image: Image, spec: SandboxSpec, table: DockerTable) -> dict[str, Any]:
    """The arguments of `create_container`."""
    bounds = f"size={spec.limits.disk_mb}m,nr_inodes={inodes(spec.limits.disk_mb)}"
    bounded = {**dict.fromkeys(("/box", "/tmp", SESSIONS), f"{bounds},exec"), "/dev/shm": bounds}
    host = client.create_host_config(
        auto_remove=True,
        network_mode="none" if spec.network == "none" else "bridge",
        cap_drop=["ALL"],
        cap_add=list(_CAPABILITIES),
        security_opt=["no-new-privileges"],
        mem_limit=f"{spec.total.memory_mb}m",
        memswap_limit=f"{spec.total.memory_mb}m",
        pids_limit=spec.total.pids,
        nano_cpus=None if spec.total.cpus is None else int(spec.total.cpus * 1e9),
        read_only=True,
        tmpfs={**dict.fromkeys(set(image.volumes) - set(spec.owned), "ro,size=4k"), **bounded},
        binds=[f"{there}:{inside}:ro" for there, inside in table.volumes.items()],
        runtime=table.runtime,
        log_config={"type": "none"},
    )
    return {
        "image": image.id,
        "name": name,
        "entrypoint": [table.python, "-I", "-S", "-u", "-c", BOOT, "0,1"],
        "command": [],
        # of no name: the daemon copies what the image has there, and removes it with the container
        "volumes": list(spec.owned),
        "user": "0:0",
        "working_dir": "/",
        "hostname": "sandbox",
        "stdin_open": True,
        "labels": dict(labels(spec)),
        "healthcheck": {"test": ["NONE"]} if image.has_healthcheck else None,
        "host_config": host,
    }
