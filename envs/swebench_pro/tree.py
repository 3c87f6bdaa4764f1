"""The repository in a sandbox, before and after the policy has it: filled, scrubbed, patched, compared.

    tree = await Tree.fill(sandbox, instance, ...)      at the base commit
    await tree.scrub()                                  no later commit can be read afterwards
    await tree.apply(patch) -> "" or why it does not apply
    await tree.diff() -> patch                          what differs from the base commit

Invariant: what fails in `fill`, `scrub` and `checkout` is an `InfraFailure`, as only trusted files are there;
what fails in `apply` and `diff` is the policy's.
Waits: the episode for each of them, at most `deadline_s`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from ...sandboxes.errors import CreateError
from ...sandboxes.exec_result import ExecResult
from ...sandboxes.sandbox import Sandbox
from ..failure import InfraFailure
from .instance import Instance
from .scrub import CHECK, SCRUB

FOLDER = "app"
_MAX_PATCH = 4 << 20
# Whatever the policy wrote into the configuration, ours comes after it.
ENVIRONMENT = {
    "GIT_CONFIG_COUNT": "5",
    "GIT_CONFIG_KEY_0": "safe.directory", "GIT_CONFIG_VALUE_0": "*",
    "GIT_CONFIG_KEY_1": "user.name", "GIT_CONFIG_VALUE_1": "agent",
    "GIT_CONFIG_KEY_2": "user.email", "GIT_CONFIG_VALUE_2": "agent@localhost",
    "GIT_CONFIG_KEY_3": "core.fsmonitor", "GIT_CONFIG_VALUE_3": "false",
    "GIT_CONFIG_KEY_4": "advice.detachedHead", "GIT_CONFIG_VALUE_4": "false",
    "GIT_TERMINAL_PROMPT": "0", "GIT_PAGER": "cat", "PAGER": "cat",
}  # fmt: skip
_FILL = 'git init --quiet "$1" && cd "$1" && git index-pack --stdin >/dev/null && pwd -P'
_RESET = 'git reset --quiet --hard "$1" && git checkout --quiet --detach "$1"'
# An index of its own: what the policy did to the other one does not matter.
_DIFF = r"""
index=$(mktemp -d) && export GIT_INDEX_FILE="$index/index" && git read-tree "$1" && git add --all &&
  git diff --cached --no-ext-diff --no-textconv --no-color --no-renames --src-prefix=a/ --dst-prefix=b/ "$1"
status=$?; rm -rf "$index"; exit $status
"""
_SECTION = re.compile(r"(?=^diff --git )", re.MULTILINE)
_BINARY = re.compile(r"^(Binary files .* differ|GIT binary patch)$", re.MULTILINE)


class Unreadable(Exception):
    """The policy left no repository that can be compared with the base commit."""


class Tree:
    """`path` is absolute, as programs in the sandbox see it."""

    def __init__(self, sandbox: Sandbox, path: str, base: str, deadline_s: float) -> None:
        self.sandbox, self.path, self._base, self._deadline_s = sandbox, path, base, deadline_s

    @classmethod
    async def fill(
        cls, sandbox: Sandbox, instance: Instance, *, pack: bytes | None, path: str, deadline_s: float
    ) -> Tree:
        """The repository at its base commit.

        pack   its objects, brought in from this machine; None: it is at `path` already, in the image
        """
        base = instance.base_commit
        if pack is not None:
            outside = cls(sandbox, "", base, deadline_s)
            path = (await outside._trusted(_FILL, FOLDER, stdin=pack)).decode().strip()
        tree = cls(sandbox, path, base, deadline_s)
        await tree._trusted(_RESET, base)
        return tree

    async def scrub(self) -> None:
        """Take out all that came after the base commit, and see that it is gone."""
        await self._trusted(SCRUB, self._base)
        if left := (await self._trusted(CHECK, self._base)).decode(errors="replace").strip():
            raise InfraFailure(f"the repository still tells its future: {'; '.join(left.splitlines())}")

    async def checkout(self, command: str) -> None:
        """Run the instance's own command that puts its test files there."""
        await self._trusted(command)

    async def apply(self, patch: str) -> str:
        """Apply a patch; "" or why it does not apply."""
        data = patch.encode("utf-8", "surrogateescape")
        done = await self._run("git apply -v -", (), data)
        return "" if done.exit_code == 0 else _said(done)

    async def diff(self) -> str:
        """What differs from the base commit, new files included, without what is binary. Unreadable."""
        try:
            done = await self._run(_DIFF, (self._base,), b"", output_limit=2 * _MAX_PATCH)
        except CreateError as error:  # in a sandbox that lives: the policy left no room to start a program
            raise Unreadable(str(error)) from error
        if done.exit_code or done.timed_out:
            raise Unreadable(f"git cannot say what was changed: {_said(done)}")
        if done.truncated or len(done.stdout) > _MAX_PATCH:
            raise Unreadable(f"the change is larger than {_MAX_PATCH >> 20} MiB")
        return strip_binary(done.stdout.decode("utf-8", "surrogateescape"))

    async def _trusted(self, script: str, *arguments: str, stdin: bytes = b"") -> bytes:
        done = await self._run(script, arguments, stdin)
        if done.exit_code or done.timed_out:
            words = " ".join(script.split())[:60]
            late = f" (stopped after {self._deadline_s:g} s)" if done.timed_out else ""
            raise InfraFailure(f"the repository cannot be prepared: {words!r}{late}: {_said(done)}")
        return done.stdout

    async def _run(
        self, script: str, arguments: Sequence[str], stdin: bytes, output_limit: int | None = None
    ) -> ExecResult:
        # Not `cwd=`: the policy may have removed the folder, which is no failure of the sandbox.
        there = 'cd -- "$0" || exit 1\n' if self.path else ""
        return await self.sandbox.exec(
            ["bash", "-c", there + script, self.path or "bash", *arguments],
            stdin=stdin,
            env=ENVIRONMENT,
            timeout_s=self._deadline_s,
            output_limit=output_limit,
        )


def strip_binary(patch: str) -> str:
    """The patch without files that git calls binary: their content is not in it, so it would not apply.

    >>> strip_binary("diff --git a/x b/x\\nBinary files a/x and b/x differ\\ndiff --git a/y b/y\\n+1\\n")
    'diff --git a/y b/y\\n+1\\n'
    """
    return "".join(part for part in _SECTION.split(patch) if part.strip() and not _BINARY.search(part))


def _said(done: ExecResult) -> str:
    return done.text.strip()[-400:] or f"exit code {done.exit_code}"
