"""`rz-agent sandbox ...` as a person types it, and a provider of somebody else's under it."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from rz_agent.sandboxes.config import SandboxConfig
from rz_agent.sandboxes.keeper import Keeper
from rz_agent.sandboxes.ledger import Ledger
from rz_agent.sandboxes.local import census
from rz_agent.sandboxes.owner import Owner

DOCS = Path(__file__).parent.parent / "docs" / "sandboxes.md"
KEY = "sk-0123456789"


def sandbox(
    *arguments: str, stdin: str = "", path: Path | None = None, **env: str
) -> subprocess.CompletedProcess[str]:
    variables = {**os.environ, **env}
    if path is not None:
        variables["PYTHONPATH"] = os.pathsep.join([str(path), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "rz_agent.cli", "sandbox", *arguments]
    return subprocess.run(command, input=stdin, capture_output=True, text=True, env=variables, timeout=280)


@pytest.fixture
def bare(tmp_path: Path) -> str:
    file = tmp_path / "sandbox.toml"
    file.write_text('[sandbox.local]\nisolation = "none"\n[sandbox.env]\nWORD = "there"\n')
    return str(file)


def test_exec_passes_stdin_output_and_the_exit_code_through(bare: str) -> None:
    script = "cat; echo $WORD; echo err >&2; exit 7"
    done = sandbox("exec", "--sandbox", bare, "--", "sh", "-c", script, stdin="in ")
    assert (done.returncode, done.stdout, done.stderr) == (7, "in there\n", "err\n")


def test_exec_says_when_the_deadline_ended_it(bare: str) -> None:
    done = sandbox("exec", "--sandbox", bare, "--timeout", "0.5", "--", "sleep", "60")
    assert done.returncode == 137
    assert "--timeout" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("exec", "-p", "nonsense", "--", "true"), "Use one of desktop, docker, e2b, local"),
        (("exec", "-p", "nonsense", "--", "true"), "--provider: sandbox.provider = 'nonsense'"),
        (("check", "--sandbox", "/nowhere.toml"), "Name a TOML file"),
        (("reap", "-p", "e2b"), "export E2B_API_KEY="),
        (("bench", "--rounds", "1"), "rounds"),
        (("check", "--only", "zzz"), "Topics are programs"),
        (("exec",), "argv"),
    ],
)
def test_what_cannot_be_meant_ends_with_exit_code_2_and_a_remedy(
    arguments: tuple[str, ...], words: str
) -> None:
    done = sandbox(*arguments, E2B_API_KEY="")
    assert done.returncode == 2
    assert words in done.stderr
    assert "Traceback" not in done.stderr


def test_check_says_what_is_missing_and_how_to_get_it_and_ends_with_exit_code_1(tmp_path: Path) -> None:
    file = tmp_path / "sandbox.toml"
    file.write_text('[sandbox.local]\npython = "/nowhere/python3"\n')
    done = sandbox("check", "--sandbox", str(file))
    assert done.returncode == 1
    assert re.search(r"failed +machine +python: .*/nowhere/python3", done.stdout)
    assert "/usr/bin/python3" in done.stdout


def test_bench_measures_each_operation(bare: str) -> None:
    done = sandbox("bench", "--sandbox", bare, "--rounds", "4")
    rows = dict(re.findall(r"^(.+?)  +([\d.]+)  ", done.stdout, re.MULTILINE))
    assert list(rows) == [
        "create + close", "exec true", "exec python3 -I", "stateful cell", "write 4 KB", "read 4 KB",
    ]  # fmt: skip
    assert all(float(value) > 0 for value in rows.values())


def test_ps_shows_whose_a_sandbox_is_and_a_provider_that_cannot_be_asked_is_a_note() -> None:
    async def listed() -> tuple[str, subprocess.CompletedProcess[str]]:
        config = SandboxConfig.load({"local": {"isolation": "none"}}, source="test")
        async with Keeper.of(config, run_id="mine") as keeper, await keeper.create(config.spec()) as box:
            return box.id, await asyncio.to_thread(sandbox, "ps", E2B_API_KEY="")

    name, done = asyncio.run(listed())
    assert done.returncode == 0
    (line,) = [line for line in done.stdout.splitlines() if name in line]
    assert re.search(r"^local +\S+ +running +\d+ s +mine +alive ", line)
    assert "note: e2b was not asked" in done.stderr


HOLDER = """
import asyncio, sys
from rz_agent.sandboxes.config import SandboxConfig
from rz_agent.sandboxes.keeper import Keeper

async def main():
    config = SandboxConfig.load({"local": {"isolation": "none"}}, source="test")
    print((await Keeper.of(config, run_id="left").create(config.spec())).id, flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


def test_reap_reports_the_sandboxes_of_a_harness_that_was_killed_and_leaves_the_living() -> None:
    with subprocess.Popen([sys.executable, "-c", HOLDER], stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        name = holder.stdout.readline().strip()
        assert name in census.take_census()
        spared = sandbox("reap", "--provider", "local", "--run", "left")
        assert spared.stdout == "nothing was left behind\n"
        assert name in census.take_census()
        holder.kill()
    done = sandbox("reap", "--provider", "local", "--run", "left")
    assert re.search(rf"^local +{name} +left +(removed|had ended)$", done.stdout, re.MULTILINE)
    assert name not in {entry.sandbox_id for entry in Ledger().entries()}


def test_reap_says_of_what_it_left_because_another_place_would_have_to_be_asked() -> None:
    dead = str(replace(Owner.here(), boot="00000000"))
    entry = Ledger().intend(
        provider="local", place="tcp://there", owner=dead, run_id="left", spec_key="k", lifetime_s=1
    )
    done = sandbox("reap", "--provider", "local", "--run", "left")
    assert done.stdout == "nothing was left behind\n"
    assert "note: local at tcp://there: 1 still written down" in done.stderr
    assert entry in Ledger().entries()
    Ledger().forget(entry)


def test_a_file_names_the_provider_that_is_asked_and_its_error_is_the_answer(tmp_path: Path) -> None:
    file = tmp_path / "sandbox.toml"
    file.write_text('[sandbox]\nprovider = "docker"\n[sandbox.docker]\nhost = "unix:///nowhere.sock"\n')
    done = sandbox("reap", "--sandbox", str(file))
    assert done.returncode == 1
    assert "unix:///nowhere.sock" in done.stderr
    assert "nothing was left behind" not in done.stdout


def test_reap_living_takes_a_sandbox_from_its_owner_only_when_told_so() -> None:
    with subprocess.Popen([sys.executable, "-c", HOLDER], stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        name = holder.stdout.readline().strip()
        done = sandbox("reap", "--provider", "local", "--run", "left", "--living")
        assert re.search(rf"^local +{name} +left +removed$", done.stdout, re.MULTILINE)
        assert name not in census.take_census()
        holder.kill()


@pytest.mark.parametrize("command", ["check", "ps", "reap"])
def test_no_command_shows_or_writes_down_a_secret(command: str, own_state: Path) -> None:
    done = sandbox(command, "--provider", "e2b", E2B_API_KEY=KEY, E2B_DOMAIN="127.0.0.1:9")
    assert KEY not in done.stdout + done.stderr
    assert KEY not in "".join(path.read_text() for path in own_state.rglob("*") if path.is_file())


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """A package of somebody else's: the provider in the documentation, in one file, with its entry point."""
    (source,) = re.findall(r"```python\n(\"\"\"Sandboxes that are.*?)```", DOCS.read_text(), re.DOTALL)
    (tmp_path / "mine.py").write_text(source)
    info = tmp_path / "mine-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: mine\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[rz_agent.sandbox_providers]\nmine = mine:MineProvider\n")
    return tmp_path


def test_a_plug_in_that_cannot_be_imported_is_said_in_words(installed: Path) -> None:
    (installed / "mine.py").write_text("import no_such_module_of_ours\n")
    done = sandbox("check", "--provider", "mine", path=installed)
    assert (done.returncode, "Traceback" in done.stderr) == (2, False)
    assert "no_such_module_of_ours" in done.stderr


@pytest.mark.slow
def test_the_provider_in_the_documentation_keeps_every_promise_through_its_entry_point(
    installed: Path,
) -> None:
    done = sandbox("check", "--provider", "mine", path=installed)
    assert done.returncode == 0, done.stdout
    last = done.stdout.splitlines()[-1]
    kept = re.search(r"(\d+) kept", last)
    assert kept is not None
    assert int(kept[1]) >= 60
    assert "broken" not in last


def test_a_plug_in_is_found_by_its_name_and_by_its_module(installed: Path) -> None:
    for name in ("mine", "mine:MineProvider"):
        done = sandbox("exec", "--provider", name, "--", "echo", "of mine", path=installed)
        assert (done.returncode, done.stdout) == (0, "of mine\n"), done.stderr


def test_a_broken_promise_is_a_row_that_says_what_came_instead_and_exit_code_1(installed: Path) -> None:
    file = installed / "mine.py"
    file.write_text(file.read_text() + "\n    async def kill(self, sandbox_id):\n        return False\n")
    done = sandbox("check", "--provider", "mine", "--only", "killed sandbox", path=installed)
    assert done.returncode == 1
    assert re.search(r"broken +life +a killed sandbox is an infrastructure error", done.stdout)
    assert "kill(): promised True, got False" in done.stdout
