"""Token accounting of one growing prompt: what the engine saw, in the order it saw it.

    context(ids, images)      prompt, observation or template tokens: no action
    actions(completion)       sampled tokens with their log-probabilities and versions

Invariant: `ids` is exactly what the engine is given next, so the token at position t was sampled
after `ids[:t]` and nothing else. Ids only ever grow; a rewritten history starts another builder.
Columns are typed arrays, never lists of Python integers: thousands of episodes wait in memory.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np

from ..errors import MissingLogprob, NonFinite
from ..trajectory import Int32, Sampling, Segment
from .engine import Completion

_NO_ACTION, _ACTION = array("b", [0]), array("b", [1])
_NO_LOGPROB, _NO_VERSION = array("f", [float("nan")]), array("i", [-1])


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
        """int32[T] all tokens so far."""
        return np.array(self._ids, dtype=np.int32)

    def prompt(self) -> list[int]:
        """All tokens so far, as the engine is given them next."""
        return self._ids.tolist()

    @property
    def num_actions(self) -> int:
        return self._mask.count(1)

    def context(self, ids: Int32 | Sequence[int], images: tuple[bytes, ...] = ()) -> None:
        """Append tokens that the policy did not sample, and the images of their placeholders."""
        added = len(ids)
        self._ids.frombytes(np.asarray(ids, np.int32).tobytes())
        self._mask.extend(_NO_ACTION * added)
        self._logprobs.extend(_NO_LOGPROB * added)
        self._versions.extend(_NO_VERSION * added)
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
        finite = np.isfinite(completion.logprobs)
        if not np.logical_and.reduce(finite):
            bad = int(finite.argmin())
            raise NonFinite(f"token {bad} of {count} has the log-probability {completion.logprobs[bad]}")
        self._ids.frombytes(completion.token_ids.astype(np.int32, copy=False).tobytes())
        self._mask.extend(_ACTION * count)
        self._logprobs.frombytes(completion.logprobs.astype(np.float32, copy=False).tobytes())
        self._versions.frombytes(completion.versions.astype(np.int32, copy=False).tobytes())

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
