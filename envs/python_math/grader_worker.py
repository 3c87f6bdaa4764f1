"""The process in which answers are compared: math-verify behind the rules it lacks.

    stdin    one JSON job a line: {"kind": "math", "gold", "answer", "deadline_s"}
             or {"kind": "reasoning_gym", "dataset", "entry", "answer", "deadline_s"}
    stdout   {"ready": true} once warm, or {"failed": why} and the end; then for a job {"begun": true} as its
             deadline starts to run (after an import it may need), and {"score": float}

Run by its path as a program of its own, so it imports nothing of this package. It may hang or eat memory on
a hostile answer, and is built to be killed: it kills itself by an alarm at the deadline of a job, its memory
is bounded, and it ends with its parent's end of the pipe.
Waits: for the next job; its parent waits for it no longer than the deadline and a grace.
"""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import sys
from collections.abc import Callable
from typing import Any

MEMORY_BYTES = 2 << 30

# dimension -> factor -> names of the units that answers come with
_DIMENSIONS = {
    "length": {"1000": "km", "1": "m meter meters", "1/100": "cm", "1/1000": "mm"},
    "mass": {"1": "kg", "1/1000": "g", "1/1000000": "mg"},
    "time": {"3600": "h hour hours", "60": "min minute minutes", "1": "s second seconds", "1/1000": "ms"},
    "volume": {"1": "L l", "1/1000": "mL ml"},
}
_UNITS = {
    name: (dimension, factor)
    for dimension, factors in _DIMENSIONS.items()
    for factor, names in factors.items()
    for name in names.split()
}
_TEXT_UNIT = re.compile(r"(.*\S)\s*\\(?:text|mathrm|textrm|mbox)\s*\{\s*([A-Za-z]+)\s*\}(?:\^\{?([23])\}?)?")
_PLAIN_UNIT = re.compile(r"(.*[\d}])\s+([A-Za-z]+)(?:\^\{?([23])\}?)?")
_WRAPPERS = (
    re.compile(r"\$+(.*?)\$+", re.S),
    re.compile(r"\\\((.*)\\\)", re.S),
    re.compile(r"\\\[(.*)\\\]", re.S),
    re.compile(r"<answer>(.*)</answer>", re.S),
    re.compile(r"\\boxed\s*\{(.*)\}", re.S),
)
_THOUSANDS = re.compile(r"[+-]?\d{1,3}(,\d{3})+(\.\d+)?")
_DECIMAL = re.compile(r"[+-]?\d*\.\d+|[+-]?\d+\.")
_NAME = re.compile(r"\\?[A-Za-z][A-Za-z]*(_\{?\w+\}?)?'?(\s*\(\s*\w+\s*\))?")
_LETTER = re.compile(r"\(?\s*(?:\\(?:text|mathrm|textbf)\s*\{)?\s*\(?([A-Za-z])\)?\s*\}?\s*\)?\.?")
_PERCENT = re.compile(r"\s*\\?%$")


def equivalent(gold: str, answer: str) -> bool:
    """Whether an answer is the gold answer, written another way.

    Equal text is equal. Else the kinds must agree (a list is no number, an equation of two numbers is no
    number, a percentage is a hundredth, a choice is its letter), units are converted, math-verify compares,
    and a decimal that only rounds to an exact gold answer is wrong.
    """
    gold, answer = _plain(gold), _plain(answer)
    if gold == answer:
        return bool(gold)
    if re.fullmatch(r"[A-Z]", gold):
        letter = _LETTER.fullmatch(answer)
        return letter is not None and letter[1] == gold
    if not _same_kind(gold, answer):
        return False
    (gold, gold_unit), (answer, answer_unit) = _unit(gold), _unit(answer)
    if gold_unit and answer_unit:
        if gold_unit[0] != answer_unit[0]:
            return False
        gold, answer = f"({gold})*({gold_unit[1]})", f"({answer})*({answer_unit[1]})"
    if _PERCENT.search(gold):
        gold, answer = f"({_PERCENT.sub('', gold)})/100", _hundredth(answer)
    return _same_value(gold, _right_hand_side(gold, answer))


def _plain(text: str) -> str:
    """Without what changes the look only."""
    text = text.replace("\u2212", "-").replace("\\left", "").replace("\\right", "").replace("\\%", "%")
    text = re.sub(r"\\[dt]frac", r"\\frac", text)
    text = re.sub(r"\\[!,;: ]|~", " ", text)
    while True:
        text = text.strip().removesuffix(".").strip() if not re.search(r"\d\.$", text) else text.strip()
        for wrapper in _WRAPPERS:
            if match := wrapper.fullmatch(text):
                text = match[1]
                break
        else:
            return text.removesuffix(".") if re.search(r"\d\.$", text) else text


def _same_kind(gold: str, answer: str) -> bool:
    # "1,2" is a way to write "(1,2)", and none to write "7".
    if _several(answer) and not _several(gold) and gold[:1] not in "([":
        return False
    # "1=1" states something; it does not say 1. "x=5" does say 5.
    if "=" in answer and "=" not in gold and not re.search(r"[<>]|\\[lg]e", answer):
        name, _, _ = answer.partition("=")
        return answer.count("=") == 1 and _NAME.fullmatch(name.strip()) is not None
    return True


def _several(text: str) -> bool:
    """Whether the text lists things: "7,7", "7 or 6", "{7}"; not "1,000" and not "(1,2)"."""
    if _THOUSANDS.fullmatch(text):
        return False
    if text.startswith(("\\{", "{")) and text.endswith("}"):
        return True
    if re.search(r"\b(or|and)\b", text):
        return True
    depth = 0
    for character in text:
        depth += (character in "([{") - (character in ")]}")
        if depth == 0 and character in ",;":
            return True
    return False


def _unit(text: str) -> tuple[str, tuple[str, str] | None]:
    """The text without a known unit, and the unit's (dimension, factor)."""
    match = _TEXT_UNIT.fullmatch(text) or _PLAIN_UNIT.fullmatch(text)
    if not match or match[2] not in _UNITS:
        return text, None
    dimension, factor = _UNITS[match[2]]
    power = match[3] or "1"
    return match[1], (f"{dimension}^{power}", f"({factor})^{power}")


def _hundredth(text: str) -> str:
    return f"({_PERCENT.sub('', text)})/100" if _PERCENT.search(text) else text


def _right_hand_side(gold: str, answer: str) -> str:
    return answer.partition("=")[2].strip() if "=" in answer and "=" not in gold else answer


def _same_value(gold: str, answer: str) -> bool:
    from math_verify import parse, verify

    # The alarm and the memory bound stand in for math-verify's own timeouts, which need a main thread.
    left, right = (parse(f"${text}$", parsing_timeout=None) for text in (gold, answer))
    if not left or not right:
        return gold.lower() == answer.lower()
    if verify(left, right, timeout_seconds=None):
        return _exact(gold, answer, left[0])
    return _same_constant(left[0], right[0])


def _exact(gold: str, answer: str, value: Any) -> bool:
    """False where the answer is a decimal that only rounds to an exact gold number."""
    import sympy  # type: ignore[import-untyped]

    if not _DECIMAL.fullmatch(answer) or "." in gold or not isinstance(value, sympy.Expr):
        return True
    return not value.is_number or bool(sympy.simplify(value - sympy.Rational(answer)) == 0)


def _same_constant(left: Any, right: Any) -> bool:
    """Equal once the letters e and i are the numbers; math-verify reads them as unknowns."""
    import sympy

    numbers = {"e": sympy.E, "i": sympy.I}
    if not (isinstance(left, sympy.Expr) and isinstance(right, sympy.Expr)):
        return False
    unknowns = left.free_symbols | right.free_symbols
    if not unknowns or any(unknown.name not in numbers for unknown in unknowns):
        return False
    values = {unknown: numbers[unknown.name] for unknown in unknowns}
    return bool(sympy.simplify(left.subs(values) - right.subs(values)) == 0)


def score(job: dict[str, Any]) -> float:
    """0..1 for one job. An answer that cannot be compared is wrong."""
    try:
        if job["kind"] == "reasoning_gym":
            return float(_judge(job["dataset"])(job["answer"], job["entry"]))
        return float(equivalent(job["gold"], job["answer"]))
    except Exception:
        return 0.0


def _judge(dataset: str) -> Callable[[str, dict[str, Any]], float]:
    from reasoning_gym.factory import get_score_answer_fn

    judge: Callable[[str, dict[str, Any]], float] = get_score_answer_fn(dataset)
    return judge


def main() -> None:
    """Serve until stdin ends."""
    jobs, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # what a library prints must not look like an answer
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    try:
        equivalent("\\frac{1}{2}x+(1,2)", "\\sqrt{3}x")  # the first parse builds the parser's tables
    except ImportError as error:
        answers.write(json.dumps({"failed": f"{type(error).__name__}: {error}"}).encode() + b"\n")
        return
    answers.write(b'{"ready": true}\n')
    for line in jobs:
        job = json.loads(line)
        if job["kind"] == "reasoning_gym":
            _judge(job["dataset"])  # imported here, seconds the first time; an unknown name ends the worker
        answers.write(b'{"begun": true}\n')
        signal.setitimer(signal.ITIMER_REAL, job["deadline_s"])
        value = score(job)
        signal.setitimer(signal.ITIMER_REAL, 0)
        answers.write(json.dumps({"score": value}).encode() + b"\n")


if __name__ == "__main__":
    main()
