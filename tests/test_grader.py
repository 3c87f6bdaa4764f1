"""Grading: the right verdict for every recorded pair, whatever an answer does to the comparing process."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rz_agent.envs.failure import InfraFailure
from rz_agent.envs.hooks import Portal
from rz_agent.envs.python_math.answers import LIMIT, equal_integers, last_boxed
from rz_agent.envs.python_math.grader import Grader, _Worker
from rz_agent.errors import ConfigError

PAIRS = [
    json.loads(line)
    for line in (Path(__file__).parent / "fixtures/math_pairs.jsonl").read_text().splitlines()
]
# Verdicts that math-verify alone gets wrong, and their neighbours.
MORE = [
    ("7", r"\{7\}", False),
    ("7", "{7}", False),
    ("7", "7 or 6", False),
    (r"\{1,2\}", r"\{2,1\}", True),
    (r"10\%", "10", False),
    (r"10\%", r"\frac{1}{10}", True),
    ("10", r"10\%", True),
    ("1", "1=1", False),
    ("5", "x=5", True),
    ("-1", r"e^{i\pi}", True),
    ("204", "<answer>204</answer>", True),
    ("204", "$204$", True),
    ("1/3", "0.333333", False),
    ("1/3", "0.333", False),
    (r"\sqrt2", "1.41421356", False),
    ("0.5", r"\frac12", True),
    ("(1,2)", "[1,2]", False),
    ("(1,3)", "1<x<3", False),
    ("42", "42 cm", True),
    (r"5\text{ m}", "5", True),
    (r"5\text{ m}", r"500\text{ g}", False),
    ("5 m", "500 cm", True),
    ("2 hours", r"120\text{ minutes}", True),
    ("B", "(B)", True),
    ("B", r"\text{(B)}", True),
    ("B", "C", False),
    ("Friday", r"\text{friday}", True),
    ("x^2-1", "(x-1)(x+1)", True),
    ("3", "", False),
]


Run = Callable[[Callable[[Grader], Awaitable[Any]]], Any]


@pytest.fixture(scope="module")
def run() -> Iterator[Run]:
    """Runs `async (grader) -> value` with one warm grader."""
    portal, grader = Portal(), Grader(workers=2, deadline_s=3.0)
    portal.run(grader.warm())

    def call(function: Callable[[Grader], Awaitable[Any]]) -> Any:
        async def body() -> Any:
            return await function(grader)

        return portal.run(body())

    yield call
    portal.run(grader.aclose())
    portal.close()


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: f"{pair['gold']}~{pair['boxed']}")
def test_every_recorded_pair_gets_the_right_verdict(run: Run, pair: dict[str, Any]) -> None:
    assert run(lambda grader: grader.math(pair["gold"], pair["boxed"])) == pair["right"]


def test_what_math_verify_gets_wrong_is_right(run: Run) -> None:
    async def verdicts(grader: Grader) -> list[bool]:
        return await asyncio.gather(*(grader.math(gold, answer) for gold, answer, _ in MORE))

    wrong = [pair for pair, verdict in zip(MORE, run(verdicts), strict=True) if verdict != pair[2]]
    assert wrong == []


def test_a_comparison_that_does_not_end_is_wrong_by_the_deadline_and_the_next_job_is_graded(run: Run) -> None:
    async def hang_then_grade(grader: Grader) -> tuple[bool, float, bool]:
        began = time.monotonic()
        verdict = await grader.math("7", "9^{9^{9^9}}")
        return verdict, time.monotonic() - began, await grader.math("1/2", "0.5")

    verdict, seconds, after = run(hang_then_grade)
    assert (verdict, after) == (False, True)
    assert seconds < 3.0 + 1.5


def pid_of(worker: _Worker) -> int:
    assert worker._process is not None
    return worker._process.pid


def test_a_worker_killed_in_the_middle_is_no_verdict_but_another_try() -> None:
    async def body() -> bool:
        async with Grader(workers=1, deadline_s=20.0) as grader:
            await grader.warm()
            pid = pid_of(grader._all[0])
            grading = asyncio.ensure_future(grader.math("\\frac{1}{2}", "\\frac{2}{4}"))
            os.kill(pid, signal.SIGKILL)
            return await grading

    assert asyncio.run(body()) is True


def test_a_library_that_is_missing_is_an_error_of_the_run_and_masks_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "math_verify.py").write_text("raise ImportError('no antlr4 here')")
    monkeypatch.syspath_prepend(tmp_path)  # a worker sees what this process sees

    async def body() -> bool:
        async with Grader(workers=1) as grader:
            assert await grader.math("7", "7")  # plain integers need no library
            return await grader.math("1/2", "0.5")

    with pytest.raises(ConfigError, match="no antlr4 here") as refused:
        asyncio.run(body())
    assert refused.value.key == "math-verify"


def test_a_grader_whose_workers_cannot_live_is_an_infrastructure_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = tmp_path / "worker.py"
    broken.write_text("raise SystemExit(3)")
    monkeypatch.setattr("rz_agent.envs.python_math.grader._WORKER", broken)

    async def body() -> None:
        async with Grader(workers=1) as grader:
            await grader.math("x", "y")

    with pytest.raises(InfraFailure, match="exit code 3"):
        asyncio.run(body())


def test_a_cancelled_grade_returns_at_once_and_the_grader_goes_on(run: Run) -> None:
    async def body(grader: Grader) -> tuple[float, bool]:
        grading = [asyncio.ensure_future(grader.math("7", "9^{9^{9^9}}")) for _ in range(3)]
        await asyncio.sleep(0.05)
        began = time.monotonic()
        for one in grading:
            one.cancel()
        await asyncio.gather(*grading, return_exceptions=True)
        return time.monotonic() - began, await grader.math("1/2", "0.5")

    seconds, after = run(body)
    assert seconds < 1
    assert after is True


def test_a_closed_grader_leaves_no_process() -> None:
    async def body() -> list[int]:
        async with Grader(workers=1) as grader:
            await grader.warm()
            return [pid_of(worker) for worker in grader._all]

    for pid in asyncio.run(body()):
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_every_reasoning_gym_scorer_takes_its_own_answer_and_refuses_nonsense(run: Run) -> None:
    from rz_agent.envs import from_reasoning_gym

    names = ["gcd", "countdown", "mini_sudoku", "spell_backward", "number_sorting", "simple_equations"]

    async def scores(grader: Grader) -> dict[str, tuple[float, float]]:
        found = {}
        for name in names:
            task = from_reasoning_gym(name).order(seed=3)[5]
            entry = task.metadata["reasoning_gym"]["entry"]
            assert task.answer is not None
            right = await grader.reasoning_gym(name, entry, task.answer)
            found[name] = right, await grader.reasoning_gym(name, entry, "nonsense")
        return found

    for name, (right, wrong) in run(scores).items():
        assert right >= 0.99, name
        assert wrong < 0.99, name


@pytest.mark.parametrize(
    ("content", "answer"),
    [
        (r"\boxed{10}", "10"),
        (r"either \boxed{6} or \boxed{7}", "7"),
        (r"\boxed{6} and \boxed{7", "6"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{\boxed{5}}", "5"),
        (r"\boxed {\{1,2\}}", r"\{1,2\}"),
        (r"\boxed{}", None),
        ("10", None),
        (r"\boxed{" + "1" * (LIMIT + 1) + "}", None),
    ],
)
def test_the_answer_is_the_last_balanced_box(content: str, answer: str | None) -> None:
    assert last_boxed(content) == answer


@settings(deadline=None)
@given(st.text() | st.lists(st.sampled_from([r"\boxed{", "{", "}", "\\", "1"])).map("".join))
def test_any_text_has_an_answer_or_none(content: str) -> None:
    answer = last_boxed(content)
    assert answer is None or (answer in content and 0 < len(answer) <= LIMIT)


def test_a_hostile_text_is_searched_in_no_time() -> None:
    began = time.monotonic()
    last_boxed("\\boxed{" * 5_000)
    assert time.monotonic() - began < 5


@settings(max_examples=20, deadline=None)
@given(st.integers(-50, 50), st.integers(-50, 50), st.sampled_from(["", "0", "00", "+"]))
def test_the_shortcut_for_integers_agrees_with_math_verify(
    run: Run, gold: int, answer: int, prefix: str
) -> None:
    from rz_agent.envs.python_math.grader_worker import equivalent

    text = f"{prefix}{answer}" if answer >= 0 else str(answer)
    assert equal_integers(str(gold), text) == equivalent(str(gold), text)
