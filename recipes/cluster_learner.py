"""The learner of `runtime = "ray"`: its ranks are actors, wherever the cluster has room for them."""

from __future__ import annotations

import uuid
from pathlib import Path
from typing import Any

import ray
import ray.exceptions
import torch

from ..errors import ConfigError
from ..learner.learner_config import LearnerConfig
from ..learner.ranks import GRACE, Call, LearnerOfRanks, RankFailed
from .actors import LearnerActor, Rendezvous
from .cluster import Cluster


class RayLearner(LearnerOfRanks):
    """The learner's ranks as actors; rank 0 answers. Built, and called, in one thread of the driver.

    run_dir  must be the same folder for every rank: checkpoints are written there
    address  of rank 0's node, as others reach it
    """

    def __init__(
        self, cluster: Cluster, model_dir: Path, config: LearnerConfig, ranks: int, run_dir: Path
    ) -> None:
        if config.threads is None:
            # As many as the same learner would use in this process: the thread count is part of the bits.
            config = config.model_copy(update={"threads": max(1, torch.get_num_threads() // ranks)})
        self._ranks = [cluster.actor(LearnerActor) for _ in range(ranks)]
        self._failed: RankFailed | None = None
        self._version, self._contract = 0, ""
        try:
            models = [cluster.model_for(actor, model_dir) for actor in self._ranks]
            self._check_shared(run_dir)
            first = self._ranks[0]
            address, port = ray.get([first.__ray_call__.remote(_address), first.meeting_port.remote()])
            self.address: str = address
            built = self._answers(
                "build",
                [
                    actor.build.remote(
                        model, config, Rendezvous(address=address, port=port, rank=rank, ranks=ranks)
                    )
                    for rank, (actor, model) in enumerate(zip(self._ranks, models, strict=True))
                ],
            )
        except BaseException:
            self.close()
            raise
        self._contract, self._version = built[0]

    @property
    def version(self) -> int:
        return self._version

    @property
    def contract(self) -> str:
        return self._contract

    def on_rank_0(self, method: str, *arguments: Any) -> Any:
        """The answer of rank 0's actor alone."""
        if self._failed is not None:
            raise self._failed
        return self._answers(method, [getattr(self._ranks[0], method).remote(*arguments)])[0]

    def close(self) -> None:
        for actor in self._ranks:
            ray.kill(actor)
        self._ranks = []

    def _everywhere(self, call: Call) -> Any:
        if self._failed is not None:
            raise self._failed
        shared = ray.put(call)
        answers = self._answers(call.method, [actor.make.remote(shared) for actor in self._ranks])
        answer, self._version = answers[0]
        return answer

    def _answers(self, method: str, references: list[Any]) -> list[Any]:
        """Every rank's answer. A failure that all share is raised as it is; another one ends the ranks."""
        waiting, failures = list(references), dict[int, Exception]()
        while waiting:
            limit = GRACE.total_seconds() if failures else None
            done, waiting = ray.wait(waiting, timeout=limit)
            if not done:
                break
            try:
                ray.get(done)
            except ray.exceptions.RayTaskError as error:
                failures[references.index(done[0])] = error.cause
            except ray.exceptions.RayError as error:
                failures[references.index(done[0])] = error
                break
        if not failures:
            answers: list[Any] = ray.get(references)
            return answers
        rank, failure = next(iter(failures.items()))
        alike = len(failures) == len(references) and not isinstance(failure, ray.exceptions.RayError)
        if not alike:
            self.close()
            self._failed = RankFailed(f"rank {rank} of the learner failed alone in {method}: {failure}")
            raise self._failed from failure
        raise failures[0]

    def _check_shared(self, run_dir: Path) -> None:
        probe, content = run_dir.absolute() / f".shared-{uuid.uuid4().hex}", uuid.uuid4().hex
        probe.write_text(content)
        try:
            seen = ray.get([actor.sees.remote(probe, content) for actor in self._ranks])
        finally:
            probe.unlink()
        if not all(seen):
            raise ConfigError(
                source="train",
                key="runs",
                value=str(run_dir),
                why=f"is not the same folder on the node of rank {seen.index(False)} of the learner, "
                "and every rank writes its part of a checkpoint there.",
                remedy="Keep the runs on a file system that these nodes share, or the learner on this node.",
            )


def _address(actor: object) -> str:
    return str(ray.util.get_node_ip_address())
