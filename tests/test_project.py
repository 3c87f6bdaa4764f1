"""The project keeps its own rules: packages, who imports whom, versions, help for every command."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
import typer
from rz_agent.cli import app

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
OUTSIDE = {"tests", "benchmarks", "docs", "requirements", "runs", "build", "dist"}

# room -> rooms of ours that it may import besides itself and the root contracts
ROOMS = {
    "kernels": set[str](),
    "sandboxes": set[str](),
    "envs": {"sandboxes"},
    "learner": {"kernels"},
    "rollout": {"envs", "sandboxes", "kernels"},
    "recipes": {"kernels", "sandboxes", "envs", "learner", "rollout"},
}
# The root modules that anyone may use; they use nothing of ours but each other.
CONTRACTS = {"errors", "trajectory", "journal", "weight_store"}


def rooms() -> list[Path]:
    """The folders of the checkout that belong to the package."""
    return [p for p in ROOT.iterdir() if p.is_dir() and not p.name.startswith(".") and p.name not in OUTSIDE]


def package_folders() -> set[str]:
    folders = [init.parent.relative_to(ROOT) for room in rooms() for init in room.rglob("__init__.py")]
    return {"rz_agent", *(".".join(("rz_agent", *folder.parts)) for folder in folders)}


def source_files() -> list[Path]:
    return [*ROOT.glob("*.py"), *(path for room in rooms() for path in room.rglob("*.py"))]


def imports_of_ours(path: Path) -> set[tuple[str, ...]]:
    """Modules of the package that a file imports, as parts below `rz_agent`."""
    here = path.relative_to(ROOT).parts[:-1]
    found: set[tuple[str, ...]] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = here[: len(here) - node.level + 1]
            target = (*base, *(node.module.split(".") if node.module else ()))
            # `from .. import envs` names the room in the alias
            found |= {target} if target else {(alias.name,) for alias in node.names}
    return found


def is_contract(module: str) -> bool:
    """journal_columns and the like belong to their contract."""
    return any(module == name or module.startswith(f"{name}_") for name in CONTRACTS)


def test_every_folder_with_code_is_a_listed_package_and_no_other_is() -> None:
    assert set(PROJECT["tool"]["setuptools"]["packages"]) == package_folders()


def test_rooms_import_one_way() -> None:
    wrong = []
    for path in source_files():
        room = path.relative_to(ROOT).parts[0]
        for target in imports_of_ours(path):
            if (
                room in ROOMS
                and target[0] != room
                and target[0] not in ROOMS[room]
                and not is_contract(target[0])
            ):
                wrong.append(f"{path.relative_to(ROOT)} imports {'.'.join(target)}")
    assert wrong == []


def test_the_root_contracts_import_only_each_other() -> None:
    wrong = [
        f"{path.name} imports {'.'.join(target)}"
        for path in ROOT.glob("*.py")
        if is_contract(path.stem)
        for target in imports_of_ours(path)
        if not is_contract(target[0])
    ]
    assert wrong == []


def test_the_package_imports_itself_by_relative_names() -> None:
    absolute = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in source_files()
        for node in ast.walk(ast.parse(path.read_text()))
        if (
            isinstance(node, ast.ImportFrom)
            and not node.level
            and (node.module or "").split(".")[0] == "rz_agent"
        )
        or (isinstance(node, ast.Import) and any(a.name.split(".")[0] == "rz_agent" for a in node.names))
    ]
    assert absolute == []


def files_named_by(path: Path) -> set[Path]:
    """Files of the package that the import statements at the top of a file load."""
    here, found = path.relative_to(ROOT).parts[:-1], set[Path]()
    for node in ast.parse(path.read_text()).body:
        if not isinstance(node, ast.ImportFrom):
            continue
        module = tuple((node.module or "").split(".")) if node.module else ()
        if not node.level and module[0] != "rz_agent":
            continue
        base = (*here[: len(here) - node.level + 1], *module) if node.level else module[1:]
        for place in (ROOT.joinpath(*base), *(ROOT.joinpath(*base, alias.name) for alias in node.names)):
            found |= {f for f in (place.with_suffix(".py"), place / "__init__.py") if f.is_file()}
    return found


def loaded_by(path: Path) -> set[Path]:
    """The same, and what those load in turn."""
    loaded, waiting = set[Path](), files_named_by(path)
    while waiting:
        loaded |= waiting
        waiting = {file for known in waiting for file in files_named_by(known)} - loaded
    return loaded


# The judge of max_lag = 0 may share with a run only what does not decide what is sampled when.
JUDGE = ROOT / "tests" / "synchronous_loop.py"
JUDGED = {ROOT / "rollout" / "scheduler.py", ROOT / "journal.py"}


def test_the_synchronous_judge_is_short_and_imports_neither_scheduler_nor_journal() -> None:
    assert len(JUDGE.read_text().splitlines()) < 100
    assert files_named_by(JUDGE) & JUDGED == set()
    assert all(file.is_file() for file in JUDGED)


def test_nothing_that_the_synchronous_judge_imports_loads_scheduler_or_journal() -> None:
    assert loaded_by(JUDGE) & JUDGED == set()


def test_no_root_module_has_the_name_of_a_standard_or_installed_module() -> None:
    """The checkout may stand on sys.path; a root module must not shadow another one there."""
    ours = {path.stem for path in ROOT.glob("*.py") if path.stem != "__init__"} | set(ROOMS)
    installed = {
        name for name, owners in metadata.packages_distributions().items() if "rz-agent" not in owners
    }
    assert ours & (set(sys.stdlib_module_names) | installed) == set()


def commands(group: typer.Typer = app, words: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    """Every command that does something, as its words."""
    own = [
        (*words, command.name or command.callback.__name__)
        for command in group.registered_commands
        if command.callback
    ]
    below = [
        found
        for inner in group.registered_groups
        if inner.typer_instance
        for found in commands(inner.typer_instance, (*words, str(inner.name)))
    ]
    return own + below


@pytest.mark.parametrize("command", commands(), ids=" ".join)
def test_every_command_says_what_it_does_and_shows_an_example(command: tuple[str, ...]) -> None:
    from typer.testing import CliRunner

    shown = CliRunner().invoke(app, [*command, "--help"])
    assert shown.exit_code == 0
    assert f"Example: rz-agent {' '.join(command)}" in shown.stdout


def test_the_version_is_said_once() -> None:
    from rz_agent import __version__

    assert PROJECT["project"]["version"] == __version__
    assert f"## {__version__}" in (ROOT / "CHANGELOG.md").read_text()


def locked(name: str) -> dict[str, str]:
    lines = (ROOT / "requirements" / f"{name}.lock").read_text().splitlines()
    pins = [line.split("==") for line in lines if line and not line.startswith("#")]
    return {re.sub(r"[-_.]+", "-", pin[0]).lower(): pin[1] for pin in pins}


@pytest.mark.parametrize("name", ["cpu", "cuda"])
def test_every_dependency_is_locked(name: str) -> None:
    wanted = {re.split(r"[<>=;\[ ]", need)[0].lower() for need in PROJECT["project"]["dependencies"]}
    assert wanted - locked(name).keys() == set()


@pytest.mark.parametrize("name", ["cpu", "cuda"])
def test_the_extras_name_the_locked_versions_of_engine_and_torch(name: str) -> None:
    pins = locked(name)
    for requirement in PROJECT["project"]["optional-dependencies"][name]:
        package, _, version = requirement.partition(";")[0].strip().partition("==")
        assert pins[package].partition("+")[0] == version


def test_the_sandboxes_lock_completes_the_extras_of_the_providers() -> None:
    extras = PROJECT["project"]["optional-dependencies"]
    wanted = {
        re.split(r"[<>=;\[ ]", need)[0] for name in ("docker", "e2b", "desktop") for need in extras[name]
    }
    assert wanted - locked("sandboxes").keys() - locked("cpu").keys() == set()


def test_the_osworld_lock_completes_its_extra() -> None:
    wanted = set(PROJECT["project"]["optional-dependencies"]["osworld"])
    assert wanted - locked("osworld").keys() - locked("cpu").keys() == set()


def test_the_cpu_lock_leaves_out_what_breaks_transformers_beside_a_cpu_torch() -> None:
    assert locked("cpu").keys() & {"torchvision", "torchaudio", "torchcodec"} == set()
    assert locked("cpu")["torch"].endswith("+cpu")


def test_locks_do_not_contradict_each_other() -> None:
    for extra in ("dev", "osworld", "sandboxes", "smollm2", "swebench"):
        for base in ("cpu", "cuda"):
            shared = locked(extra).keys() & locked(base).keys()
            assert {n: locked(extra)[n] for n in shared} == {n: locked(base)[n] for n in shared}


def test_ci_runs_the_test_command_of_the_readme() -> None:
    assert "make test" in (ROOT / ".ci" / "run").read_text()
    readme = (ROOT / "README.md").read_text()
    assert "make quickstart" in readme
    assert "make test" in readme


def test_importing_the_package_loads_nothing_heavy() -> None:
    heavy = "{'torch', 'vllm', 'ray', 'gymnasium', 'pydantic'}"
    code = f"import sys, rz_agent; print(sorted({heavy} & set(sys.modules)))"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd="/")
    assert shown.stdout.strip() == "[]"


LIGHT = ["register", "make", "Task", "AgentEnv", "Rubric", "tool", "Recipe"]
HEAVY = [pytest.param(name, marks=pytest.mark.slow) for name in ("train", "evaluate")]


@pytest.mark.parametrize("name", [*LIGHT, *HEAVY])
def test_the_public_names_are_there(name: str) -> None:
    import rz_agent

    assert name in rz_agent.__all__
    assert callable(getattr(rz_agent, name))


def test_all_public_names_are_tried_above() -> None:
    import rz_agent

    assert {*LIGHT, "train", "evaluate"} == set(rz_agent.__all__)
