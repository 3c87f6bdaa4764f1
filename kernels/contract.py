"""The hash that says which arithmetic computed a log-probability.

It is written into every segment and checkpoint. Equal hashes promise equal bits on both sides; a difference
makes audit, replay and exact resume refuse. Whatever can change a bit belongs into the facts; nothing else
does.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping


def contract_hash(name: str, facts: Mapping[str, str]) -> str:
    """ "name:16 hex digits" of the facts, whatever their order.

    >>> contract_hash("aligned", {"a": "1", "b": "2"}) == contract_hash("aligned", {"b": "2", "a": "1"})
    True
    """
    text = json.dumps({"name": name, **facts}, sort_keys=True)
    return f"{name}:{hashlib.blake2b(text.encode(), digest_size=8).hexdigest()}"
