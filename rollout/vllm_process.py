"""What an engine changes in the process that it lives in, kept from everyone else in that process.

Building an engine seeds Python's, NumPy's and torch's global generators, replaces `torch.set_num_threads`
and adds libraries to LD_PRELOAD. The learner and the sandboxes share the process, so all of it is put back.
The few settings that vLLM takes from the environment alone are set for the time of building only.
"""

from __future__ import annotations

import gc
import os
import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from ..kernels import vllm_versions


def release(engine: Any) -> None:
    """Shut an LLMEngine of this process down without what vLLM's own shutdown adds.

    That one destroys torch's process groups, which other engines of this process and the learner still use;
    it would also run later, when the engine is collected.
    """
    client = engine.engine_core
    vllm_versions.keep_process_groups(client)
    client.engine_core.model_executor.shutdown()
    client.engine_core.scheduler.shutdown()
    # Building it froze every object of the process out of garbage collection.
    gc.unfreeze()


@contextmanager
def building_an_engine(threads: int, settings: Mapping[str, str] | None = None) -> Iterator[None]:
    """Around the construction of an engine; child processes inherit `threads` as their OpenMP threads.

    settings  what else vLLM takes from the environment, see `vllm_device`
    """
    wanted = {
        "OMP_NUM_THREADS": str(threads),
        "VLLM_LOGGING_LEVEL": "ERROR",
        # For the one token that a score of a full context samples and throws away; see engine_args.
        "VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1",
        **(settings or {}),
    }
    before = {name: os.environ.get(name) for name in (*wanted, "LD_PRELOAD")}
    random_state, numpy_state, torch_state = random.getstate(), np.random.get_state(), torch.get_rng_state()
    set_num_threads = torch.set_num_threads
    os.environ.update(wanted)
    try:
        yield
    finally:
        torch.set_num_threads = set_num_threads
        torch.set_rng_state(torch_state)
        np.random.set_state(numpy_state)
        random.setstate(random_state)
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
