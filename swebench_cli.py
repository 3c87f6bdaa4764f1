"""`rz-agent env swebench-pro ...`: arguments in, one call into `envs/swebench_pro`, result out.

Exit codes: 0 done; 2 usage or configuration, which includes a commit that makes no instance.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from .envs.swebench_pro.instance import Instance
    from .envs.swebench_pro.make import Wish
    from .sandboxes.config import SandboxConfig

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Instances for --env swebench-pro.")


@app.callback()
def _one_command_has_a_name() -> None:
    """Keeps `make` a word of its own: typer would else drop the name of an only command."""


@app.command(epilog="Example: rz-agent env swebench-pro make ~/src/project 1a2b3c4 --out instances")
def make(
    repository: Annotated[Path, typer.Argument(help="A local clone.", metavar="REPO")],
    fix: Annotated[str, typer.Argument(help="The commit that fixes something.", metavar="FIX_COMMIT")],
    out: Annotated[Path, typer.Option("--out", help="Folder for the instance.")] = Path("instances"),
    runner: Annotated[str, typer.Option("--runner", help="pytest or unittest.")] = "pytest",
    command: Annotated[
        str, typer.Option("--command", help="Runs test files in the sandbox, for the runner's parser.")
    ] = "",
    statement: Annotated[
        Path | None,
        typer.Option("--statement", help="A file with the issue in words, instead of the commit's message."),
    ] = None,
    tests: Annotated[
        list[str] | None, typer.Option("--tests", help="Pattern of files that are tests; may be repeated.")
    ] = None,
    python: Annotated[str, typer.Option("--python", help="Interpreter inside the sandbox.")] = "python3",
    provider: Annotated[
        str | None, typer.Option("--provider", "-p", help="Where tests run: local, docker, ...")
    ] = None,
    sandbox: Annotated[
        Path | None, typer.Option("--sandbox", help="A TOML file with a [sandbox] table, or a recipe.")
    ] = None,
) -> None:
    """Turn a fix into an instance: the tests that fail without it and pass with it are found by running them.

    Train on it with --set env.taskset=instances/instances.jsonl.
    """
    from .envs.swebench_pro.make import TESTS, wish_of
    from .recipes.sandbox_tools import config_of

    wish = wish_of(
        repository=repository, fix=fix, out=out, runner=runner, command=command, python=python,
        statement=statement, tests=tuple(tests or TESTS),
    )  # fmt: skip
    instance = asyncio.run(_made(wish, config_of(sandbox, provider)))
    typer.echo(f"{instance.instance_id}: {out / 'instances.jsonl'}")
    for name, found in (("fail to pass", instance.fail_to_pass), ("pass to pass", instance.pass_to_pass)):
        more = " ..." if len(found) > 3 else ""
        typer.echo(f"  {name}: {len(found)}  {', '.join(found[:3])}{more}".rstrip())


async def _made(wish: Wish, config: SandboxConfig) -> Instance:
    from .envs.swebench_pro.make import make_instance
    from .sandboxes.pool import SandboxPool

    async with SandboxPool.of(config) as sandboxes:
        return await make_instance(wish, sandboxes, typer.echo)
