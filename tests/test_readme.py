"""The README's examples do what it says, from a folder outside the repository."""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from rz_agent.cli import app
from rz_agent.envs import load
from rz_agent.recipes import recipe_file
from typer.testing import CliRunner

README = (Path(__file__).resolve().parent.parent / "README.md").read_text()


def block(language: str, containing: str) -> str:
    (found,) = [
        text for text in re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL) if containing in text
    ]
    return str(found)


@pytest.fixture
def guess(tmp_path: Path) -> Path:
    """The folder of the README's environment, as a reader makes it."""
    (tmp_path / "guess.py").write_text(block("python", "class GuessEnv"))
    (tmp_path / "pyproject.toml").write_text(block("toml", "rz_agent.envs"))
    return tmp_path


def test_the_readmes_environment_is_played_as_it_says(guess: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(guess))

    async def play() -> tuple[str, float]:
        async with load("guess:GuessEnv") as factory:
            env = factory.create()
            await env.areset(options={"task": factory.taskset.load("train")[6]})
            said = []
            for n in (3, 7):
                call = json.dumps({"name": "guess", "arguments": {"n": n}})
                shown, reward, *_ = await env.astep(f"<tool_call>\n{call}\n</tool_call>")
                said += [str(message["content"]) for message in shown["messages"]]
            _, reward, terminated, *_ = await env.astep("It is 7.")
            assert terminated
            await env.aclose()
            return " ".join(said), reward

    said, reward = asyncio.run(play())
    sys.modules.pop("guess", None)  # another test beside this one has a module of that name
    assert "higher" in said
    assert "found" in said
    assert reward == 1.0


@pytest.mark.slow
def test_an_installed_environment_is_listed_and_has_a_recipe(
    guess: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    site = tmp_path_factory.mktemp("site")
    install = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation"]
    subprocess.run([*install, "--target", str(site), str(guess)], check=True)
    environment = {**os.environ, "PYTHONPATH": str(site)}

    def rz_agent(*arguments: str) -> str:
        command = [sys.executable, "-m", "rz_agent.cli", *arguments]
        return subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout

    assert "guess" in rz_agent("env", "list")
    assert tomllib.loads(rz_agent("train", "--env", "guess", "--dry-run"))["env"]["id"] == "guess"


def test_the_readmes_sandbox_file_is_accepted(tmp_path: Path) -> None:
    file = tmp_path / "sandbox.toml"
    file.write_text(block("toml", "[sandbox]"))
    assert recipe_file.load("python", sandbox=file).sandbox.shared == 2


def test_every_command_of_the_readme_exists_with_its_options() -> None:
    commands = re.findall(r"rz-agent ([^\n`#]+)", README)
    assert commands
    for command in commands:
        shown = CliRunner().invoke(app, [*command.split(), "--help"])
        assert shown.exit_code == 0, command
        for option in re.findall(r"--[a-z-]+", command):
            assert option in shown.stdout, command
