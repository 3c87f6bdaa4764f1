"""vLLM's engine in a thread of this process: no copies, no second import of vLLM, a step is a call.

    caller (asyncio) --command--> queue --> engine thread: commands, then one step, then commands, ...
    caller           <--future--           resolved in the thread, woken in the caller's loop

Invariants: only the engine thread touches the engine, so a command (an update above all) falls between two
steps. A command's future is always resolved: with its result, its exception, or EngineDead. The thread sleeps
only when no request runs and no command waits. It draws from torch's global generator, as any code of this
process does.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import itertools
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass
from typing import Any, TypeVar

from ..kernels import vllm_versions
from ..kernels.transfer.sources import Offer
from ..trajectory import Float32, Sampling
from ..weight_store import WeightManifest
from . import vllm_device, vllm_request
from .engine import Completion, EngineDead, Prepared, Takeover
from .engine_config import EngineConfig
from .preparing import prepared
from .vllm_process import building_an_engine, release

T = TypeVar("T")


@dataclass(slots=True)
class _Command:
    """Something to do between two steps; `then` receives what it returned or raised."""

    run: Callable[[], Any]
    then: Future[Any]


class VllmInProcess:
    """`Engine` in a daemon thread."""

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.contract = vllm_device.contract_of(config)
        self._version = config.initial_version
        self._manifest: WeightManifest | None = None
        self._commands: queue.SimpleQueue[_Command | None] = queue.SimpleQueue()
        self._running: dict[str, Future[Any]] = {}  # who waits for each request in the engine
        self._request_ids = itertools.count()
        self._dead: EngineDead | None = None
        # Held while a command is queued and while death is declared, so that no command falls in between.
        self._gate = threading.Lock()
        self._thread = threading.Thread(target=self._main, name="vllm-engine", daemon=True)
        self._started: Future[None] = Future()
        self._engine: Any = None

    @property
    def version(self) -> int:
        return self._version

    async def start(self) -> None:
        # A thread inside native code when the interpreter goes down would abort the process.
        atexit.register(self._stop)
        self._thread.start()
        await asyncio.wrap_future(self._started)

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
        return vllm_request.completion(await self._request(prompt_ids, params, images=images))

    async def score(self, ids: Sequence[int], *, temperature: float = 1.0, cold: bool = True) -> Float32:
        params = vllm_request.scoring_params(self.config, prompt_tokens=len(ids), temperature=temperature)
        return vllm_request.scores(await self._request(ids, params, cold=cold))

    async def prepare(self, offer: Offer) -> Prepared:
        await self._do(lambda: self._ask("rz_prepare", offer))
        return await prepared(lambda: self._do(lambda: self._ask("rz_prepared", offer.version)))

    async def update(self, manifest: WeightManifest) -> Takeover:
        return await self._do(lambda: self._update(manifest))

    async def checksums(self) -> dict[str, str]:
        return await self._do(self._checksums)

    async def on_worker(self, function: Callable[[Any], T]) -> T:
        """function(worker) between two steps, in the engine's thread: for tools that look into the model."""
        results: list[T] = await self._do(lambda: self._engine.collective_rpc(function))
        return results[0]

    async def forget(self) -> None:
        """Drop the prefix cache, so that what is asked next is computed anew."""
        await self._do(lambda: self._engine.reset_prefix_cache(reset_running_requests=True))

    async def close(self) -> None:
        """Stop after the step in progress; idempotent."""
        await asyncio.to_thread(self._stop)
        atexit.unregister(self._stop)

    def _stop(self) -> None:
        self._commands.put(None)
        if self._thread.ident is not None:
            self._thread.join()

    # --- in the caller's loop -------------------------------------------------------------------------

    async def _do(self, run: Callable[[], T]) -> T:
        """Run a function in the engine thread between two steps."""
        then: Future[T] = Future()
        self._put(_Command(run, then))
        return await asyncio.wrap_future(then)

    def _put(self, command: _Command) -> None:
        with self._gate:
            if self._dead is not None:
                raise self._dead
            self._commands.put(command)

    async def _request(
        self, ids: Sequence[int], params: Any, *, images: Sequence[bytes] = (), cold: bool = False
    ) -> Any:
        number = next(self._request_ids)
        name = str(number)
        then: Future[Any] = Future()

        def admit() -> None:
            salt = vllm_request.salt(self._version, number if cold else None)
            prompt = vllm_request.prompt(ids, images, salt)
            if then.cancelled():
                return
            vllm_request.check_ids(ids, self._engine.model_config.get_vocab_size())
            self._engine.add_request(name, prompt, params)
            self._running[name] = then

        admitted: Future[None] = Future()
        self._put(_Command(admit, admitted))
        try:
            await asyncio.wrap_future(admitted)
            return await asyncio.wrap_future(then)
        except asyncio.CancelledError:
            then.cancel()
            # Not awaited: the caller is gone, and a dead engine has nothing left to abort.
            if self._dead is None:
                self._commands.put(_Command(lambda: self._abort(name), Future()))
            raise

    # --- in the engine thread -------------------------------------------------------------------------

    def _main(self) -> None:
        try:
            self._build()
        except BaseException as error:
            dead = EngineDead(f"the engine did not start: {error}")
            dead.__cause__ = error
            self._die(dead)
            _fail(self._started, dead)
            return
        self._started.set_result(None)
        try:
            while self._turn():
                pass
            reason = EngineDead("the engine was closed")
        except BaseException as error:
            reason = EngineDead(f"the engine stopped: {type(error).__name__}: {error}")
            reason.__cause__ = error
        self._die(reason)
        self._shut_down()

    def _build(self) -> None:
        import torch
        from vllm.engine.arg_utils import EngineArgs
        from vllm.usage.usage_lib import UsageContext
        from vllm.v1.engine.llm_engine import LLMEngine
        from vllm.v1.executor.abstract import Executor

        # OpenMP counts threads for each thread that opens a parallel region.
        torch.set_num_threads(self.config.threads)
        with building_an_engine(self.config.threads, vllm_device.environment(self.config)):
            vllm_config = EngineArgs(**vllm_request.engine_args(self.config)).create_engine_config()
            self._engine = LLMEngine(
                vllm_config,
                Executor.get_class(vllm_config),
                log_stats=False,
                usage_context=UsageContext.ENGINE_CONTEXT,
                multiprocess_mode=False,
            )
        self._engine.collective_rpc("init_weight_transfer_engine", kwargs={"init_info": {}})
        vllm_versions.tag(self._engine, self._version)

    def _turn(self) -> bool:
        """All waiting commands, then one step. False when the engine is to close."""
        idle = not self._engine.has_unfinished_requests()
        while idle or not self._commands.empty():
            command = self._commands.get()
            if command is None:
                return False
            _run(command)
            idle = self._commands.empty() and not self._engine.has_unfinished_requests()
            if self._dead is not None:
                return False
        for output in self._engine.step():
            self._deliver(output)
        return True

    def _deliver(self, output: Any) -> None:
        if output.finished:
            then = self._running.pop(output.request_id)
            if then.set_running_or_notify_cancel():
                then.set_result(output)

    def _abort(self, name: str) -> None:
        if self._running.pop(name, None) is not None:
            self._engine.abort_request([name])

    def _ask(self, method: str, *arguments: Any) -> Any:
        return self._engine.collective_rpc(method, args=arguments)[0]

    def _update(self, manifest: WeightManifest) -> Takeover:
        paused = time.monotonic()
        vllm_request.check_newer(manifest, self._version, first=self._manifest is None)
        try:
            self._engine.collective_rpc("start_weight_update")
            info = vllm_request.update_info(manifest)
            self._engine.collective_rpc("update_weights", kwargs={"update_info": info})
            self._engine.collective_rpc("finish_weight_update")
            # Running requests go back to the queue and are prefilled again under the new weights.
            self._engine.reset_prefix_cache(reset_running_requests=True)
            self._engine.reset_mm_cache()
            self._engine.reset_encoder_cache()
            self._version, self._manifest = manifest.version, manifest
            vllm_versions.tag(self._engine, self._version)
            return Takeover(paused_s=time.monotonic() - paused, source=self._ask("rz_taken"))
        except BaseException as error:
            # Half of the weights may be new: nothing may be sampled from them.
            dead = EngineDead(f"the update to version {manifest.version} failed: {error}")
            dead.__cause__ = error
            self._die(dead)
            raise dead from error

    def _checksums(self) -> dict[str, str]:
        names = [] if self._manifest is None else list(self._manifest.checksums)
        held: dict[str, str] = self._ask("rz_checksums", names)
        return held

    def _die(self, reason: EngineDead) -> None:
        """Declare the engine dead and wake everyone who waits; the first reason stays."""
        with self._gate:
            if self._dead is None:
                self._dead = reason
            while not self._commands.empty():
                if (command := self._commands.get()) is not None:
                    _fail(command.then, self._dead)
        for then in self._running.values():
            _fail(then, self._dead)
        self._running.clear()

    def _shut_down(self) -> None:
        engine, self._engine = self._engine, None
        release(engine)


def _run(command: _Command) -> None:
    if not command.then.set_running_or_notify_cancel():
        return
    try:
        result = command.run()
    except BaseException as error:
        command.then.set_exception(error)
        if not isinstance(error, Exception):
            raise
    else:
        command.then.set_result(result)


def _fail(then: Future[Any], error: Exception) -> None:
    # Already answered, or cancelled by a caller who is gone.
    with contextlib.suppress(InvalidStateError):
        then.set_exception(error)
