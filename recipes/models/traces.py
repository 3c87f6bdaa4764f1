"""Arithmetic with a Python tool, as a noisy teacher would do it.

    draw_problem(rng)      six kinds: times, plus, minus, remainder, digit sum, largest of three
    teach(problem, rng)    a `Trace`: what the teacher says, what the tool answers
    run_code(code)         the tool, for code of exactly the form that traces use

The teacher is wrong on purpose: half the time it guesses without the tool, half of its programs use one
fixed wrong operation, it sometimes copies a digit wrong or breaks its code and tries again. About
(1 - 0.5)(1 - 0.5)(1 - 0.15) = 0.21 of its answers are right, so a policy that imitates it has
something to learn and a reward to learn from. Everything follows from the `random.Random` given.
"""

from __future__ import annotations

import ast
import json
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from random import Random


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """ranges: inclusive, one an operand; question and code: formats of the operands."""

    ranges: tuple[tuple[int, int], ...]
    question: str
    code: str
    wrong_code: str


_TWO_DIGITS = ((10, 99), (10, 99))

KINDS: Mapping[str, Kind] = {
    "times": Kind(
        ranges=_TWO_DIGITS,
        question="What is {0} times {1}?",
        code="print({0}*{1})",
        wrong_code="print({0}+{1})",
    ),
    "plus": Kind(
        ranges=_TWO_DIGITS,
        question="What is {0} plus {1}?",
        code="print({0}+{1})",
        wrong_code="print({0}-{1})",
    ),
    "minus": Kind(
        ranges=_TWO_DIGITS,
        question="What is {0} minus {1}?",
        code="print({0}-{1})",
        wrong_code="print({0}%{1})",
    ),
    "rem": Kind(
        ranges=((100, 999), (10, 99)),
        question="What is the remainder of {0} by {1}?",
        code="print({0}%{1})",
        wrong_code="print({0}*{1})",
    ),
    "digits": Kind(
        ranges=((1000, 9999),),
        question="What is the digit sum of {0}?",
        code="print(sum(map(int,str({0}))))",
        wrong_code="print(len(str(({0}))))",
    ),
    "max": Kind(
        ranges=((10, 99), (10, 99), (10, 99)),
        question="What is the largest of {0}, {1}, {2}?",
        code="print(max({0},{1},{2}))",
        wrong_code="print(min({0},{1},{2}))",
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One question; `code` prints its `answer`."""

    kind: str
    operands: tuple[int, ...]

    @property
    def question(self) -> str:
        return KINDS[self.kind].question.format(*self.operands)

    @property
    def code(self) -> str:
        return KINDS[self.kind].code.format(*self.operands)

    @property
    def answer(self) -> str:
        return run_code(self.code)


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """said: a turn without its stop token; heard: the tool's answer, None after the last turn."""

    said: str
    heard: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """One demonstration. `question` is the user's text."""

    question: str
    steps: tuple[Step, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Teacher:
    """Probabilities of the teacher's faults: a guess without the tool, the wrong operation, a digit
    copied wrong, broken code before the right code."""

    guess: float = 0.5
    wrong: float = 0.5
    slip: float = 0.15
    broken: float = 0.08


def draw_problem(rng: Random) -> Problem:
    kind = rng.choice(list(KINDS))
    operands = tuple(rng.randint(low, high) for low, high in KINDS[kind].ranges)
    return Problem(kind=kind, operands=operands)


def teach(problem: Problem, rng: Random, teacher: Teacher | None = None) -> Trace:
    """The demonstration of one problem.

    >>> sure = Teacher(guess=0, wrong=0, slip=0, broken=0)
    >>> for step in teach(Problem(kind="rem", operands=(345, 67)), Random(0), sure).steps:
    ...     print(step.said, step.heard)
    <tool_call>{"name":"python","arguments":{"code":"print(345%67)"}}</tool_call> 10
    \\boxed{10} None
    """
    teacher = teacher or Teacher()
    if rng.random() < teacher.guess:
        return Trace(question=problem.question, steps=(Step(said=boxed(rng.randint(10, 999))),))
    code = problem.code
    if rng.random() < teacher.wrong:
        code = KINDS[problem.kind].wrong_code.format(*problem.operands)
    steps = []
    if rng.random() < teacher.broken:
        steps.append(Step(said=tool_call(code[:-1]), heard=run_code(code[:-1])))
    heard = run_code(code)
    steps.append(Step(said=tool_call(code), heard=heard))
    answer = heard
    if rng.random() < teacher.slip and heard.lstrip("-").isdigit():
        answer = str(int(heard) + rng.choice([-10, -1, 1, 10]))
    return Trace(question=problem.question, steps=(*steps, Step(said=boxed(answer))))


def tool_call(code: str) -> str:
    call = json.dumps({"name": "python", "arguments": {"code": code}}, separators=(",", ":"))
    return f"<tool_call>{call}</tool_call>"


def boxed(answer: object) -> str:
    return f"\\boxed{{{answer}}}"


def run_code(code: str) -> str:
    """What the trace's one-line program prints: an integer, or the name of its error.

    Interprets `print(...)` over integers with + - * // % and sum, map(int, ...), str, len, max, min,
    abs; anything else is "Error". It never evaluates Python, so sampled text may be given to it.

    >>> run_code("print(sum(map(int,str(1234))))"), run_code("print(2*3"), run_code("print(1%0)")
    ('10', 'SyntaxError', 'ZeroDivisionError')
    """
    try:
        match ast.parse(code.strip(), mode="eval").body:
            case ast.Call(func=ast.Name(id="print"), args=[argument], keywords=[]):
                return str(_value(argument))[:24]
            case _:
                return "Error"
    except SyntaxError:
        return "SyntaxError"
    except ZeroDivisionError:
        return "ZeroDivisionError"
    except (TypeError, ValueError, RecursionError, MemoryError):
        return "Error"


_BINARY: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}


def _value(node: ast.expr) -> object:
    match node:
        case ast.Constant(value=int(value)):
            return value
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_integer(_value(operand))
        case ast.BinOp(left=left, op=sign, right=right) if type(sign) in _BINARY:
            return _BINARY[type(sign)](_integer(_value(left)), _integer(_value(right)))
        case ast.Call(func=ast.Name(id=name), args=args, keywords=[]):
            return _call(name, args)
    raise ValueError(f"{ast.dump(node)} is not in the language of the traces")


def _call(name: str, args: list[ast.expr]) -> object:
    match name, args:
        case "map", [ast.Name(id="int"), digits]:
            return [int(digit) for digit in str(_text(_value(digits)))]
        case "str", [number]:
            return str(_integer(_value(number)))
        case "len", [digits]:
            return len(_text(_value(digits)))
        case "sum", [numbers]:
            values = _value(numbers)
            return sum(values) if isinstance(values, list) else _integer(None)
        case "abs", [number]:
            return abs(_integer(_value(number)))
        case (("max" | "min"), [_, _, *_]):
            return (max if name == "max" else min)(_integer(_value(arg)) for arg in args)
    raise ValueError(f"{name} with {len(args)} arguments is not in the language of the traces")


def _integer(value: object) -> int:
    if not isinstance(value, int):
        raise TypeError("an integer is needed here")
    return value


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError("a text is needed here")
    return value
