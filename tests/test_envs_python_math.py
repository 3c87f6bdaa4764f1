"""`rz/PythonMath-v0` with a real sandbox and a real grader."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from rz_agent.envs import EnvFactory, Task, load
from rz_agent.envs.hooks import Portal
from rz_agent.envs.python_math.tasks import KINDS, ArithmeticTaskset
from rz_agent.sandboxes.config import SandboxConfig
from rz_agent.sandboxes.pool import SandboxPool

TASK = Task(id="rem", prompt="What is the remainder of 345 by 67?", answer="10")
Play = Callable[..., Any]


def python(code: str) -> str:
    return f"<tool_call>{json.dumps({'name': 'python', 'arguments': {'code': code}})}</tool_call>"


def output(step: Any) -> str:
    (message,) = step[0]["messages"]
    assert message["role"] == "tool"
    return str(message["content"])


@pytest.fixture(scope="module")
def pool() -> Iterator[tuple[Portal, SandboxPool]]:
    portal = Portal()
    sandboxes = SandboxPool.of(SandboxConfig())
    yield portal, sandboxes
    portal.run(sandboxes.aclose())
    portal.close()


@pytest.fixture
def play(pool: tuple[Portal, SandboxPool]) -> Play:
    """Plays actions in one episode, or runs `async (factory) -> value`."""
    portal, sandboxes = pool

    def run(*actions: str, task: Task = TASK, body: Any = None, **options: Any) -> Any:
        async def episode() -> Any:
            async with load("python", sandboxes=sandboxes, **options) as factory:
                if body is not None:
                    return await body(factory)
                env = factory.create()
                await env.areset(options={"task": task})
                try:
                    return [await env.astep(action) for action in actions]
                finally:
                    await env.aclose()

        return portal.run(episode())

    return run


def test_the_episode_of_the_tiny_policy(play: Play) -> None:
    call, answer = play(
        '<tool_call>{"name":"python","arguments":{"code":"print(345%67)"}}</tool_call>', "\\boxed{10}"
    )
    assert (output(call), call[1], call[2]) == ("10", 0.0, False)
    assert (answer[1], answer[2], answer[3]) == (1.0, True, False)
    assert answer[4]["metrics"] == {
        "turns": 2.0, "tool_calls": 1.0, "malformed_calls": 0.0, "format_ok": 1.0, "python_calls": 1.0
    }  # fmt: skip


def test_state_stays_and_a_last_expression_is_shown(play: Play) -> None:
    steps = play(python("x = 20"), python("x + 1"), python("1/0"))
    assert output(steps[0]) == "(no output)"
    assert output(steps[1]) == "21"
    assert output(steps[2]).endswith("ZeroDivisionError: division by zero")


def test_an_answer_without_a_box_is_worth_nothing_and_says_so(play: Play) -> None:
    (step,) = play("It is 10.")
    assert (step[1], step[2], step[4]["metrics"]["format_ok"]) == (0.0, True, 0.0)


def test_a_box_in_a_thought_is_no_answer(play: Play) -> None:
    (step,) = play("<think>\\boxed{10}</think>\\boxed{11}")
    assert (step[1], step[4]["metrics"]["format_ok"]) == (0.0, 1.0)


def test_calls_run_out_with_a_message(play: Play) -> None:
    steps = play(python("1"), python("2"), "\\boxed{10}", calls_per_episode=1)
    assert output(steps[1]).startswith("Error: no calls left")
    assert steps[2][1] == 1.0


def test_an_endless_program_is_stopped_and_its_state_kept_or_said_to_be_lost(play: Play) -> None:
    steps = play(python("x = 1"), python("while True: pass"), python("x"), tool_timeout_s=0.5)
    assert "The program was stopped after 0.5 s." in output(steps[1])
    assert output(steps[2]) == "1"


def test_an_interpreter_that_ended_is_announced(play: Play) -> None:
    steps = play(python("x = 1"), python("import os; os._exit(3)"), python("x"))
    assert output(steps[1]) == (
        "The interpreter ended (exit code 3).\nThe interpreter was restarted: variables and imports are gone."
    )
    assert output(steps[2]).endswith("NameError: name 'x' is not defined")


def test_long_output_keeps_head_and_tail(play: Play) -> None:
    (step,) = play(python("print('a' * 1000 + 'z' * 1000)"), output_chars=100)
    assert output(step) == "a" * 50 + "\n[... 1900 characters cut ...]\n" + "z" * 50


def test_episodes_share_a_sandbox_and_nothing_else(play: Play) -> None:
    async def body(factory: EnvFactory) -> list[str]:
        envs = [factory.create() for _ in range(24)]
        for env in envs:
            await env.areset(options={"task": TASK})
        await asyncio.gather(*(env.astep(python(f"x = {i}; open('/tmp/f', 'w').write('{i}')"))
                               for i, env in enumerate(envs)))  # fmt: skip
        seen = await asyncio.gather(*(env.astep(python("print(x, open('/tmp/f').read())")) for env in envs))
        for env in envs:
            await env.aclose()
        return [output(step) for step in seen]

    assert play(body=body) == [f"{i} {i}" for i in range(24)]


def test_a_cancelled_call_takes_its_interpreter_with_it(play: Play, pool: tuple[Portal, SandboxPool]) -> None:
    async def body(factory: EnvFactory) -> tuple[bool, dict[str, int], str]:
        env = factory.create()
        await env.areset(options={"task": TASK})
        step = asyncio.ensure_future(env.astep(python("while True: pass")))
        await asyncio.sleep(1.0)
        step.cancel()
        await asyncio.gather(step, return_exceptions=True)
        users = dict(pool[1]._users)
        await env.areset(options={"task": TASK})
        again = output(await env.astep(python("'alive'")))
        await env.aclose()
        return step.cancelled(), users, again

    cancelled, users, again = play(body=body)
    assert cancelled
    assert again == "'alive'"
    assert set(users.values()) == {0}


def test_a_sandbox_that_dies_masks_its_episodes_and_the_next_one_gets_another(play: Play, pool: Any) -> None:
    async def body(factory: EnvFactory) -> Any:
        env, other = factory.create(), factory.create()
        for one in (env, other):
            await one.areset(options={"task": TASK})
        await env.astep(python("1"))
        sandbox = await pool[1].acquire()
        await sandbox.close()
        await pool[1].release(sandbox)
        lost = await env.astep(python("2"))
        fine = await other.astep(python("3"))
        await asyncio.gather(env.aclose(), other.aclose())
        return lost, fine

    lost, fine = play(body=body)
    assert lost[4]["mask"].startswith("Died: ")
    assert (lost[2], lost[3]) == (False, True)
    assert output(fine) == "3"


def test_a_system_prompt_comes_first_and_tools_are_shown_on_demand(play: Play) -> None:
    async def body(factory: EnvFactory) -> Any:
        env = factory.create()
        observation, _ = await env.areset(options={"task": TASK})
        await env.aclose()
        return [message["role"] for message in observation["messages"]], env.prompt_tools

    roles, tools = play(body=body, system_prompt="Use python.", tools_in_prompt=True)
    assert roles == ["system", "user"]
    assert tools[0]["function"]["parameters"]["required"] == ["code"]
    assert play(body=body) == (["user"], [])


def test_reasoning_gym_is_scored_by_its_own_scorer(play: Play) -> None:
    async def body(factory: EnvFactory) -> list[float]:
        env, task = factory.create(), factory.taskset.order(seed=0)[2]
        rewards = []
        for answer in (task.answer, "nonsense"):
            await env.areset(options={"task": task})
            rewards.append((await env.astep(f"\\boxed{{{answer}}}"))[1])
        await env.aclose()
        return rewards

    assert play(body=body, taskset="reasoning-gym:spell_backward") == [1.0, 0.0]


def test_a_jsonl_file_is_a_taskset(play: Play, tmp_path: Path) -> None:
    file = tmp_path / "own.jsonl"
    file.write_text('{"prompt": "A half?", "answer": "\\\\frac{1}{2}"}\n')

    async def body(factory: EnvFactory) -> float:
        env = factory.create()
        await env.areset(options={"task": factory.taskset.order(seed=0)[5]})
        value = (await env.astep("\\boxed{0.5}"))[1]
        await env.aclose()
        return float(value)

    assert play(body=body, taskset=str(file)) == 1.0


def test_arithmetic_asks_all_six_kinds_in_the_words_of_the_tiny_policy() -> None:
    order = ArithmeticTaskset().order(seed=0)
    tasks = [order[p] for p in range(200)]
    assert {task.metadata["kind"] for task in tasks} == set(KINDS)
    numbers = {task.metadata["kind"]: re.findall(r"\d+", str(task.prompt[0]["content"])) for task in tasks}
    assert {kind: [len(n) for n in found] for kind, found in numbers.items()} == {
        "times": [2, 2], "plus": [2, 2], "minus": [2, 2], "rem": [3, 2], "digits": [4], "max": [2, 2, 2]
    }  # fmt: skip
    code = {"times": "{}*{}", "plus": "{}+{}", "minus": "{}-{}", "rem": "{}%{}",
            "digits": "sum(map(int,str({})))", "max": "max({},{},{})"}  # fmt: skip
    for task in tasks:
        found = re.findall(r"\d+", str(task.prompt[0]["content"]))
        assert task.answer == str(eval(code[task.metadata["kind"]].format(*found)))


def test_arithmetic_is_pure_by_position_and_never_trains_on_a_test_question() -> None:
    tasks, harder = ArithmeticTaskset(), ArithmeticTaskset(difficulty=3)
    assert tasks.order(1)[77] == ArithmeticTaskset().order(1)[77]
    assert tasks.order(1)[77] != tasks.order(2)[77]
    trained = {tasks.order(0)[p].id for p in range(2000)}
    assert not trained & {task.id for task in tasks.load("test")}
    assert len(harder.order(0)[0].id) > len(max(trained, key=len)) - 4
