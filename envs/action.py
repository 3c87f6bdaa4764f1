"""What the policy did in one turn: the text it sampled, without the final stop token."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Action:
    """text       decoded with special tokens kept, except the final stop token
    token_ids  as sampled, for environments that score tokens; empty where unknown
    """

    text: str
    token_ids: tuple[int, ...] = ()
