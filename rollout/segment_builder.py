"""Token accounting of one growing prompt: what the engine saw, in the order it saw it.

    context(ids, images)      prompt, observation or template tokens: no action
    actions(completion)       sampled tokens with their log-probabilities and versions

Invariant: `ids` is exactly what the engine is given next, so the token at position t was sampled
after `ids[:t]` and nothing else. Ids only ever grow; a rewritten history starts another builder.
Columns are typed arrays, never lists of Python integers: thousands of episodes wait in memory.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable

import numpy as np

from ..errors import MissingLogprob, NonFinite
from ..trajectory import Int32, Sampling, Segment
from .engine import Completion

NAN = float("nan")


class SegmentBuilder:
    """Grows one `Segment`.

    >>> builder = SegmentBuilder(sampling=Sampling(), contract="")
    >>> builder.context([5, 6])
    >>> builder.ids.tolist()
    [5, 6]
    """

    def __init__(self, *, sampling: Sampling, contract: str) -> None:
        self._ids, self._mask = array("i"), array("b")
        self._logprobs, self._versions = array("f"), array("i")
        self._sampling, self._contract = sampling, contract
        self.images: tuple[bytes, ...] = ()

    def __len__(self) -> int:
        return len(self._ids)

    @property
    def ids(self) -> Int32:
        """int32[T] all tokens so far: the engine's next prompt."""
        return np.array(self._ids, dtype=np.int32)

    @property
    def num_actions(self) -> int:
        return sum(self._mask)

    def context(self, ids: Iterable[int], images: tuple[bytes, ...] = ()) -> None:
        """Append tokens that the policy did not sample, and the images of their placeholders."""
        before = len(self._ids)
        self._ids.extend(int(i) for i in ids)
        added = len(self._ids) - before
        self._mask.extend([0] * added)
        self._logprobs.extend([NAN] * added)
        self._versions.extend([-1] * added)
        self.images += images

    def actions(self, completion: Completion) -> None:
        """Append what the engine sampled, token by token with its own record.

        Raises MissingLogprob where the engine's three columns differ in length, NonFinite for a
        log-probability that is none.
        """
        count = len(completion.token_ids)
        if not count == len(completion.logprobs) == len(completion.versions):
            raise MissingLogprob(
                f"the engine returned {count} tokens, {len(completion.logprobs)} log-probabilities "
                f"and {len(completion.versions)} versions: each sampled token needs one of each"
            )
        if bad := np.flatnonzero(~np.isfinite(completion.logprobs)).tolist():
            raise NonFinite(
                f"token {bad[0]} of {count} has the log-probability {completion.logprobs[bad[0]]}"
            )
        self._ids.extend(completion.token_ids.tolist())
        self._mask.extend([1] * count)
        self._logprobs.extend(completion.logprobs.tolist())
        self._versions.extend(completion.versions.tolist())

    def build(self) -> Segment:
        """The finished segment; raises MissingLogprob or NonFinite if a sampled token lacks its mu."""
        return Segment(
            token_ids=self.ids,
            action_mask=np.array(self._mask, dtype=np.bool_),
            behaviour_logprobs=np.array(self._logprobs, dtype=np.float32),
            policy_version=np.array(self._versions, dtype=np.int32),
            images=self.images,
            sampling=self._sampling,
            contract=self._contract,
        )
