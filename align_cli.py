"""`rz-agent align`: arguments in, one call into `recipes/align`, tables or JSON out.

Exit codes: 0 every gate that was asked for holds; 1 one does not; 2 usage or configuration.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from .cli_options import table
from .errors import ConfigError

if TYPE_CHECKING:
    from .kernels.vllm_settings import KernelsName
    from .recipes.align.align import Comparison, Report
    from .rollout.engine_config import DtypeName

Known = TypeVar("Known", bound=str)
DTYPES: tuple[DtypeName, ...] = ("float32", "bfloat16")
KERNELS: tuple[KernelsName, ...] = ("aligned", "standard", "batch_invariant")
USUAL_GATES = "forward,gradient,optimizer,update"


def align(
    model: Annotated[Path, typer.Argument(help="A model folder in Hugging Face layout.")],
    gates: Annotated[
        str,
        typer.Option(
            "--gates",
            help='What must hold, separated by commas; "forward" always is asked. One more: "throughput", '
            "on an idle machine.",
        ),
    ] = USUAL_GATES,
    kernels: Annotated[
        str,
        typer.Option(
            "--kernels",
            help='Of the engine: "aligned", or to see what breaks "standard", or on a GPU "batch_invariant" '
            "(vLLM's own mode).",
        ),
    ] = "aligned",
    dtype: Annotated[
        str | None,
        typer.Option("--dtype", help='"float32" or "bfloat16".', show_default="aligned on this device"),
    ] = None,
    device: Annotated[
        str | None, typer.Option("--device", help='"cpu" or "cuda".', show_default="a GPU where there is one")
    ] = None,
    tensor_parallel: Annotated[
        int,
        typer.Option(
            "--tensor-parallel",
            min=1,
            help="Also run the learner split over so many ranks, each a process (with a GPU of its own).",
        ),
    ] = 1,
    requests: Annotated[int, typer.Option("--requests", min=2, help="Sequences to run.")] = 8,
    new_tokens: Annotated[int, typer.Option("--new-tokens", min=1, help="Sampled in each.")] = 16,
    temperature: Annotated[float, typer.Option("--temperature", help="Of sampling, above 0.")] = 1.0,
    seed: Annotated[int, typer.Option("--seed", help="Of prompts.")] = 0,
    every: Annotated[
        bool, typer.Option("--all", help="List every operation, not those that differ.")
    ] = False,
    to_json: Annotated[Path | None, typer.Option("--json", help="Write the whole report to a file.")] = None,
) -> None:
    """Engine and learner on the same tokens, operation by operation: is every bit the same, and if not, which
    operation differs first, on which token, and what makes it (batch, chunks, prefix, prefill, packing,
    tensor parallel)."""
    from .recipes.align import align as tool

    _check_device(device)
    report = tool.align(
        model,
        dtype=None if dtype is None else _one_of("--dtype", dtype, DTYPES),
        kernels=_one_of("--kernels", kernels, KERNELS),
        gates=[_one_of("--gates", gate, tool.GATES) for gate in gates.split(",")],
        requests=requests,
        new_tokens=new_tokens,
        tensor_parallel=tensor_parallel,
        temperature=temperature,
        seed=seed,
        progress=lambda said: typer.echo(f"... {said}", err=True),
    )
    if to_json is not None:
        to_json.write_text(json.dumps(report.as_dict(), indent=1) + "\n")
    _show(report, every=every)
    if not report.ok:
        raise typer.Exit(1)


def _one_of(option: str, given: str, known: tuple[Known, ...]) -> Known:
    for value in known:
        if value == given:
            return value
    raise ConfigError(source="command line", key=option, value=given, remedy=f"Use {', '.join(known)}.")


def _check_device(asked: str | None) -> None:
    """A process has one device: where there is a GPU both sides use it."""
    from .rollout import vllm_device

    found = vllm_device.device()
    if asked is not None and _one_of("--device", asked, ("cpu", "cuda")) != found:
        remedy = "Set CUDA_VISIBLE_DEVICES to nothing." if found == "cuda" else "Run it where there is a GPU."
        raise ConfigError(
            source="command line", key="--device", value=asked, why=f"but torch uses {found}", remedy=remedy
        )


def _show(report: Report, *, every: bool) -> None:
    typer.echo(
        f"{report.model} on {report.device}, engine {report.kernels}, {report.contract}: "
        f"{report.sequences} sequences, {report.tokens} tokens, {report.sampled} sampled\n"
        "compared with the engine that is asked for one request at a time:"
    )
    rows: list[tuple[str, ...]] = [
        ("condition", "tokens a step", "operations", "differing", "first", "its token", "largest")
    ]
    for comparison in report.comparisons:
        rows.append((comparison.title, *_summary(report, comparison)))
    table(rows)
    for comparison in report.comparisons:
        if every or comparison.differing:
            typer.echo(f"\n{comparison.title}:")
            _operations(report, comparison, every=every)
    if report.threshold is not None:
        typer.echo(f"\n{report.threshold}")
    typer.echo("")
    table([(gate.name, "holds" if gate.holds else "FAILS", gate.says) for gate in report.gates])


def _summary(report: Report, comparison: Comparison) -> tuple[str, ...]:
    counts = (str(comparison.largest_step), str(len(comparison.results)), str(len(comparison.differing)))
    first = comparison.first
    if first is None:
        return (*counts, "-", "-", "0")
    return (*counts, str(first.operation), _token(report.place(first)), f"{first.largest:.3g}")


def _operations(report: Report, comparison: Comparison, *, every: bool) -> None:
    rows: list[tuple[str, ...]] = [("operation", "rows", "differing", "first token", "largest")]
    for result in comparison.results if every else comparison.differing:
        place = _token(report.place(result)) if result.differing else "-"
        rows.append(
            (str(result.operation), str(result.rows), str(result.differing), place, f"{result.largest:.3g}")
        )
    table(rows)


def _token(place: tuple[int, int] | None) -> str:
    return "-" if place is None else f"sequence {place[0]} token {place[1]}"
