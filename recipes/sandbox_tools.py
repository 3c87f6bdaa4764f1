"""What `rz-agent sandbox ...` does: look at providers, run one command, clean up, measure.

    config_of(file, provider) -> SandboxConfig      usable(config, provider) -> the providers to ask

Invariant: whatever is opened here is closed before the function returns, and nothing is left running.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from ..errors import ConfigError, RzError
from ..sandboxes.config import SandboxConfig
from ..sandboxes.conformance import PROMISES, Outcome, try_all
from ..sandboxes.exec_result import ExecResult
from ..sandboxes.keeper import Keeper, Reaped
from ..sandboxes.ledger import Ledger
from ..sandboxes.owner import Owner
from ..sandboxes.provider import CheckResult, Provider, SandboxInfo
from ..sandboxes.registry import make_provider, provider_names, require_provider
from .recipe_file import read_toml

Say = Callable[[str], None]


def config_of(file: Path | None, provider: str | None) -> SandboxConfig:
    """The `[sandbox]` table of a file, or the defaults, with another provider where one is named."""
    tables = {} if file is None else read_toml(file)
    table = tables.get("sandbox", tables)
    if not isinstance(table, dict):
        raise ConfigError(
            source=str(file), key="sandbox", value=table, why="is not a table.", remedy="Write [sandbox]."
        )
    table = dict(table)
    if provider is not None:
        table["provider"] = provider
    config = SandboxConfig.load(table, source=str(file) if file else "command line")
    require_provider(config.provider, source=str(file) if file and provider is None else "--provider")
    return config


@asynccontextmanager
async def opened(config: SandboxConfig) -> AsyncIterator[Provider]:
    """The provider of a configuration, closed at the end."""
    provider = make_provider(config)
    try:
        yield provider
    finally:
        await provider.aclose()


async def conformance(
    config: SandboxConfig, only: str, heard: Callable[[CheckResult | Outcome], None]
) -> bool:
    """The provider's own checks, then each promise with `only` in topic or name; whether all went well."""
    chosen = [promise for promise in PROMISES if only in f"{promise.topic}: {promise.name}"]
    if not chosen:
        topics = ", ".join(dict.fromkeys(promise.topic for promise in PROMISES))
        raise ConfigError(
            source="command line", key="--only", value=only, why="is in no promise's topic or name.",
            remedy=f"Topics are {topics}; without --only all are tried, and listed.",
        )  # fmt: skip
    well = True
    async with opened(config) as provider:
        for result in await provider.check():
            heard(result)
            well = well and result.status != "failed"
        if not well:
            return False
        async for outcome in try_all(provider, chosen, config.spec()):
            heard(outcome)
            well = well and outcome.status != "broken"
    return well


def asked(config: SandboxConfig, *, named: bool) -> list[SandboxConfig]:
    """One configuration for each provider to ask: the named one, or all that are known here."""
    if named:
        return [config]
    # A desktop lists what the provider under it lists.
    names = [name for name in provider_names() if name != "desktop"]
    return [config.model_copy(update={"provider": name}) for name in dict.fromkeys([*names, config.provider])]


async def listed(configs: Sequence[SandboxConfig], say: Say) -> list[SandboxInfo]:
    """The sandboxes of each provider that answers.

    Of the others `say` hears why; the error of the only one that is asked is raised.
    """
    found: dict[tuple[str, str], SandboxInfo] = {}
    for config in configs:
        try:
            async with opened(config) as provider:
                found |= {(info.provider, info.id): info for info in await provider.live()}
        except (RzError, ImportError, OSError) as error:
            _pass_by(config, error, configs, say)
    return list(found.values())


def owner_state(info: SandboxInfo) -> str:
    """ "alive", "dead" or "unknown"."""
    owner = Owner.parse(info.owner)
    if owner is None or owner.is_elsewhere:
        return "unknown"
    return "dead" if owner.is_dead else "alive"


async def reaped(
    configs: Sequence[SandboxConfig], *, run_id: str | None, dead_owners: bool, say: Say
) -> list[tuple[str, Reaped]]:
    """What was removed, with its provider's name."""
    removed: list[tuple[str, Reaped]] = []
    for config in configs:
        try:
            async with Keeper.of(config) as keeper:
                found = await keeper.reap(run_id=run_id, dead_owners=dead_owners)
                removed += [(keeper.provider.name, one) for one in found]
                for place, number in keeper.out_of_sight().items():
                    say(
                        f"{keeper.provider.name} at {place}: {number} still written down; "
                        "ask there: rz-agent sandbox reap --sandbox FILE, which names it"
                    )
        except (RzError, ImportError, OSError) as error:
            _pass_by(config, error, configs, say)
    return removed


def unasked(configs: Sequence[SandboxConfig]) -> dict[str, int]:
    """Providers in the ledger that none of these configurations asks, and how many entries each has."""
    left: dict[str, int] = {}
    names = {config.provider for config in configs}
    for entry in Ledger().entries():
        if entry.provider not in names and entry.is_left_behind:
            left[entry.provider] = left.get(entry.provider, 0) + 1
    return left


async def run_one(
    config: SandboxConfig, argv: Sequence[str], stdin: bytes, timeout_s: float | None
) -> ExecResult:
    """One command in a sandbox made for it."""
    async with Keeper.of(config, run_id="exec") as keeper, await keeper.create(config.spec()) as sandbox:
        return await sandbox.exec(argv, stdin=stdin, timeout_s=timeout_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Milliseconds of one operation over some rounds."""

    name: str
    p50: float
    p95: float
    rounds: int


async def measured(config: SandboxConfig, rounds: int) -> list[Timing]:
    """Create and close, a command, a stateful cell, a small file, by the wall clock."""
    async with opened(config) as provider:
        spec = config.spec()

        async def create() -> None:
            async with await provider.create(spec):
                pass

        rows = [await _timed("create + close", create, max(3, rounds // 4))]
        async with await provider.create(spec) as box:
            await box.python("1", session="bench")
            data = bytes(4096)
            work: tuple[tuple[str, Callable[[], Awaitable[object]]], ...] = (
                ("exec true", lambda: box.exec(["true"])),
                ("exec python3 -I", lambda: box.exec(["python3", "-I", "-c", ""])),
                ("stateful cell", lambda: box.python("1 + 1", session="bench")),
                ("write 4 KB", lambda: box.write("bench.bin", data)),
                ("read 4 KB", lambda: box.read("bench.bin")),
            )
            for name, operation in work:
                rows.append(await _timed(name, operation, rounds))
        return rows


async def _timed(name: str, operation: Callable[[], Awaitable[object]], rounds: int) -> Timing:
    times = []
    for _ in range(rounds):
        begun = time.perf_counter()
        await operation()
        times.append(1000 * (time.perf_counter() - begun))
    p95 = statistics.quantiles(times, n=20)[18]
    return Timing(name=name, p50=statistics.median(times), p95=p95, rounds=rounds)


def _pass_by(config: SandboxConfig, error: Exception, asked: Sequence[SandboxConfig], say: Say) -> None:
    """Say why one of several could not be asked; of the only one that was named it is the answer."""
    if isinstance(error, RzError) and len(asked) == 1:
        raise error
    first = str(error).partition("\n")[0]
    say(f"{config.provider} was not asked: {first}")
