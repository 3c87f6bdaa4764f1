"""An instance out of any repository: a commit that fixes something, and what its tests say before and after.

    made = await make_instance(Wish(repository=..., fix="HEAD", out=...), sandboxes)

    out/instances.jsonl                            one row more (the row of the same id is replaced)
    out/run_scripts/<instance_id>/run_script.sh    runs the test files
    out/run_scripts/<instance_id>/parser.py        reads what that says
    out/<instance_id>.bundle                       the repository, up to the fix

FAIL_TO_PASS are the tests that pass with the fix's sources and do not without; PASS_TO_PASS those that pass
with both. They run twice with the fix: a test that does not pass both times decides nothing.
Waits: for three gradings, one after the other; each in a sandbox of its own.
"""

from __future__ import annotations

import fnmatch
import json
import re
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ...errors import ConfigError
from ...sandboxes.pool import SandboxPool
from ..options import suggestion
from ..task import Resources
from .grader import Grader, Run
from .instance import Instance
from .options import SWEBenchProOptions
from .repository import Repositories, git
from .scripts import find_scripts

Runner = Literal["pytest", "unittest"]
COMMANDS: dict[Runner, str] = {
    # no -q of the project's own: the parser reads one line for each test
    "pytest": "python3 -m pytest -v --tb=short --color=no -o addopts= -p no:cacheprovider",
    "unittest": "python3 -m unittest -v",
}
TESTS = ("test_*.py", "*_test.py", "tests/*", "test/*", "*/tests/*", "*/test/*", "*conftest.py")
_RUNNABLE = ("test_*.py", "*_test.py", "*/test_*.py")
_PLACEHOLDER = "(not known yet)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """What to make an instance of.

    fix         the commit; its first parent is the base commit
    runner      which parser reads the log
    command     runs the test files that are put behind it; "": the runner's own
    statement   the issue in words; "": the message of the commit, which may give the solution away
    tests       patterns of files that are tests, not sources
    """

    repository: Path
    fix: str
    out: Path
    runner: Runner = "pytest"
    command: str = ""
    statement: str = ""
    tests: tuple[str, ...] = TESTS
    python: str = "python3"


def wish_of(
    *, repository: Path, fix: str, out: Path, runner: str, command: str, python: str,
    statement: Path | None, tests: tuple[str, ...],
) -> Wish:  # fmt: skip
    """What a person asked for. ConfigError for an unknown runner, and for a statement that is no file."""
    if runner not in COMMANDS:
        raise ConfigError(
            source="make", key="runner", value=runner, remedy=suggestion(runner, COMMANDS, "runners")
        )
    try:
        words = statement.read_text(encoding="utf-8") if statement else ""
    except OSError as error:
        raise ConfigError(
            source="make",
            key="statement",
            value=str(statement),
            why=f"({error.strerror})",
            remedy="Name a file.",
        ) from None
    return Wish(
        repository=repository, fix=fix, out=out, runner=runner, command=command, python=python,
        statement=words, tests=tests,
    )  # fmt: skip


async def make_instance(
    wish: Wish, sandboxes: SandboxPool, told: Callable[[str], None] = lambda line: None
) -> Instance:
    """Write the instance down. ConfigError where the commit makes none."""
    draft = _draft(wish)
    _write_scripts(wish, draft)
    scripts = find_scripts(wish.out / "run_scripts", draft.instance_id)
    options = SWEBenchProOptions(python=wish.python)
    grader = Grader(sandboxes, options, Repositories())
    here = draft.model_copy(
        update={"dockerhub_tag": f"local:{(wish.out / draft.dockerhub_tag.removeprefix('local:')).resolve()}"}
    )
    runs = []
    for name, patch in (("without the fix", ""), ("with it", draft.patch), ("with it again", draft.patch)):
        run = await grader.run(here, scripts, patch, Resources())
        told(f"{name}: {_counted(run)}")
        runs.append(run)
    instance = _decided(wish, draft, *runs)
    _write_row(wish.out / "instances.jsonl", instance)
    return instance


def _draft(wish: Wish) -> Instance:
    """Everything that git knows, and the bundle."""
    folder = str(wish.repository)

    def ask(*arguments: str) -> str:
        return git(folder, *arguments, folder=folder).decode("utf-8", "surrogateescape")

    fix = ask("rev-parse", "--verify", f"{wish.fix}^{{commit}}").strip()
    base = ask("rev-parse", "--verify", f"{fix}^1").strip()
    changed = ask("diff", "--name-only", "--no-renames", "-z", base, fix).split("\0")[:-1]
    kept = set(ask("ls-tree", "-r", "--name-only", "-z", fix).split("\0"))
    tests = [path for path in changed if _matches(path, wish.tests)]
    sources = [path for path in changed if path not in tests]
    selected = [path for path in tests if path in kept and _matches(path, _RUNNABLE)]
    for what, found in (("sources", sources), ("tests", selected)):
        if not found:
            raise ConfigError(
                source=folder,
                key="fix",
                value=wish.fix,
                why=f"changes no {what}: it changes {', '.join(changed[:5]) or 'nothing'}.",
                remedy="Choose a commit that changes sources and tests, or say with --tests what tests are.",
            )
    name = _project(wish.repository)
    instance_id = f"instance_{name.replace('/', '__')}-{fix}-vnan"
    wish.out.mkdir(parents=True, exist_ok=True)
    _bundle(folder, fix, wish.out / f"{instance_id}.bundle")
    checkout = f"git checkout {fix} -- {' '.join(map(_quoted, [p for p in tests if p in kept]))}"
    diff = ("diff", "--no-color", "--no-ext-diff", "--no-renames", base, fix, "--")
    return Instance(
        repo=name,
        instance_id=instance_id,
        base_commit=base,
        patch=ask(*diff, *sources),
        test_patch=ask(*diff, *tests),
        problem_statement=wish.statement or ask("log", "-1", "--format=%B", fix).strip() or wish.fix,
        interface="No new interfaces are introduced.",
        repo_language="python",
        fail_to_pass=(_PLACEHOLDER,),
        before_repo_set_cmd=f"git reset --hard {base}\ngit clean -fd\ngit checkout {base}\n{checkout}",
        selected_test_files_to_run=tuple(selected),
        dockerhub_tag=f"local:{instance_id}.bundle",
    )


def _decided(wish: Wish, draft: Instance, before: Run, *after: Run) -> Instance:
    """The draft with the tests that decide."""
    for run in after:
        if not run.applied or run.why:
            raise _no_instance(wish, f"its tests cannot be run: {run.why}")
    passed_before, *passed_after = (
        {name for name, status in run.statuses.items() if status == "PASSED"} for run in (before, *after)
    )
    steady = set.intersection(*passed_after)
    if not steady - passed_before:
        seen = ", ".join(sorted(after[0].statuses)[:5])
        found = f"it sees {seen}" if seen else f"it sees none, and the log ends with\n{after[0].said}\n"
        raise _no_instance(wish, f"has no test that fails without it and passes with it: {found}.")
    return draft.model_copy(
        update={
            "fail_to_pass": tuple(sorted(steady - passed_before)),
            "pass_to_pass": tuple(sorted(steady & passed_before)),
        }
    )


def _no_instance(wish: Wish, why: str) -> ConfigError:
    return ConfigError(
        source=str(wish.repository),
        key="fix",
        value=wish.fix,
        why=why,
        remedy="Choose another commit, or give --runner and a --command that work in the sandbox.",
    )


def _write_scripts(wish: Wish, draft: Instance) -> None:
    folder = wish.out / "run_scripts" / draft.instance_id
    folder.mkdir(parents=True, exist_ok=True)
    templates = Path(__file__).parent / "runners"
    script = (
        (templates / "run_script.sh").read_text().replace("COMMAND", wish.command or COMMANDS[wish.runner])
    )
    (folder / "run_script.sh").write_text(script)
    (folder / "parser.py").write_text((templates / f"{wish.runner}_parser.py").read_text())


def _write_row(file: Path, instance: Instance) -> None:
    """The sixteen columns as published: every one a text, lists as Python literals."""
    row = {name: repr(list(value)) if isinstance(value, tuple) else value for name, value in instance}
    text = file.read_text(encoding="utf-8") if file.exists() else ""
    rows = [json.loads(line) for line in text.split("\n") if line.strip()]
    rows = [other for other in rows if other["instance_id"] != instance.instance_id] + [row]
    file.write_text("".join(f"{json.dumps(one)}\n" for one in rows), encoding="utf-8")


def _bundle(folder: str, fix: str, file: Path) -> None:
    """The history of the fix as a file that git can clone. The repository itself gets no new name in it."""
    where = ("rev-parse", "--path-format=absolute", "--git-path", "objects")
    objects = git(folder, *where, folder=folder).decode().strip()
    with tempfile.TemporaryDirectory(prefix="rz-agent-make-") as scratch:
        git(folder, "init", "--quiet", "--bare", scratch)
        Path(scratch, "objects", "info", "alternates").write_text(f"{objects}\n")
        git(folder, "update-ref", "refs/heads/fix", fix, folder=scratch)
        git(folder, "bundle", "create", "--quiet", str(file.resolve()), "refs/heads/fix", folder=scratch)


def _project(repository: Path) -> str:
    """ "owner/name" of the origin, else of the folder."""
    try:
        url = git(str(repository), "remote", "get-url", "origin", folder=str(repository)).decode().strip()
    except ConfigError:
        url = ""
    found = re.search(r"([\w.-]+)/([\w.-]+?)(?:\.git)?/?$", url)
    owner, name = found.groups() if found else ("local", repository.resolve().name)
    return f"{owner}/{re.sub(r'[^A-Za-z0-9_.-]', '-', name)}"


def _matches(path: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatch.fnmatch(path, pattern) for pattern in patterns)


def _quoted(path: str) -> str:
    return path if re.fullmatch(r"[\w./-]+", path) else "'" + path.replace("'", "'\\''") + "'"


def _counted(run: Run) -> str:
    if run.why:
        return run.why
    passed = sum(status == "PASSED" for status in run.statuses.values())
    return f"{passed} of {len(run.statuses)} tests passed"
