"""An episode of a run's journal as a recording that can be read: the tokens, as text, turn by turn.

    recording_of(open_run(path), "g000003-1") -> Recording

A segment is a history that the policy was shown anew; within it, what was sampled and what was not take
turns. The task is found by its position in the run's order where the environment can still be made, and is
left out where it cannot. Reads only; neither torch nor vLLM is imported.
"""

from __future__ import annotations

from collections.abc import Iterator

from ..envs import load
from ..envs.recording import Fate, Recording, Said
from ..envs.task import Task
from ..errors import ConfigError, RzError
from ..journal import Journal
from ..journal_records import GroupRecord
from ..rollout.renderer import Renderer
from ..trajectory import Segment, Status, Trajectory
from .model_source import model_folder
from .recipe import Recipe
from .runs import JOURNAL, Run

_FATES: dict[Status, Fate] = {"ok": "terminated", "truncated": "truncated", "masked": "masked"}


def recording_of(run: Run, episode_id: str) -> Recording:
    """The recording; ConfigError where the journal has no such finished episode."""
    group, trajectory = _find(run, episode_id)
    renderer = Renderer(model_folder(run.recipe.model))
    return Recording(
        environment=run.recipe.env.id,
        options=run.recipe.env.options,
        task_id=trajectory.task_id,
        task=_task(run.recipe, group),
        said=tuple(one for segment in trajectory.segments for one in _said(segment, renderer)),
        reward=trajectory.reward,
        fate=_FATES[trajectory.status],
        reason=trajectory.mask_reason,
        figures=trajectory.metrics,
    )


def _find(run: Run, episode_id: str) -> tuple[GroupRecord, Trajectory]:
    with Journal.open(run.path / JOURNAL, run=None) as journal:
        groups = {record.group_id: record for record in journal.groups()}
        record = groups.get(episode_id.rpartition("-")[0])
        for episode in journal.episodes(record.group_id).values() if record else ():
            if record and episode.episode_id == episode_id:
                return record, episode
    names = list(groups)
    raise ConfigError(
        source=str(run.path / JOURNAL),
        key="episode",
        value=episode_id,
        why="is no finished episode of this run.",
        remedy=f"Its groups are {names[0]} to {names[-1]}; an episode is GROUP-INDEX, as {names[0]}-0."
        if names
        else "The run has not begun a group yet.",
    )


def _said(segment: Segment, renderer: Renderer) -> Iterator[Said]:
    start, fresh = 0, True
    for turn in segment.turns():
        context = renderer.decode(segment.token_ids[start : turn.start])
        yield Said(role="context", text=context, fresh=fresh, images=segment.images if fresh else ())
        yield Said(role="policy", text=renderer.decode(segment.token_ids[turn.start : turn.stop]))
        start, fresh = turn.stop, False


def _task(recipe: Recipe, group: GroupRecord) -> Task | None:
    try:
        taskset = load(recipe.env.id, **recipe.env.options).taskset
        found = taskset.order(recipe.seed, recipe.env.split)[group.position]
    except RzError:
        return None
    return found if found.id == group.task_id else None
