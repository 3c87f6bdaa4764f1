"""The package that `rz-agent env init NAME` writes: an environment that works, to be changed into one's own.

    write_environment("word-game", Path("word-game"))

    word-game/pyproject.toml                 the entry point by which `--env word-game` finds it
              word_game/env.py, tasks.py     the class and its tasks
              tests/test_word_game.py        all that `rz-agent env check` tries

Invariant: the folder is new and whole, or is not there.
"""

from __future__ import annotations

import keyword
import re
import shutil
import sys
import tempfile
from pathlib import Path
from string import Template

from ..errors import ConfigError

_PYPROJECT = """\
[build-system]
requires = ["setuptools>=78"]
build-backend = "setuptools.build_meta"

[project]
name = "$name"
version = "0.1.0"
requires-python = ">=3.11"
dependencies = ["rz-agent"]

[project.entry-points."rz_agent.envs"]
$name = "$module.env:$class"

[tool.setuptools]
packages = ["$module"]
"""
_INIT = '''\
"""The environment $name."""
'''
_TASKS = '''\
"""What is asked: words to be guessed, each with the hint that an episode begins with."""

from rz_agent.envs import ListTaskset, Task

_HINTS = {
    "train": {"apple": "a fruit", "train": "it runs on rails", "piano": "it has 88 keys"},
    "test": {"bread": "a baker makes it", "river": "it ends in the sea"},
}

WORDS = ListTaskset(
    [
        Task(id=word, split=split, prompt=f"Find the word: {hint}.", answer=word)
        for split, words in _HINTS.items()
        for word, hint in words.items()
    ],
    name="$name",
)
'''
_ENV = '''\
"""A word is to be found; each guess tells how many of its letters are in place."""

from pathlib import Path

from rz_agent.envs import (
    AgentEnv,
    Case,
    EnvOptions,
    Episode,
    Observation,
    Script,
    Task,
    Taskset,
    call,
    metric,
    reward,
    scripted,
    silent,
    tool,
)

from .tasks import WORDS


class $options(EnvOptions):
    """counts   whether a guess tells how many letters are in place"""

    counts: bool = True


def solve(task: Task, shown: Observation) -> Script:
    """The agent of `rz-agent env run --agent scripted`: it knows the answer, and misses once."""
    yield call("guess", word="zzz")
    yield call("guess", word=task.answer)


class $class(AgentEnv):
    """The reward is 1 for the word, within `max_turns` guesses."""

    Options = $options
    options: $options
    taskset = WORDS
    max_turns = 6
    scripted = staticmethod(solve)

    @tool
    async def guess(self, word: str) -> str:
        """Guess the word.

        Args:
            word: in lower case
        """
        answer = self.task.answer or ""
        if word == answer:
            self.state["found"] = True
            self.finish()
            return "That is it."
        if not self.options.counts:
            return "No."
        right = sum(a == b for a, b in zip(word, answer, strict=False))
        return f"No: {right} of {len(answer)} letters are in place."

    @reward
    async def found(self, task: Task, episode: Episode) -> float:
        return float(episode.state.get("found", False))

    @metric
    async def guesses(self, task: Task, episode: Episode) -> float:
        return float(episode.calls)

    @classmethod
    def self_test(cls, tasks: Taskset, scratch: Path) -> list[Case]:
        """What `rz-agent env check` plays."""
        task = tasks.load("test")[0]
        return [
            Case(name="the scripted solution scores 1", task=task, agent=scripted(solve), reward=1.0),
            Case(name="doing nothing scores 0", task=task, agent=silent, reward=0.0),
        ]
'''
_TEST = '''\
"""All that `rz-agent env check` tries."""

import asyncio

from rz_agent.envs import load
from rz_agent.envs.check import check

NAME = "$module.env:$class"


def test_the_environment_keeps_its_promises() -> None:
    findings = asyncio.run(check(NAME, {}, heard=print))
    assert [finding for finding in findings if finding.status != "passed"] == []


def test_a_guess_tells_how_many_letters_are_in_place() -> None:
    async def play() -> str:
        async with load(NAME) as factory:
            env = factory.create()
            await env.areset(options={"task": factory.taskset.load("test")[0]})
            shown, *_ = await env.astep(
                '<tool_call>{"name": "guess", "arguments": {"word": "break"}}</tool_call>'
            )
            await env.aclose()
            return str(shown["messages"][0]["content"])

    assert asyncio.run(play()) == "No: 4 of 5 letters are in place."
'''


def write_environment(name: str, out: Path) -> Path:
    """Write the package; ConfigError for a name that cannot be one, or a folder that is there."""
    module = name.replace("-", "_")
    stem = "".join(part.capitalize() for part in module.split("_"))
    if not re.fullmatch(r"[A-Za-z][A-Za-z0-9]*(?:[-_][A-Za-z0-9]+)*", name) or keyword.iskeyword(module):
        _refuse(
            "NAME", name, "is no name for a package.", "Use letters, digits and single dashes: word-game."
        )
    if module in sys.stdlib_module_names:
        _refuse("NAME", name, "is a module of Python's own.", f"Choose another, such as {name}-env.")
    if out.exists():
        _refuse("--out", str(out), "exists.", "Name a new folder.")
    words = {"name": name, "module": module, "class": f"{stem}Env", "options": f"{stem}Options"}
    files = {
        "pyproject.toml": _PYPROJECT,
        f"{module}/__init__.py": _INIT,
        f"{module}/env.py": _ENV,
        f"{module}/tasks.py": _TASKS,
        f"tests/test_{module}.py": _TEST,
    }
    out.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{out.name}-", dir=out.parent))
    try:
        for file, text in files.items():
            (scratch / file).parent.mkdir(exist_ok=True)
            (scratch / file).write_text(Template(text).substitute(words))
        scratch.chmod(0o755)
        scratch.rename(out)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return out


def _refuse(key: str, value: str, why: str, remedy: str) -> None:
    raise ConfigError(source="command line", key=key, value=value, why=why, remedy=remedy)
