"""What `rz-agent sandbox check` says about E2B: the key, the service, the template, each with its remedy."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...errors import RzError
from ..errors import SandboxError
from ..provider import CheckResult
from ..spec import SandboxSpec
from ..tables import E2bTable

if TYPE_CHECKING:
    from .provider import E2bProvider


def _failed(name: str, error: RzError) -> CheckResult:
    detail, _, remedy = str(error).partition("\n")
    return CheckResult(name=name, status="failed", detail=detail, remedy=remedy.strip())


def _key(config: E2bTable) -> CheckResult:
    try:
        config.api_key.read(source="sandbox", key="sandbox.e2b.api_key")
    except RzError as error:
        return _failed("key", error)
    place = config.api_key.model_dump(exclude_none=True)
    return CheckResult(name="key", status="ok", detail=f"is at {place}")


async def _service(provider: E2bProvider) -> CheckResult:
    try:
        found = await provider.live()
    except SandboxError as error:
        return _failed("service", error)
    return CheckResult(name="service", status="ok", detail=f"answers; {len(found)} sandboxes of ours live")


async def _trial(provider: E2bProvider, config: E2bTable) -> list[CheckResult]:
    try:
        sandbox = await provider.create(SandboxSpec())
    except SandboxError as error:
        return [_failed("trial sandbox", error)]
    async with sandbox:
        made = CheckResult(name="trial sandbox", status="ok", detail=f"made of {config.template!r}, answers")
        try:
            cell = await sandbox.python("6 * 7", session="check")
        except SandboxError as error:
            detail, _, remedy = str(error).partition("\n")
            return [made, CheckResult(name="python", status="warning", detail=detail, remedy=remedy.strip())]
    good = cell.stdout == b"42\n"
    ran = CheckResult(
        name="python", status="ok" if good else "failed", detail=f"6 * 7 gave {cell.text.strip()}",
        remedy="" if good else "Try another sandbox.e2b.template.",
    )  # fmt: skip
    return [made, ran]


async def check(provider: E2bProvider, config: E2bTable) -> list[CheckResult]:
    """The key; with one the service; with that a trial."""
    results = [_key(config)]
    if results[-1].status == "ok":
        results.append(await _service(provider))
    if results[-1].status == "ok" and len(results) > 1:
        results += await _trial(provider, config)
    return results
