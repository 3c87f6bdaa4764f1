"""The arithmetic that rollout and learner share; see operations.py.

operations("aligned", device="cpu") -> Operations
"""

from __future__ import annotations

from .operations import Operations, OperationsName, Packed

__all__ = ["Operations", "OperationsName", "Packed", "operations"]


def operations(name: OperationsName, device: str = "cpu") -> Operations:
    """The implementation of a name on a device ("cpu" or "cuda[:n]").

    Raises ConfigError for an unknown name, and for "aligned" where the device has no such kernels.
    """
    # Not at the top: with the checkout on sys.path, libraries that look for Hugging Face's package of the
    # same name import this file as `kernels`, and must find a module without that package's version.
    from ..errors import ConfigError
    from .reference import Reference, Standard

    if name == "reference":
        return Reference()
    if name == "standard":
        return Standard()
    if name != "aligned":
        raise ConfigError(
            source="kernels", key="name", value=name, remedy='Use "aligned", "standard" or "reference".'
        )
    if device.partition(":")[0] == "cuda":
        from .cuda import AlignedCuda

        return AlignedCuda()
    if device != "cpu":
        raise ConfigError(
            source="kernels",
            key="device",
            value=device,
            why="has no aligned kernels.",
            remedy='Use device "cpu" or "cuda", or kernels = "standard".',
        )
    from .cpu import AlignedCpu

    return AlignedCpu()
