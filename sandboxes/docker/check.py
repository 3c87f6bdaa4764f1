"""What `rz-agent doctor` says about docker: each part looked at, each fault with its remedy."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..errors import SandboxError
from ..provider import CheckResult
from ..spec import SandboxSpec
from ..tables import DockerTable
from .daemon import Daemon

if TYPE_CHECKING:
    from .provider import DockerProvider

_BOUNDS = {"MemoryLimit": "memory", "PidsLimit": "pids", "CpuCfsQuota": "cpus", "SwapLimit": "swap"}


def _failure(name: str, error: SandboxError) -> CheckResult:
    detail, _, remedy = str(error).partition("\n")
    return CheckResult(name=name, status="failed", detail=detail, remedy=remedy.strip())


def _bounds(info: dict[str, Any]) -> CheckResult:
    missing = [word for key, word in _BOUNDS.items() if info.get(key) is False]
    if not missing:
        return CheckResult(name="bounds", status="ok", detail=", ".join(_BOUNDS.values()))
    return CheckResult(
        name="bounds", status="warning", detail=f"the daemon's kernel does not bound: {', '.join(missing)}",
        remedy="Enable these cgroup controllers there (swap: swapaccount=1, or no swap at all).",
    )  # fmt: skip


def _runtime(info: dict[str, Any], table: DockerTable) -> CheckResult:
    known = sorted(info.get("Runtimes") or [])
    wanted = table.runtime or info.get("DefaultRuntime", "its default")
    if table.runtime is not None and known and table.runtime not in known:
        return CheckResult(
            name="runtime", status="failed",
            detail=f"sandbox.docker.runtime = {table.runtime!r} is unknown there",
            remedy=f"Name one of {', '.join(known)}.",
        )  # fmt: skip
    return CheckResult(name="runtime", status="ok", detail=wanted)


async def _trial(provider: DockerProvider) -> CheckResult:
    """Get the image, make a sandbox, run a cell, close it."""
    try:
        async with await provider.create(SandboxSpec()) as sandbox:
            result = await sandbox.python("6 * 7", session="check")
    except SandboxError as error:
        return _failure("trial sandbox", error)
    if result.stdout != b"42\n":
        return CheckResult(
            name="trial sandbox", status="failed", detail=f"6 * 7 gave {result.text!r}",
            remedy="Try another sandbox.docker.image.",
        )  # fmt: skip
    return CheckResult(name="trial sandbox", status="ok", detail="made, ran a cell, closed")


async def check(provider: DockerProvider, daemon: Daemon, table: DockerTable) -> list[CheckResult]:
    """Every part, then a trial when nothing failed."""
    try:
        version, info = await daemon.call(lambda client: (client.version(), client.info()))
    except SandboxError as error:
        return [_failure("daemon", error)]
    detail = f"{daemon.host}, version {version['Version']}, API {version['ApiVersion']}"
    results = [CheckResult(name="daemon", status="ok", detail=detail), _bounds(info), _runtime(info, table)]
    if all(result.status != "failed" for result in results):
        results.append(await _trial(provider))
    return results
