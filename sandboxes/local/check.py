"""What `rz-agent doctor` says about local sandboxes: each part looked at, each fault with its remedy."""

from __future__ import annotations

import asyncio
import os
import shutil
from typing import TYPE_CHECKING

from ..agent.interpreter import inspect
from ..errors import SandboxError
from ..inside.confine import syscall_filter
from ..provider import CheckResult
from ..spec import Limits, SandboxSpec
from ..tables import LocalTable
from .bubblewrap import BINARY
from .hierarchy import find_hierarchies

if TYPE_CHECKING:
    from .provider import LocalProvider


def _bubblewrap() -> CheckResult:
    from .provider import INSTALL

    found = shutil.which(BINARY)
    if found is None:
        return CheckResult(
            name="bubblewrap", status="failed", detail=f"{BINARY} is not on PATH",
            remedy=f'{INSTALL}; or sandbox.local.isolation = "none" (no isolation at all)',
        )  # fmt: skip
    return CheckResult(name="bubblewrap", status="ok", detail=found)


def _python(config: LocalTable) -> CheckResult:
    try:
        found = inspect(config.python)
    except SandboxError as error:
        detail, _, remedy = str(error).partition("\n")
        return CheckResult(name="python", status="failed", detail=detail, remedy=remedy.strip())
    version = ".".join(map(str, found.version))
    return CheckResult(name="python", status="ok", detail=f"{config.python}, version {version}")


def _folders(config: LocalTable) -> CheckResult:
    missing = [folder for folder in config.read_only if not os.path.isdir(folder)]
    if missing:
        return CheckResult(
            name="folders", status="failed", detail=f"not a folder: {', '.join(missing)}",
            remedy="Correct sandbox.local.read_only.",
        )  # fmt: skip
    return CheckResult(name="folders", status="ok", detail=", ".join(config.read_only))


def _cgroups() -> CheckResult:
    found = find_hierarchies()
    controllers = sorted({c for hierarchy in found for c in hierarchy.controllers})
    if {"memory", "pids"} <= set(controllers):
        versions = "/".join(sorted({str(hierarchy.version) for hierarchy in found}))
        return CheckResult(
            name="cgroups", status="ok", detail=f"version {versions}: {', '.join(controllers)}"
        )
    return CheckResult(
        name="cgroups",
        status="warning",
        detail=f"controllers that can be used: {', '.join(controllers) or 'none'}",
        remedy="Memory is bounded for each process only, not for a program. Run as root, or in a group that "
        "is lent to you (systemd-run --user --scope -p Delegate=yes); as root of a container, with its "
        "/sys/fs/cgroup writable (docker run --privileged).",
    )


def _filter() -> CheckResult:
    if syscall_filter() is None:
        return CheckResult(
            name="system calls", status="warning", detail="no filter is known for this processor",
            remedy="Programs keep the kernel's own checks only; x86_64 has the filter.",
        )  # fmt: skip
    return CheckResult(name="system calls", status="ok", detail="seccomp filter")


async def _trial(provider: LocalProvider) -> CheckResult:
    """Make a sandbox, run a cell, close it."""
    try:
        sandbox = await provider.create(SandboxSpec(limits=Limits()))
        async with sandbox:
            result = await sandbox.python("6 * 7", session="check")
    except SandboxError as error:
        detail, _, remedy = str(error).partition("\n")
        return CheckResult(name="trial sandbox", status="failed", detail=detail, remedy=remedy.strip())
    if result.stdout != b"42\n":
        return CheckResult(
            name="trial sandbox", status="failed", detail=f"6 * 7 gave {result.text!r}",
            remedy="Try another sandbox.local.python.",
        )  # fmt: skip
    return CheckResult(name="trial sandbox", status="ok", detail="made, ran a cell, closed")


def _bare() -> CheckResult:
    return CheckResult(
        name="isolation", status="warning", detail='sandbox.local.isolation = "none"',
        remedy="The policy's code runs as this user. Use a machine that holds nothing of value.",
    )  # fmt: skip


async def check(provider: LocalProvider, config: LocalTable) -> list[CheckResult]:
    """Every part, then a trial when nothing failed."""
    isolated = config.isolation == "namespaces"
    first = _bubblewrap() if isolated else _bare()
    looks = await asyncio.to_thread(lambda: [_python(config), _folders(config), _cgroups()])
    results = [first, *looks]
    if isolated:
        results.append(_filter())
    if all(result.status != "failed" for result in results):
        results.append(await _trial(provider))
    return results
