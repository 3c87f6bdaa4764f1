"""`rz-agent sandbox ...`: arguments in, one call into `recipes/sandbox_tools.py`, a table out.

Exit codes: 0 done; 1 a check failed; 2 usage or configuration; `exec` passes its program's own on.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .cli_options import table

if TYPE_CHECKING:
    from .sandboxes.conformance import Outcome
    from .sandboxes.provider import CheckResult

app = typer.Typer(
    no_args_is_help=True, rich_markup_mode=None, help="Try, list and clean up sandboxes.",
    epilog="Example: rz-agent sandbox exec -- python3 -c 'print(6 * 7)'",
)  # fmt: skip
ProviderOption = Annotated[
    str | None,
    typer.Option(
        "--provider", "-p", help="local, docker, e2b, desktop, a plug-in, or package.module:Class.",
        show_default=False,
    ),
]  # fmt: skip
FileOption = Annotated[
    Path | None,
    typer.Option("--sandbox", help="A TOML file with a [sandbox] table, or a recipe.", show_default=False),
]


@app.command(epilog="Example: rz-agent sandbox check --provider local")
def check(
    provider: ProviderOption = None,
    sandbox: FileOption = None,
    only: Annotated[str, typer.Option("--only", help="Only promises with this in their topic or name.")] = "",
) -> None:
    """Look at what a provider needs, then try all that providers promise; exit code 1 on a failure."""
    from .recipes import sandbox_tools as tools

    counts: dict[str, int] = {}

    def heard(what: CheckResult | Outcome) -> None:
        status, topic, detail, remedy = _row(what)
        counts[status] = counts.get(status, 0) + 1
        typer.echo(f"{status:<9} {topic:<10} {detail}")
        if remedy:
            typer.echo(f"{'':<20} {remedy}")

    well = asyncio.run(tools.conformance(tools.config_of(sandbox, provider), only, heard))
    typer.echo(", ".join(f"{number} {status}" for status, number in counts.items()))
    if not well:
        raise typer.Exit(1)


def _row(what: CheckResult | Outcome) -> tuple[str, str, str, str]:
    from .sandboxes.provider import CheckResult

    if isinstance(what, CheckResult):
        return what.status, "machine", f"{what.name}: {what.detail}", what.remedy
    return what.status, what.promise.topic, what.promise.name, what.detail


@app.command(epilog="Example: rz-agent sandbox ps")
def ps(provider: ProviderOption = None, sandbox: FileOption = None) -> None:
    """List the sandboxes of one provider, or of all that answer: whose they are, whether the owner runs."""
    from .recipes import sandbox_tools as tools

    named = provider is not None or sandbox is not None
    configs = tools.asked(tools.config_of(sandbox, provider), named=named)
    infos = asyncio.run(tools.listed(configs, _note))
    if not infos:
        typer.echo("no sandboxes")
        return
    rows = [("PROVIDER", "ID", "STATE", "AGE", "RUN", "OWNER")]
    for info in sorted(infos, key=lambda info: info.age_s):
        owner = f"{tools.owner_state(info)} {info.owner}".strip()
        rows.append((info.provider, info.id, info.state, _age(info.age_s), info.run_id or "-", owner))
    table(rows)


@app.command(
    "exec",
    epilog="Example: rz-agent sandbox exec --provider local -- python3 -c 'print(6 * 7)'",
    context_settings={"ignore_unknown_options": True},
)
def run(
    argv: Annotated[list[str], typer.Argument(help="The command and its arguments, after --.")],
    provider: ProviderOption = None,
    sandbox: FileOption = None,
    timeout: Annotated[
        float | None, typer.Option("--timeout", help="Seconds; else sandbox.limits.timeout_s.", min=0.1)
    ] = None,
) -> None:
    """Run one command in a sandbox of its own; passes stdin in, and output and exit code out."""
    from .recipes import sandbox_tools as tools

    stdin = b"" if sys.stdin.isatty() else sys.stdin.buffer.read()
    result = asyncio.run(tools.run_one(tools.config_of(sandbox, provider), argv, stdin, timeout))
    sys.stdout.buffer.write(result.stdout)
    sys.stdout.flush()
    sys.stderr.buffer.write(result.stderr)
    sys.stderr.flush()
    for happened, words in (
        (result.timed_out, "it was stopped at its deadline (--timeout, sandbox.limits.timeout_s)"),
        (result.oom, "it ran out of memory (sandbox.limits.memory_mb)"),
        (result.flooded, "it was stopped: it wrote more than sandbox.limits.flood_bytes"),
        (result.truncated, "output was cut (sandbox.limits.output_bytes)"),
    ):
        if happened:
            _note(words)
    raise typer.Exit(result.exit_code)


@app.command(epilog="Example: rz-agent sandbox reap --provider docker")
def reap(
    provider: ProviderOption = None,
    sandbox: FileOption = None,
    run_id: Annotated[
        str | None, typer.Option("--run", help="Only those of this run.", show_default=False)
    ] = None,
    living: Annotated[
        bool, typer.Option("--living", help="Also those whose owner still runs: its episodes lose them.")
    ] = False,
) -> None:
    """Remove the sandboxes that dead owners left behind, and say which."""
    from .recipes import sandbox_tools as tools

    named = provider is not None or sandbox is not None
    configs = tools.asked(tools.config_of(sandbox, provider), named=named)
    removed = asyncio.run(tools.reaped(configs, run_id=run_id, dead_owners=not living, say=_note))
    if removed:
        head = [("PROVIDER", "ID", "RUN", "WHAT")]
        table([*head, *((name, one.id or "-", one.run_id or "-", one.what) for name, one in removed)])
    else:
        typer.echo("nothing was left behind")
    for name, number in {} if named else tools.unasked(configs).items():
        _note(f"{name}: {number} still written down; ask it: rz-agent sandbox reap --provider {name}")


@app.command(epilog="Example: rz-agent sandbox bench --provider local --rounds 40")
def bench(
    provider: ProviderOption = None,
    sandbox: FileOption = None,
    rounds: Annotated[int, typer.Option("--rounds", min=4, help="How often each operation is done.")] = 40,
) -> None:
    """Measure what a sandbox, a command, a cell and a file cost, in milliseconds of wall time."""
    from .recipes import sandbox_tools as tools

    timings = asyncio.run(tools.measured(tools.config_of(sandbox, provider), rounds))
    head = [("OPERATION", "P50 MS", "P95 MS", "ROUNDS")]
    table([*head, *((t.name, f"{t.p50:.2f}", f"{t.p95:.2f}", str(t.rounds)) for t in timings)])


def _age(seconds: float) -> str:
    """
    >>> _age(42), _age(4000), _age(100000)
    ('42 s', '66 min', '27 h')
    """
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds // 60:.0f} min" if seconds < 7200 else f"{seconds // 3600:.0f} h"


def _note(text: str) -> None:
    typer.echo(f"note: {text}", err=True)
