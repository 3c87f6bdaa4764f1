"""Audit a finished run from its journal: replay the learner from the start and rescore every token.

The journal and the initial model are all it needs: version k is rebuilt by training on the batches
that were consumed, so tokens of versions whose weights were dropped long ago can be audited too.
Two things are proved at once: each replayed update gives the recorded weights, bit for bit, and each
recorded log-probability is what those weights give.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from ..errors import ConfigError, RunStopped
from ..journal import Journal
from ..learner.audit import Audit, Difference
from ..learner.learner import Learner
from ..trajectory import Group
from ..weight_store import WeightStore
from .model_source import model_folder
from .recipe_file import load
from .resume import replay
from .runs import JOURNAL, RECIPE


@dataclass(frozen=True, slots=True, kw_only=True)
class RunAudit:
    """Counts over a whole run: `recorded` action tokens were trained on, `tokens` of them recomputed.

    `differences` names the first ones, with their causes.
    """

    updates: int
    recorded: int
    tokens: int
    differing: int
    max_abs_diff: float
    differences: tuple[Difference, ...]

    def __str__(self) -> str:
        head = f"{self.differing} of {self.tokens} tokens differ over {self.updates} updates"
        if self.tokens < self.recorded:
            head += f" ({self.recorded} were trained on)"
        if self.tokens:
            head += f", largest difference {self.max_abs_diff:.3g}"
        return "\n".join([head, *map(str, self.differences)])


def audit_run(run_dir: Path, say: Callable[[str], None] = lambda text: None, share: float = 1.0) -> RunAudit:
    """Replay and rescore. Raises RunStopped where a replayed update gives other weights than recorded.

    say  told once an update, and before what takes long
    Raises ConfigError, before anything slow, for a run that has made no update.
    """
    recipe = load(str(run_dir / RECIPE))
    recorded = tokens = differing = updates = 0
    largest, named = 0.0, list[Difference]()
    with _begun(run_dir) as journal, tempfile.TemporaryDirectory() as scratch:
        learner = Learner(model_folder(recipe.model, say), recipe.learner_config())
        store = WeightStore(Path(scratch))
        store.put(0, learner.weights())
        audit = Audit(score=learner.score, weights=store, contract=learner.contract, share=share)
        records = journal.updates()
        needed = _needed(journal, len(records))
        for record in records:
            groups = [journal.group(name) for name in record.group_ids]
            recorded += sum(t.num_actions for group in groups for t in group if not t.masked)
            report = audit.check(groups)
            tokens, differing = tokens + report.tokens, differing + report.differing
            largest = max(largest, report.max_abs_diff)
            named += [replace(d, cause=_cause(audit, d, groups)) for d in report.differences[:1]]
            try:
                replay(learner, record, groups, store)
            except RunStopped as stopped:
                # A token that was altered after it was trained on also changes the repeated update.
                raise RunStopped("\n".join([*map(str, named), str(stopped)])) from None
            oldest = needed[record.update] - 1  # one more than needed, to tell causes apart
            store.retain([v for v in store.versions() if v >= oldest])
            updates += 1
            say(f"update {updates}: {differing} of {tokens} tokens differ")
    return RunAudit(
        updates=updates, recorded=recorded, tokens=tokens, differing=differing, max_abs_diff=largest,
        differences=tuple(named),
    )  # fmt: skip


def _needed(journal: Journal, updates: int) -> list[int]:
    """For each update, the oldest version of which a later one has tokens."""
    versions, oldest, needed = journal.oldest_versions(), updates, []
    for update in reversed(range(updates)):
        needed.append(oldest)
        oldest = min(oldest, versions.get(update, oldest))
    return needed[::-1]


@contextmanager
def _begun(run_dir: Path) -> Iterator[Journal]:
    """The run's journal, which holds an update at least."""
    if (run_dir / JOURNAL).is_file():
        with Journal.open(run_dir / JOURNAL, run=None) as journal:
            if journal.last_update() is not None:
                yield journal
                return
    raise ConfigError(
        source=str(run_dir),
        key="updates",
        value=0,
        why="there is nothing to audit yet.",
        remedy=f"Let it finish an update first: rz-agent train --resume {run_dir}",
    )


def _cause(audit: Audit, difference: Difference, groups: Sequence[Group]) -> str:
    [trajectory] = [t for group in groups for t in group if t.episode_id == difference.episode_id]
    return audit.diagnose(trajectory.segments[difference.segment], difference.version)
