"""Token ids in, token ids with log-probabilities and versions out: what the rollout side asks of vLLM.

    generate()   samples; every token carries the log-probability of the distribution it was really drawn from
                 and the version of the weights that drew it
    prepare()    fetches weights beside the steps; nothing of them is visible
    update()     new weights, checked tensor by tensor, between two engine steps; running requests go on
    score()      log-probabilities of given ids, recomputed and never read from a cache

Invariants. A token with version v has the log-probability that a prefill of all ids before it under the
weights of version v gives, whatever was updated while its request ran: an update throws all computed keys and
values away. With kernels "aligned" that holds bit for bit. A prefix computed under one version is never
served under another.
Waits: an update for the engine step in progress, and no step for `prepare`; requests for nobody but the
engine. When the engine dies, everyone who waits gets `EngineDead`, and so does everyone who comes later.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from ..errors import RzError
from ..kernels.transfer.sources import Offer
from ..trajectory import Float32, Int32, Sampling
from ..weight_store import WeightManifest
from .engine_config import EngineConfig

FinishReason = Literal["stop", "length", "abort"]


class EngineDead(RzError):
    """The engine stopped; the message says what killed it. Start another one, at the version wanted."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Completion:
    """What one request sampled.

    token_ids      int32[n]    including the stop token where finish_reason is "stop"
    logprobs       float32[n]  log mu: under the sampling temperature and filters
    versions       int32[n]    of the weights that sampled each token; never decreases
    finish_reason  "stop" (a stop token), "length" (max_tokens or the context), "abort"
    prompt_tokens  tokens of the prompt, images expanded
    cached_tokens  of these, read from the prefix cache
    """

    token_ids: Int32
    logprobs: Float32
    versions: Int32
    finish_reason: FinishReason
    prompt_tokens: int
    cached_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """What came of an offer.

    seconds  from the first byte to the last checksum; the engine sampled meanwhile
    size     bytes staged
    fault    why the update will have to read the file; None where it will not
    """

    seconds: float
    size: int
    fault: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Takeover:
    """An update as the requests saw it.

    paused_s  seconds in which the engine took no step
    source    "staged" or "file"
    """

    paused_s: float
    source: str


class Engine(Protocol):
    """One vLLM engine."""

    @property
    def version(self) -> int:
        """Version of the weights that the next token is sampled with."""
        ...

    @property
    def contract(self) -> str:
        """Hash of the kernels; equals the learner's exactly where both promise equal bits."""
        ...

    async def start(self) -> None:
        """Load the model. Raises EngineDead with the reason if that fails."""
        ...

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling: Sampling,
        *,
        max_tokens: int,
        stop_token_ids: tuple[int, ...],
        seed: int | None,
        images: Sequence[bytes] = (),
    ) -> Completion:
        """Sample up to max_tokens tokens, ending with the first of stop_token_ids.

        images are PNG files in the order of their placeholders, one placeholder token each. Equal seeds give
        equal draws whatever runs beside the request. Cancelling the task aborts the request.

        Raises ValueError for a request that cannot be served, MissingLogprob or NonFinite where the engine
        returns a token without a finite log-probability, EngineDead.
        """
        ...

    async def prepare(self, offer: Offer) -> Prepared:
        """Fetch a version for an update, while requests go on; back when it is staged or cannot be.

        What was staged before is dropped. Takes at most `PREPARE_S`. Raises EngineDead only.
        """
        ...

    async def update(self, manifest: WeightManifest) -> Takeover:
        """Serve the weights of a manifest from the next token on: those staged, else those of its file.

        When it returns, every tensor that the engine holds has the manifest's checksum. Raises ValueError for
        a version that is not newer (the first may be the one it began with), EngineDead where the weights
        differ: what such an engine holds is unknown.
        """
        ...

    async def score(self, ids: Sequence[int], *, temperature: float = 1.0, cold: bool = True) -> Float32:
        """float32 [T]: log-probability of each token given those before it; NaN first.

        Always recomputed. A cold score does not leave its prefix in the cache for others either.
        """
        ...

    async def checksums(self) -> dict[str, str]:
        """Checksum of every tensor held, by its name in the last manifest. Empty before the first update."""
        ...

    async def close(self) -> None:
        """Stop the engine; whoever still waits gets EngineDead."""
        ...


def make_engine(config: EngineConfig) -> Engine:
    """The engine of a configuration, not yet started."""
    if config.mode == "inprocess":
        from .vllm_inprocess import VllmInProcess

        return VllmInProcess(config)
    from .vllm_async import VllmAsync

    return VllmAsync(config)
