"""vLLM's AsyncLLM: the engine in a process of its own, so sampling and training share no interpreter.

    caller (asyncio) --ZeroMQ--> engine process: step, step, ...       AsyncLLM wakes the caller

An update is several calls to that process. Between them it must not step, so scheduling is paused with the
requests kept in place, and resumed only when weights, caches and version tag agree. A preparation only starts
a thread there, between two steps, and is asked about from here. Updates wait for one another; requests sent
meanwhile wait in the engine. A caller cancelled while it waits aborts its request (AsyncLLM does that).
"""

from __future__ import annotations

import asyncio
import itertools
import pickle
import time
from collections.abc import Awaitable, Sequence
from typing import Any, TypeVar

from ..kernels import vllm_versions
from ..kernels.transfer.sources import Offer
from ..trajectory import Float32, Sampling
from ..weight_store import WeightManifest
from . import vllm_device, vllm_request
from .engine import Completion, EngineDead, Prepared, Takeover
from .engine_config import EngineConfig
from .preparing import prepared
from .vllm_process import building_an_engine

T = TypeVar("T")

# The process ends its requests at once; what takes longer is its interpreter's own end, so it is killed.
CLOSE_S = 1.5


class VllmAsync:
    """`Engine` in a child process."""

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.contract = vllm_device.contract_of(config)
        self._version = config.initial_version
        self._manifest: WeightManifest | None = None
        self._request_ids = itertools.count()
        self._updating = asyncio.Lock()
        self._dead: EngineDead | None = None
        self._died = asyncio.Event()
        self._engine: Any = None

    @property
    def version(self) -> int:
        return self._version

    async def start(self) -> None:
        try:
            # In a thread, because building waits for the child process to load the model.
            self._engine = await asyncio.to_thread(self._build)
            from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

            await self._engine.init_weight_transfer_engine(WeightTransferInitRequest(init_info={}))
            await vllm_versions.tag_async(self._engine, self._version)
        except Exception as error:
            raise self._die(f"the engine did not start: {error}", error) from error

    def _build(self) -> Any:
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        with building_an_engine(self.config.threads, vllm_device.environment(self.config)):
            return AsyncLLM.from_engine_args(AsyncEngineArgs(**vllm_request.engine_args(self.config)))

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
        params = vllm_request.sampling_params(
            self.config,
            sampling,
            prompt_tokens=len(prompt_ids),
            max_tokens=max_tokens,
            stop_token_ids=stop_token_ids,
            seed=seed,
        )
        prompt = vllm_request.prompt(prompt_ids, images, vllm_request.salt(self._version))
        return vllm_request.completion(await self._alive(self._last_output(prompt, params)))

    async def score(self, ids: Sequence[int], *, temperature: float = 1.0, cold: bool = True) -> Float32:
        params = vllm_request.scoring_params(self.config, prompt_tokens=len(ids), temperature=temperature)
        salt = vllm_request.salt(self._version, next(self._request_ids) if cold else None)
        prompt = vllm_request.prompt(ids, (), salt)
        return vllm_request.scores(await self._alive(self._last_output(prompt, params)))

    async def prepare(self, offer: Offer) -> Prepared:
        await self._on_worker("rz_prepare", pickle.dumps(offer))
        return await prepared(lambda: self._on_worker("rz_prepared", offer.version))

    async def update(self, manifest: WeightManifest) -> Takeover:
        # Shielded: a caller cancelled in the middle must not leave the engine paused or half updated.
        return await asyncio.shield(self._update_or_die(manifest))

    async def checksums(self) -> dict[str, str]:
        names = [] if self._manifest is None else list(self._manifest.checksums)
        held: dict[str, str] = await self._on_worker("rz_checksums", names)
        return held

    async def close(self) -> None:
        """Stop the engine's process; idempotent."""
        engine, self._engine = self._engine, None
        self._die("the engine was closed", None)
        if engine is not None:
            if engine.output_handler is not None:
                # Else it reports the end of the process that it listens to as an error.
                engine.output_handler.cancel()
                await asyncio.sleep(0)
            await asyncio.to_thread(engine.shutdown, timeout=CLOSE_S)
            # Its finalizer shuts down once more, and cannot in an interpreter that is going down.
            engine.shutdown = _nothing

    async def _last_output(self, prompt: dict[str, Any], params: Any) -> Any:
        vllm_request.check_ids(prompt["prompt_token_ids"], self._engine.model_config.get_vocab_size())
        outputs = self._engine.generate(prompt, params, str(next(self._request_ids)))
        return [output async for output in outputs][-1]

    async def _on_worker(self, method: str, *arguments: Any) -> Any:
        if self._dead is not None:
            raise self._dead
        return (await self._alive(self._engine.collective_rpc(method, args=arguments)))[0]

    async def _update_or_die(self, manifest: WeightManifest) -> Takeover:
        async with self._updating:
            vllm_request.check_newer(manifest, self._version, first=self._manifest is None)
            try:
                paused_s = await self._alive(self._update(manifest))
                return Takeover(paused_s=paused_s, source=await self._on_worker("rz_taken"))
            except EngineDead:
                raise
            except Exception as error:
                raise self._die(f"the update to version {manifest.version} failed: {error}", error) from error

    async def _update(self, manifest: WeightManifest) -> float:
        """Seconds without a step."""
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        engine = self._engine
        await engine.pause_generation(mode="keep", clear_cache=False)
        paused = time.monotonic()
        await engine.start_weight_update()
        await engine.update_weights(
            WeightTransferUpdateRequest(update_info=vllm_request.update_info(manifest))
        )
        await vllm_versions.finish_update_async(engine, manifest.version)
        # Running requests go back to the queue and are prefilled again under the new weights.
        await engine.reset_prefix_cache(reset_running_requests=True)
        await engine.reset_mm_cache()
        await engine.reset_encoder_cache()
        self._version, self._manifest = manifest.version, manifest
        await engine.resume_generation()
        return time.monotonic() - paused

    async def _alive(self, work: Awaitable[T]) -> T:
        """The result of some work of the engine, or EngineDead as soon as the engine is."""
        from vllm.v1.engine.exceptions import EngineDeadError

        if self._dead is not None:
            _discard(work)
            raise self._dead
        task = asyncio.ensure_future(work)
        died = asyncio.ensure_future(self._died.wait())
        try:
            await asyncio.wait((task, died), return_when=asyncio.FIRST_COMPLETED)
            if self._dead is not None and not task.done():
                raise self._dead
            return await task
        except EngineDeadError as error:
            raise self._die(f"the engine's process stopped: {error}", error) from error
        finally:
            died.cancel()
            if not task.done():
                task.cancel()

    def _die(self, reason: str, cause: BaseException | None) -> EngineDead:
        """Declare the engine dead and wake everyone who waits; the first reason stays."""
        if self._dead is None:
            self._dead = EngineDead(reason)
            self._dead.__cause__ = cause
            self._died.set()
        return self._dead


def _nothing() -> None:
    pass


def _discard(work: Awaitable[Any]) -> None:
    if asyncio.iscoroutine(work):
        work.close()
