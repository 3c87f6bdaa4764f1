"""From how many tokens of a step on an operation of the engine has other bits: found by halving.

    await threshold(plan, operation, reference, ids) -> Threshold

Kernels choose their blocks by the number of rows. A sequence that is known to differ is computed in one step
with more and more tokens behind it; between a step that leaves its bits and one that does not lies the count
at which the kernel changes, if there is one such count.
Waits: the caller for an engine and about ten of its steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .capture import Capture, Operation, compare
from .conditions import EngineRun, Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Threshold:
    """What makes an operation differ.

    tokens  of the smallest step with other bits that was tried, which holds the sequence that differs; None:
            the number of tokens alone does not change them
    calls   compiled operations of vLLM that compute it; none for Triton kernels
    """

    operation: Operation
    tokens: int | None
    calls: tuple[str, ...]

    def __str__(self) -> str:
        by = f" ({', '.join(self.calls)})" if self.calls else ""
        if self.tokens is None:
            return f"{self.operation}{by}: the number of tokens in a step alone does not change it"
        return f"{self.operation}{by}: other bits in steps of {self.tokens} tokens or more"


async def threshold(
    plan: Plan, operation: Operation, reference: Capture, ids: Sequence[int], vocabulary: int
) -> Threshold:
    """Where the bits of `operation` change; steps of up to the plan's most tokens are tried.

    reference  of the engine alone
    ids        up to the token that differs from it in a crowd
    """
    async with EngineRun.of(plan, plan.step_tokens) as run:
        most = max(min(plan.step_tokens, plan.context - 1) - 1, len(ids))
        more = np.random.default_rng(1).integers(0, vocabulary, most - len(ids)).tolist()
        whole = [*ids, *more]

        async def differs(tokens: int) -> bool:
            (result,) = compare(reference, await run.prefix(whole[:tokens]), [operation])
            return result.differing > 0

        equal, other = len(ids), most
        changes = await differs(other)
        if changes and await differs(
            equal
        ):  # as a prefill already: it was decoded, or came in a longer prompt
            other = equal
        while changes and other - equal > 1:
            middle = (equal + other) // 2
            if await differs(middle):
                other = middle
            else:
                equal = middle
        calls = run.calls.get(operation.name, ())
    return Threshold(operation=operation, tokens=other if changes else None, calls=calls)
