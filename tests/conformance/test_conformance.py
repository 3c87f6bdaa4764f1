"""Every provider that can run here keeps every promise of `rz_agent.sandboxes.conformance`.

To join, add a name and a function that opens the provider, or skips with the reason why it cannot run.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable, Iterator

import pytest
from dockerd import Dockerd
from rz_agent.sandboxes.conformance import PROMISES, Place, Promise, attempt
from rz_agent.sandboxes.local.provider import LocalProvider
from rz_agent.sandboxes.provider import Provider
from rz_agent.sandboxes.spec import SandboxSpec
from rz_agent.sandboxes.tables import LocalTable

Open = Callable[[pytest.FixtureRequest], Provider]


def local(request: pytest.FixtureRequest) -> Provider:
    if shutil.which("bwrap") is None:
        pytest.skip("bubblewrap is not installed")
    return LocalProvider(LocalTable())


def local_without_isolation(request: pytest.FixtureRequest) -> Provider:
    return LocalProvider(LocalTable(isolation="none"))


def docker(request: pytest.FixtureRequest) -> Provider:
    daemon: Dockerd = request.getfixturevalue("dockerd")
    return daemon.provider()


PROVIDERS: dict[str, Open] = {
    "local": local,
    "local, no isolation": local_without_isolation,
    "docker": docker,
}


class Trial:
    """A place, and an event loop to reach it."""

    def __init__(self, runner: asyncio.Runner, provider: Provider) -> None:
        self.run = runner.run
        self.provider = provider
        self.place = Place(provider, SandboxSpec())


@pytest.fixture(scope="module", params=PROVIDERS.values(), ids=list(PROVIDERS))
def trial(request: pytest.FixtureRequest) -> Iterator[Trial]:
    provider = request.param(request)
    with asyncio.Runner() as runner:
        trial = Trial(runner, provider)
        runner.run(trial.place.__aenter__())
        yield trial
        runner.run(trial.place.__aexit__(None, None, None))
        left = runner.run(trial.place.mine())
        runner.run(provider.aclose())
        assert left == set()


@pytest.mark.parametrize("promise", PROMISES, ids=lambda promise: f"{promise.topic}: {promise.name}")
def test_a_provider_keeps_its_promise(trial: Trial, promise: Promise) -> None:
    if lacks := promise.lacks(trial.place.can):
        pytest.skip(f"this provider does not claim {', '.join(lacks)}")
    trial.run(attempt(promise, trial.place))
