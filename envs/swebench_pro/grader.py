"""Grades a patch in a fresh sandbox, from trusted files, as the published harness does; and fails unlike it.

    fresh sandbox -> base commit -> patch -> test files checked out -> scrubbed -> run_script.sh
    fresh sandbox -> parser.py on what that printed

Invariants: nothing of where the policy acted is there but its patch. When its code first runs, the later
history is gone from the repository: a patch cannot fetch the solution it is measured by. What it prints
cannot be taken back (the log is a pipe, no file), and is parsed in a sandbox where its code never ran.
A verdict is about the patch: one that does not apply, tests that run too long or flood their log, a log that
the parser cannot read, have failed. What goes wrong before the policy's code runs, and a sandbox that is lost
at any time, raises (`InfraFailure`, `SandboxError`); so does a parser that cannot even read an empty log.
Waits: a grading for its own sandboxes; for one of `max_live` places, while it holds none.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from ...sandboxes.exec_result import ExecResult
from ...sandboxes.pool import SandboxPool
from ...sandboxes.sandbox import Sandbox
from ..failure import InfraFailure
from ..task import Resources
from .instance import Instance
from .options import SWEBenchProOptions
from .repository import Repositories
from .room import room
from .scripts import Scripts
from .tree import ENVIRONMENT, Tree
from .verdict import missing

_LOG_BYTES = 64 << 20
_PARSE_S = 300.0
_SAID = 1000  # characters
_PARSE, _VERDICT = (Path(__file__).with_name(name) for name in ("parse_logs.py", "verdict.py"))


def longest_s(options: SWEBenchProOptions) -> float:
    """Seconds of a grading by its own deadlines: what was changed, a sandbox, the tests, the parser twice."""
    return 2 * options.setup_s + options.tests_s + 2 * _PARSE_S


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """The tests of an instance under one patch.

    applied    whether the patch did; without it no test ran
    why        what went wrong, in words; "" where the tests ran and could be read
    statuses   of every test that was seen
    said       the end of the log, for a person
    """

    applied: bool
    why: str = ""
    statuses: Mapping[str, str] = field(default_factory=dict)
    said: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Grade:
    """resolved: every test that decides has passed; passed: the share of each list that has."""

    resolved: bool
    applied: bool
    why: str
    fail_to_pass: float = 0.0
    pass_to_pass: float = 0.0

    @classmethod
    def of(cls, instance: Instance, run: Run) -> Grade:
        """The verdict on a run."""
        left = missing(instance.tests, run.statuses)
        why = run.why or (f"did not pass: {', '.join(left[:5])}" if left else "")
        return cls(
            resolved=run.applied and not run.why and not left,
            applied=run.applied,
            why=why,
            fail_to_pass=_share(instance.fail_to_pass, left),
            pass_to_pass=_share(instance.pass_to_pass, left),
        )


class Grader:
    """One for a run; gradings run side by side, each with a sandbox of its own."""

    def __init__(
        self, sandboxes: SandboxPool, options: SWEBenchProOptions, repositories: Repositories
    ) -> None:
        self._sandboxes, self._options, self._repositories = sandboxes, options, repositories

    async def grade(
        self,
        instance: Instance,
        scripts: Scripts,
        patch: str,
        resources: Resources,
    ) -> Grade:
        """The verdict on a patch."""
        return Grade.of(instance, await self.run(instance, scripts, patch, resources, tests=instance.tests))

    async def run(
        self,
        instance: Instance,
        scripts: Scripts,
        patch: str,
        resources: Resources,
        *,
        tests: frozenset[str] | None = None,
    ) -> Run:
        """Run the tests under a patch; "" is the base commit itself.

        tests   those whose statuses are asked for; None: all that are seen
        """
        pack = await self._pack(instance)
        spec = room(self._sandboxes.spec, instance, self._options, resources)
        sandbox = await self._sandboxes.lease(spec)
        try:
            tree = await Tree.fill(
                sandbox,
                instance,
                pack=pack,
                path=self._options.repo_path,
                deadline_s=self._options.setup_s,
            )
            if patch and (why := await tree.apply(patch)):
                return Run(applied=False, why=f"the patch does not apply: {why}")
            await tree.checkout(instance.checkout_tests)
            await tree.scrub()
            ran = await self._tests(tree, instance, scripts)
        finally:
            await sandbox.close()
        if ran.timed_out:
            return Run(applied=True, why=f"the tests did not end within {self._options.tests_s:g} s")
        if ran.flooded or ran.truncated:
            return Run(applied=True, why=f"the tests wrote more than {_LOG_BYTES >> 20} MiB")
        # Not where the tests ran: their code may have left its own python3 there, or none.
        sandbox = await self._sandboxes.lease(replace(spec, owned=()))
        try:
            reading = _Reading(sandbox, scripts, self._options.python, tests)
            return await _parsed(reading, _text(ran.stdout), _text(ran.stderr))
        finally:
            await sandbox.close()

    async def _pack(self, instance: Instance) -> bytes | None:
        """What the sandbox must be given: with the commit that the test files come from."""
        if instance.local is None:
            return None
        commits = [instance.base_commit, *_commits(instance.checkout_tests)]
        return await self._repositories.pack(instance.local, commits)

    async def _tests(self, tree: Tree, instance: Instance, scripts: Scripts) -> ExecResult:
        folder = await _filled(
            tree.sandbox, {"run_script.sh": scripts.run_script, "exports.sh": scripts.exports}
        )
        program = 'set -a; . "$1/exports.sh"; set +a; cd -- "$2"; exec bash "$1/run_script.sh" "$3"'
        selected = ",".join(instance.selected_test_files_to_run)
        return await tree.sandbox.exec(
            ["bash", "-c", program, "bash", folder, tree.path, selected],
            env=ENVIRONMENT | _home(instance),
            timeout_s=self._options.tests_s,
            output_limit=_LOG_BYTES,
        )


@dataclass(frozen=True, slots=True)
class _Reading:
    """How the logs of an instance are read."""

    sandbox: Sandbox
    scripts: Scripts
    python: str
    tests: frozenset[str] | None

    async def of(self, stdout: str, stderr: str) -> ExecResult:
        """What `parse_logs.py` says of them."""
        files = {
            "parse_logs.py": _PARSE.read_text(encoding="utf-8"),
            "verdict.py": _VERDICT.read_text(encoding="utf-8"),
            "parser.py": self.scripts.parser,
            "wanted.json": json.dumps(None if self.tests is None else sorted(self.tests)),
            "stdout.log": stdout,
            "stderr.log": stderr,
        }
        folder = await _filled(self.sandbox, files)
        return await self.sandbox.exec(
            [self.python, "-I", *(f"{folder}/{name}" for name in (*files, "output.json"))],
            timeout_s=_PARSE_S,
            output_limit=_LOG_BYTES,
        )


async def _parsed(reading: _Reading, stdout: str, stderr: str) -> Run:
    parsed = await reading.of(stdout, stderr)
    if _ended_well(parsed):
        said = f"{stdout[-_SAID:]}\n{stderr[-_SAID:]}".strip()[-_SAID:]
        return Run(applied=True, statuses=json.loads(parsed.stdout), said=said)
    if not _ended_well(empty := await reading.of("", "")):
        raise InfraFailure(f"the instance's parser does not run: {_last(empty)}")
    return Run(applied=True, why=f"the log of the tests cannot be read: {_last(parsed)}")


def _ended_well(done: ExecResult) -> bool:
    return done.exit_code == 0 and not (done.timed_out or done.truncated or done.flooded)


async def _filled(sandbox: Sandbox, files: Mapping[str, str]) -> str:
    """A new folder with these files, as programs see it; nobody can have put anything there before."""
    name = f"grading-{secrets.token_hex(8)}"
    for file, text in files.items():
        await sandbox.write(f"{name}/{file}", text.encode())
    return (await sandbox.exec(["sh", "-c", "pwd -P"])).stdout.decode().strip() + f"/{name}"


def _home(instance: Instance) -> dict[str, str]:
    """A published image was built by root, in root's home."""
    return {} if instance.local is not None else {"HOME": "/root"}


def _commits(command: str) -> list[str]:
    """Full hashes in a shell command."""
    return [word for word in command.split() if re.fullmatch(r"[0-9a-f]{40}([0-9a-f]{24})?", word)]


def _share(tests: tuple[str, ...], left: list[str]) -> float:
    return 1.0 - len(set(tests) & set(left)) / len(set(tests)) if tests else 1.0


def _text(log: bytes) -> str:
    return log.decode("utf-8", "replace")


def _last(done: ExecResult) -> str:
    return done.text.strip()[-400:]
