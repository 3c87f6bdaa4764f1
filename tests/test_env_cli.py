"""`rz-agent env ...` and `runs episode` as a person types them."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from rz_agent import cli
from rz_agent.envs.recording_page import load_recording
from rz_agent.journal import GroupRecord, Journal
from rz_agent.recipes import runs
from rz_agent.recipes.models.tokenizer import build_tokenizer
from rz_agent.recipes.recipe import Recipe
from rz_agent.recipes.sections import ModelSection
from rz_agent.rollout.renderer import Renderer
from rz_agent.trajectory import Segment, Trajectory

DOCS = Path(__file__).parent.parent / "docs" / "environments.md"
Answer = tuple[int, str, str]
Command = Callable[..., Answer]

BROKEN = """
from rz_agent.envs import AgentEnv, Case, InfraFailure, ListTaskset, Task, replayed, reward, silent


class BrokenEnv(AgentEnv):
    taskset = ListTaskset([Task(id="only", prompt="Go.", answer="done")], name="one")

    @reward
    def right(self, task, episode):
        return 0.25

    @classmethod
    def self_test(cls, tasks, scratch):
        task = tasks.load("train")[0]
        return [
            Case(name="doing nothing scores 0", task=task, agent=silent, reward=0.0),
            Case(name="needs a moon", task=task, agent=silent, reward=0.0, skip="no moon here"),
        ]


class LostEnv(BrokenEnv):
    scripted = staticmethod(lambda task, shown: iter(["hello"]))

    def begin(self, task):
        raise InfraFailure("the place is gone")
"""


@pytest.fixture
def rz_agent(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Command:
    """The command in this process, in a folder with a module of broken environments."""
    (tmp_path / "broken_env.py").write_text(BROKEN)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)

    def command(*arguments: object) -> Answer:
        monkeypatch.setattr(sys, "argv", ["rz-agent", *map(str, arguments)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            cli.main()
        said = capsys.readouterr()
        return int(ended.value.code or 0), said.out, said.err

    return command


def test_list_names_what_is_shipped(rz_agent: Command) -> None:
    code, said, _ = rz_agent("env", "list")
    assert code == 0
    assert "rz/PythonMath-v0" in said


def test_check_plays_the_self_test_of_an_environment_and_exits_0(rz_agent: Command) -> None:
    code, said, _ = rz_agent("env", "check", "python", "--only", "scores")
    rows = [line.split(maxsplit=3)[-1] for line in said.splitlines()[:-1]]
    assert (code, said.splitlines()[-1]) == (0, f"{len(rows)} passed")
    assert "the scripted solution scores 1: times" in rows
    assert "doing nothing scores 0" in rows


def test_check_exits_1_and_says_which_promise_is_broken_and_which_cannot_be_tried(rz_agent: Command) -> None:
    code, said, _ = rz_agent("env", "check", "broken_env:BrokenEnv")
    assert (code, said.splitlines()[-1]) == (1, "4 passed, 1 failed, 1 skipped")
    assert "reward 0.25 instead of 0" in said
    assert "no moon here" in said


def test_a_scripted_episode_is_recorded_and_replayed(rz_agent: Command, tmp_path: Path) -> None:
    code, said, _ = rz_agent("env", "run", "python", "--episodes", 2, "--record", "episode.html")
    assert (code, said.count("reward 1, terminated (answered)")) == (0, 2)
    first, second = (load_recording(tmp_path / name) for name in ("episode.html", "episode-2.html"))
    assert first.task_id != second.task_id
    code, said, _ = rz_agent("env", "run", "python", "--agent", "replay", "--episode", "episode-2.html")
    assert (code, said.count("reward 1")) == (0, 2)
    assert second.task_id in said
    code, said, _ = rz_agent("env", "run", "python", "--task", second.task_id, "--record", "again.json")
    assert code == 0
    assert json.loads((tmp_path / "again.json").read_text())["task_id"] == second.task_id


def test_an_episode_that_lost_its_place_exits_1_with_the_reason(rz_agent: Command) -> None:
    code, said, _ = rz_agent("env", "run", "broken_env:LostEnv", "--set", "sandbox.provider=local")
    assert (code, said) == (1, "only: reward 0, masked (InfraFailure: the place is gone)\n")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("run", "broken_env:BrokenEnv"), "--agent = 'scripted' is not there"),
        (("run", "python", "--task", "nonsense"), "--task = 'nonsense' is no task of the split test"),
        (("run", "python", "--agent", "replay"), "--episode = '' is missing"),
        (("run", "python", "--agent", "replay", "--episode", "broken_env.py"), "is no recorded episode"),
        (("run", "python", "--record", "episode.txt"), "must end in .html or .json"),
        (("run", "python", "--split", "nonsense"), "--split = 'nonsense'"),
        (("check", "pyhton"), "Did you mean 'python'?"),
        (("init", "9 lives"), "NAME = '9 lives' is no name for a package"),
        (("init", "json"), "is a module of Python's own"),
        (("init", "fine", "--out", "."), "--out = '.' exists"),
    ],
)
def test_what_cannot_be_meant_exits_2_with_a_remedy(
    rz_agent: Command, arguments: tuple[str, ...], words: str
) -> None:
    code, _, complaint = rz_agent("env", *arguments)
    assert code == 2
    assert words in complaint
    assert "Traceback" not in complaint


def test_a_new_environment_passes_its_own_test_and_plays(rz_agent: Command, tmp_path: Path) -> None:
    code, said, _ = rz_agent("env", "init", "word-game")
    assert (code, "rz-agent env check word-game" in said) == (0, True)
    folder = tmp_path / "word-game"
    path = os.pathsep.join([str(folder), *sys.path])
    tested = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(folder)],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert "2 passed" in tested.stdout, tested.stdout
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        code, said, _ = rz_agent("env", "run", "word_game.env:WordGameEnv", "--split", "train")
    assert (code, said) == (0, "apple: reward 1, terminated (finished)\n")


@pytest.mark.slow
def test_a_model_plays_through_the_engine(rz_agent: Command, unskilled: Path, tmp_path: Path) -> None:
    arguments = ("--agent", "model", "--model", unskilled, "--record", "episode.html", "--episodes", 2)
    code, said, _ = rz_agent("env", "run", "python", *arguments, "--set", "rollout.engine.mode=inprocess")
    assert (code, said.count("reward ")) == (0, 2)
    episode = load_recording(tmp_path / "episode.html")
    assert [one.role for one in episode.said[:2]] == ["user", "assistant"]
    assert {"correct", "format_ok"} <= episode.figures.keys()


def test_the_environments_of_the_documentation_keep_their_promises(rz_agent: Command, tmp_path: Path) -> None:
    rows = [{"question": "The capital of France?", "answer": "Paris"}, {"question": "2+2?", "answer": "4"}]
    (tmp_path / "problems.jsonl").write_text("\n".join(map(json.dumps, rows)))
    modules = dict(re.findall(r"```python\n# (\w+)\.py\n(.*?)```", DOCS.read_text(), re.DOTALL))
    assert modules.keys() == {"guess", "trivia", "divisors", "lake", "echo"}
    for name, text in modules.items():
        (tmp_path / f"{name}_of_docs.py").write_text(text)
        classes = re.findall(r"^(?:class )?(\w+Env)\b", text, re.MULTILINE)
        for only in ("check_env", "scores"):
            code, said, _ = rz_agent("env", "check", f"{name}_of_docs:{classes[0]}", "--only", only)
            assert "failed" not in said, said
            assert code == 0 or only == "scores"
    assert said.splitlines()[-1] == "2 passed"


# --- an episode of a run ----------------------------------------------------------------------------------


@pytest.fixture
def run(tmp_path: Path) -> tuple[Path, Renderer]:
    """A run whose journal holds one episode of two turns."""
    model = tmp_path / "model"
    build_tokenizer(model)
    (model / "config.json").write_text("{}")
    renderer = Renderer(model)
    path = runs.new_run(tmp_path / "runs", "mine")
    recipe = Recipe(name="mine", model=ModelSection(path=str(model)))
    runs.save_recipe(path, recipe)
    task = "arithmetic:max:13,87,34"
    pieces = [
        (renderer.first([{"role": "user", "content": "What is the largest?"}]), False),
        (renderer.encode("<b>hm</b>"), True),
        (renderer.encode("no"), False),
        (renderer.encode("\\boxed{87}"), True),
    ]
    mask = np.concatenate([np.full(len(ids), acts) for ids, acts in pieces])
    segment = Segment(
        token_ids=np.concatenate([ids for ids, _ in pieces]),
        action_mask=mask,
        behaviour_logprobs=np.where(mask, -0.5, np.nan),
        policy_version=np.where(mask, 0, -1),
    )
    with Journal.open(path / runs.JOURNAL, run={"recipe": recipe.model_dump(mode="json")}) as journal:
        journal.admit(GroupRecord(group_id="g0", task_id=task, position=0, size=1, admitted_version=0))
        episode = Trajectory(
            episode_id="g0-0",
            group_id="g0",
            task_id=task,
            segments=(segment,),
            reward=1.0,
            metrics={"turns": 2.0},
        )
        journal.finish_episode(episode, 0)
    return path, renderer


def test_an_episode_of_a_run_is_shown_as_the_policy_saw_it(
    rz_agent: Command, run: tuple[Path, Renderer], tmp_path: Path
) -> None:
    path, _ = run
    code, said, _ = rz_agent("runs", "episode", path, "g0-0")
    assert code == 0
    assert "--- policy\n\\boxed{87}" in said
    assert said.endswith("--- reward 1, terminated\n")
    code, _, _ = rz_agent("runs", "episode", path, "g0-0", "--html", "episode.html")
    episode = load_recording(tmp_path / "episode.html")
    assert (code, episode.actions, episode.said[2].text) == (0, ("<b>hm</b>", "\\boxed{87}"), "no")
    assert "What is the largest?" in episode.said[0].text
    assert "<b>hm" not in (tmp_path / "episode.html").read_text()


def test_an_episode_that_a_run_does_not_have_is_refused_with_what_it_has(
    rz_agent: Command, run: tuple[Path, Renderer]
) -> None:
    code, _, complaint = rz_agent("runs", "episode", run[0], "g7-0")
    assert code == 2
    assert "an episode is GROUP-INDEX, as g0-0" in complaint
