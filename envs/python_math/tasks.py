"""Arithmetic in words, endless and seeded: six kinds of question that one line of Python answers.

Invariants: a task is a pure function of (difficulty, split, seed, position); a question belongs to "train" or
to "test" by a hash of its words, so the test questions are never trained on.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable

from ..task import LazyTasks, Task, TaskOrder, check_split

# kind -> (question, how many digits each number has at difficulty 1, the answer)
Kind = tuple[str, tuple[int, ...], Callable[..., int]]
KINDS: dict[str, Kind] = {
    "times": ("What is {0} times {1}?", (2, 2), lambda a, b: a * b),
    "plus": ("What is {0} plus {1}?", (2, 2), lambda a, b: a + b),
    "minus": ("What is {0} minus {1}?", (2, 2), lambda a, b: a - b),
    "rem": ("What is the remainder of {0} by {1}?", (3, 2), lambda a, b: a % b),
    "digits": ("What is the digit sum of {0}?", (4,), lambda a: sum(map(int, str(a)))),
    "max": ("What is the largest of {0}, {1}, {2}?", (2, 2, 2), max),
}
_TEST_SHARE = 8  # one question in eight


class ArithmeticTaskset:
    """The six kinds. Each number has `difficulty - 1` digits more than at difficulty 1.

    >>> ArithmeticTaskset(difficulty=1).order(seed=0)[0].prompt[0]["content"][:7]
    'What is'
    """

    splits: tuple[str, ...] = ("train", "test")

    def __init__(self, *, difficulty: int = 1, test_size: int = 256) -> None:
        self.name = "arithmetic"
        self._difficulty, self._test_size = difficulty, test_size

    def load(self, split: str) -> LazyTasks:
        return LazyTasks(self.order(0, split).task_at, self._test_size)

    def order(self, seed: int, split: str = "train") -> TaskOrder:
        """ "test" is the same `test_size` questions whatever the seed."""
        check_split(self, split)
        if split == "test":
            size = self._test_size
            return TaskOrder(task_at=lambda p: self._task(split, 0, p % size), epoch_size=size)
        return TaskOrder(task_at=lambda p: self._task(split, seed, p))

    def _task(self, split: str, seed: int, position: int) -> Task:
        chance = random.Random(f"{self.name}/{self._difficulty}/{split}/{seed}/{position}")
        while True:
            kind = chance.choice(list(KINDS))
            words, digits, solve = KINDS[kind]
            numbers = [self._number(chance, count + self._difficulty - 1) for count in digits]
            question = words.format(*numbers)
            if _split_of(question) == split:
                return Task(
                    id=f"arithmetic:{kind}:{','.join(map(str, numbers))}",
                    split=split,
                    prompt=question,
                    answer=str(solve(*numbers)),
                    metadata={"kind": kind},
                )

    @staticmethod
    def _number(chance: random.Random, digits: int) -> int:
        return chance.randint(10 ** (digits - 1), 10**digits - 1)


def _split_of(question: str) -> str:
    digest = hashlib.blake2b(question.encode(), digest_size=8).digest()
    return "test" if int.from_bytes(digest, "big") % _TEST_SHARE == 0 else "train"
