"""An instance of a real project's real fix: xmltodict 0.12.0 writes booleans as XML does.

`history` makes the clone that a person would have: the fix and a later commit on their branch, and whatever
else may tell of them (a tag, a stash, a note, a remote, a worktree, reflogs, a kept pack, a loose object).
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from rz_agent.envs.swebench_pro.make import COMMANDS

PATCHES = sorted((Path(__file__).parent / "data" / "swebench_pro" / "xmltodict").glob("*.patch"))
SECRET = "v = _unicode('true')"  # a line of the fix, which base does not have
FAILING = "tests/test_dicttoxml.py::DictToXMLTestCase::test_boolean_unparse"
# What the sandbox's own Python needs to run pytest; plugins that happen to be installed are slow to import.
_PACKAGES = ("pytest", "pluggy", "iniconfig", "packaging", "pygments")


@contextmanager
def pytest_folder() -> Iterator[Path]:
    """pytest in a folder that any user may read, and that no sandbox hides behind a /tmp of its own."""
    folder = Path(tempfile.mkdtemp(prefix="rz-agent-pytest-", dir="/var/tmp"))
    try:
        for name in _PACKAGES:
            for file in metadata.files(name) or ():
                if ".." not in file.parts:  # a script
                    (folder / file).parent.mkdir(parents=True, exist_ok=True)
                    shutil.copy2(str(file.locate()), folder / file)
        folder.chmod(0o755)
        yield folder
    finally:
        shutil.rmtree(folder)


def command(folder: Path) -> str:
    """Runs test files with it."""
    return (
        f"env PYTHONPATH={folder} PYTEST_DISABLE_PLUGIN_AUTOLOAD=1 python3 -B "
        f"{COMMANDS['pytest'].removeprefix('python3 ')}"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """A clone. The hashes are those of commits; `later` of all that base must not tell of."""

    folder: Path
    base: str
    fix: str
    later: tuple[str, ...]


def git(folder: Path, *arguments: str, stdin: bytes = b"") -> str:
    who = {f"GIT_{role}_{what}": "someone" for role in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
    done = subprocess.run(
        ["git", "-C", str(folder), *arguments],
        check=True, capture_output=True, input=stdin, env={"PATH": os.environ["PATH"], **who},
    )  # fmt: skip
    return done.stdout.decode().strip()


def history(folder: Path) -> History:
    """A clone in a new folder."""
    folder.mkdir()
    git(folder, "init", "--quiet", "--initial-branch=master")
    git(folder, "am", "--quiet", *map(str, PATCHES))
    base, fix = git(folder, "rev-parse", "HEAD~1", "HEAD").split()
    (folder / "NEWS").write_text("0.12.1\n")
    git(folder, "add", "NEWS")
    git(folder, "commit", "--quiet", "-m", "later")
    later = git(folder, "rev-parse", "HEAD")
    git(folder, "tag", "-a", "v0.12.0", "-m", "released", fix)
    git(folder, "notes", "add", "-m", SECRET, base)
    (folder / "NEWS").write_text(SECRET)
    git(folder, "stash", "--quiet")
    stash = git(folder, "rev-parse", "stash")
    git(folder, "remote", "add", "origin", str(folder))
    git(folder, "fetch", "--quiet", "origin")
    git(folder, "worktree", "add", "--quiet", str(folder.with_suffix(".other")), fix)
    git(folder, "gc", "--quiet")
    for pack in (folder / ".git" / "objects" / "pack").glob("*.pack"):
        pack.with_suffix(".keep").touch()
    lost = git(folder, "hash-object", "-w", "--stdin", stdin=SECRET.encode())
    git(folder, "checkout", "--quiet", "--detach", base)
    return History(folder=folder, base=base, fix=fix, later=(fix, later, stash, lost))
