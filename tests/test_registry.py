"""Finding environments: by short name, id, path and entry point, with errors a person can act on."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import gymnasium
import pytest
from rz_agent.envs import (
    AgentEnv,
    Episode,
    ListTaskset,
    Rubric,
    Task,
    load,
    make,
    names,
    register,
    resolve,
    reward,
)
from rz_agent.envs.python_math.env import PythonMathEnv
from rz_agent.envs.registry import listed
from rz_agent.errors import ConfigError

PLUG_IN = """
from rz_agent.envs import AgentEnv, ListTaskset, Task, reward

class EchoEnv(AgentEnv):
    taskset = ListTaskset([Task(id="echo", prompt="Say hi.", answer="hi")], name="echo")

    @reward
    def said(self, task, episode):
        return episode.answer == task.answer
"""


class Echo(AgentEnv):
    taskset = ListTaskset([Task(id="echo", prompt="Say hi.", answer="hi")], name="echo")

    @reward
    def said(self, task: Task, episode: Episode) -> float:
        return float(episode.answer == task.answer)


class Install(Protocol):
    def __call__(self, module: str, source: str, *entry_points: str) -> None: ...


@pytest.fixture
def plug_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Installs a module with entry points, the way a package manager leaves them behind."""
    installed: list[str] = []

    def install(module: str, source: str, *entry_points: str) -> None:
        (tmp_path / f"{module}.py").write_text(source)
        info = tmp_path / f"{module}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text("\n".join(["[rz_agent.envs]", *entry_points]))
        installed.append(module)

    monkeypatch.syspath_prepend(str(tmp_path))
    yield install
    for module in installed:
        sys.modules.pop(module, None)


def play(name: str, action: str, **options: Any) -> float:
    async def body() -> float:
        async with load(name, **options) as factory:
            env = factory.create()
            await env.areset(options={"task": factory.taskset.order(seed=0)[0]})
            _, value, *_ = await env.astep(action)
            await env.aclose()
            return value

    return asyncio.run(body())


def test_the_shipped_environment_has_a_short_name_and_an_id() -> None:
    assert names()["python"] == "rz/PythonMath-v0"
    assert resolve("python") == resolve("rz/PythonMath-v0") == gymnasium.registry["rz/PythonMath-v0"]
    env = make("python")
    assert isinstance(env.unwrapped, PythonMathEnv)
    env.close()


def test_a_class_in_a_file_is_found_by_its_path(plug_in: Install) -> None:
    plug_in("by_path", PLUG_IN)
    assert play("by_path:EchoEnv", "hi") == 1.0
    env = gymnasium.make(resolve("by_path:EchoEnv").id).unwrapped
    assert isinstance(env, AgentEnv)
    assert env.max_turns == 8


def test_an_entry_point_names_a_class(plug_in: Install) -> None:
    plug_in("by_class", PLUG_IN, "echo-class = by_class:EchoEnv")
    assert "echo-class" in names()
    assert "by_class" not in sys.modules
    assert play("echo-class", "hi") == 1.0


def test_an_entry_point_names_a_module_that_registers(plug_in: Install) -> None:
    source = PLUG_IN + (
        "from rz_agent.envs import register\n"
        'register("rz_test/Echo-v3", entry_point="by_module:EchoEnv", short_name="echo-short")\n'
    )
    plug_in("by_module", source, "echo-module = by_module")
    assert play("rz_test/Echo-v3", "no") == 0.0
    assert play("echo-short", "hi") == 1.0


def test_a_registration_replaces_tasks_and_rubric() -> None:
    @reward(weight=3.0)
    def loud(task: Task, episode: Episode) -> float:
        return float(episode.answer.isupper())

    tasks = ListTaskset([Task(id="shout", prompt="Shout.")], name="shout")
    register("rz_test/Shout-v0", entry_point=Echo, taskset=tasks, rubric=Rubric(loud))
    assert play("rz_test/Shout-v0", "HEY") == 3.0
    env = gymnasium.make("rz_test/Shout-v0").unwrapped
    assert isinstance(env, AgentEnv)
    assert env.tasks.name == "shout"


def test_a_misspelt_name_is_answered_with_the_near_miss() -> None:
    with pytest.raises(ConfigError, match="Did you mean 'python'"):
        load("pyton")


def test_a_misspelt_option_is_answered_with_the_near_miss() -> None:
    with pytest.raises(ConfigError, match=r"(?s)calls_per_epsiode = 2.*Did you mean 'calls_per_episode'"):
        load("python", calls_per_epsiode=2)


def test_a_wrong_value_names_the_option() -> None:
    with pytest.raises(ConfigError, match=r"(?s)difficulty = 0.*greater than or equal to 1"):
        load("python", difficulty=0)


@pytest.mark.parametrize("path", ["no_such_module:Env", "json:NoSuchClass", "json:JSONDecoder"])
def test_a_path_that_leads_nowhere_says_so(path: str) -> None:
    with pytest.raises(ConfigError, match=r"env\.id"):
        load(path)


def test_a_plug_in_that_does_not_import_is_named(plug_in: Install) -> None:
    plug_in("broken_plug_in", "import no_such_dependency", "broken-env = broken_plug_in:Env")
    with pytest.raises(ConfigError, match=r"(?s)broken-env of broken_plug_in.*no_such_dependency"):
        load("broken-env")


def test_a_broken_plug_in_does_not_hide_a_misspelt_name_and_is_listed_as_broken(plug_in: Install) -> None:
    plug_in("broken_other", "import no_such_dependency", "broken-other = broken_other:Env")
    with pytest.raises(ConfigError, match="Did you mean 'python'"):
        load("pyton")
    assert "broken" in listed()["broken-other"]
    assert "(broken" not in listed()["python"]


@pytest.mark.parametrize(
    ("source", "fault"),
    [
        ("x = 1\nif x\n", r"SyntaxError.*bad_module\.py:2"),
        ("x = 1\nimport no_such_dependency\n", r"no_such_dependency.*bad_module\.py:2"),
        (PLUG_IN.replace("EchoEnv", "OtherEnv"), r"no EchoEnv in .*bad_module\.py"),
    ],
)
def test_a_module_that_cannot_be_used_is_refused_with_its_line(
    plug_in: Install, source: str, fault: str
) -> None:
    plug_in("bad_module", source)
    with pytest.raises(ConfigError, match=rf"(?s)env\.id = 'bad_module:EchoEnv'.*{fault}"):
        load("bad_module:EchoEnv")


def test_two_environments_cannot_share_a_short_name() -> None:
    with pytest.raises(ConfigError, match="is rz/PythonMath-v0"):
        register("rz_test/Other-v0", entry_point=Echo, short_name="python")


def test_an_environment_without_a_reward_is_refused() -> None:
    class Pointless(AgentEnv):
        taskset = Echo.taskset

    with pytest.raises(ConfigError, match="has no reward"):
        Pointless()
