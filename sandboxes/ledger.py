"""Which sandboxes the processes of this user asked for: written before they are made, removed when they end.

    intend()  before `create`: provider, its place, owner, run, spec    complete()  after it: the sandbox's id
    forget()  after `close`                                             entries()   what is written now

Invariant: a sandbox that exists and was asked for here has an entry, however its owner's process ended; an
entry whose owner is dead is what `reap` works from. One small file for each, replaced atomically, so a killed
process leaves no half of one. (A machine that loses power may lose the last ones: what they stood for on
this machine is gone as well, and a service still lists its own by label.) Nothing secret is in it.
Nobody waits: each entry has one writer, and a write is a few dozen microseconds.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from .owner import Owner
from .state_folder import state_folder

FOLDER = "ledger"


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One sandbox that was asked for. `sandbox_id` is "" until there is one; times in s since the epoch.

    place   of its provider (`Provider.place`): who is of another one does not see it; "" is not known
    """

    token: str
    provider: str
    owner: str
    run_id: str
    spec_key: str
    asked: float
    expires: float
    sandbox_id: str = ""
    place: str = ""

    @property
    def is_left_behind(self) -> bool:
        """Its owner is dead; or unknown (another machine, a shared home) and its time is over."""
        owner = Owner.parse(self.owner)
        if owner is None or owner.is_elsewhere:
            return time.time() > self.expires
        return owner.is_dead

    def is_seen_from(self, place: str) -> bool:
        """Whether a provider of that place can tell if it exists."""
        return self.place in ("", place)


class Ledger:
    """The entries in one folder; this user's on this machine unless another is given."""

    def __init__(self, folder: Path | None = None) -> None:
        self._given = folder

    def intend(
        self, *, provider: str, place: str, owner: str, run_id: str, spec_key: str, lifetime_s: float
    ) -> Entry:
        """A sandbox is about to be made."""
        now = time.time()
        entry = Entry(
            token=secrets.token_hex(8), provider=provider, place=place, owner=owner, run_id=run_id,
            spec_key=spec_key, asked=now, expires=now + lifetime_s,
        )  # fmt: skip
        self._write(entry)
        return entry

    def complete(self, entry: Entry, sandbox_id: str) -> Entry:
        """It was made."""
        made = replace(entry, sandbox_id=sandbox_id)
        self._write(made)
        return made

    def renew(self, entry: Entry, lifetime_s: float) -> Entry:
        """It lives for that long from now, if it does not for longer anyway."""
        renewed = replace(entry, expires=max(entry.expires, time.time() + lifetime_s))
        self._write(renewed)
        return renewed

    def forget(self, entry: Entry) -> None:
        """It is gone, or was never made."""
        self._path(entry.token).unlink(missing_ok=True)

    def entries(self, provider: str | None = None) -> list[Entry]:
        """All of them, oldest first; of one provider when given."""
        found = [entry for entry in self._read_all() if provider in (None, entry.provider)]
        return sorted(found, key=lambda entry: entry.asked)

    def _folder(self) -> Path:
        return self._given or state_folder() / FOLDER

    def _path(self, token: str) -> Path:
        return self._folder() / f"{token}.json"

    def _write(self, entry: Entry) -> None:
        path = self._path(entry.token)
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        draft = path.with_suffix(f".{os.getpid()}.draft")
        try:
            draft.write_text(json.dumps(asdict(entry)))
            draft.replace(path)
        except OSError:
            draft.unlink(missing_ok=True)
            raise

    def _read_all(self) -> Iterator[Entry]:
        for path in self._folder().glob("*.json"):
            # Forgotten meanwhile, or written by another version with other fields.
            with contextlib.suppress(FileNotFoundError, ValueError, TypeError):
                yield Entry(**json.loads(path.read_text()))
