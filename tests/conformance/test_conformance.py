"""Every provider that can run here keeps every promise of `rz_agent.sandboxes.conformance`.

To join, add a name and a function that opens the provider, or skips with the reason why it cannot run. Of a
desktop only what it does itself is tried: programs, sessions and files are those of the sandbox under it.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from dockerd import Dockerd
from rz_agent.sandboxes.conformance import PROMISES, Place, Promise, attempt
from rz_agent.sandboxes.desktop.provider import DesktopProvider
from rz_agent.sandboxes.local.provider import LocalProvider
from rz_agent.sandboxes.provider import Provider
from rz_agent.sandboxes.spec import SandboxSpec
from rz_agent.sandboxes.tables import DesktopTable, LocalTable

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
BY_NAME = {promise.name: promise for promise in PROMISES}
OF_A_DESKTOP = (
    "sandboxes have names and files of their own",
    "a killed sandbox is an infrastructure error to every waiter",
    "a create that is cancelled leaves nothing",
    "reset stops programs and drops files and sessions",
    "a snapshot brings the files back",
)


class Trial:
    """A place, and an event loop to reach it."""

    def __init__(self, runner: asyncio.Runner, provider: Provider) -> None:
        self.run = runner.run
        self.provider = provider
        self.place = Place(provider, SandboxSpec())


@contextmanager
def trial_of(provider: Provider) -> Iterator[Trial]:
    """One, and nothing of it left."""
    with asyncio.Runner() as runner:
        trial = Trial(runner, provider)
        runner.run(trial.place.__aenter__())
        yield trial
        runner.run(trial.place.__aexit__(None, None, None))
        left = runner.run(trial.place.mine())
        runner.run(provider.aclose())
        assert left == set()


@pytest.fixture(scope="module", params=PROVIDERS.values(), ids=list(PROVIDERS))
def trial(request: pytest.FixtureRequest) -> Iterator[Trial]:
    with trial_of(request.param(request)) as trial:
        yield trial


@pytest.fixture(scope="module")
def desktop(request: pytest.FixtureRequest) -> Iterator[Trial]:
    for program, package in (("Xvfb", "xvfb"), ("openbox", "openbox"), ("dbus-daemon", "dbus")):
        if shutil.which(program) is None:
            pytest.skip(f"{package} is not installed")
    with trial_of(DesktopProvider(DesktopTable(size=(320, 240)), local(request))) as trial:
        yield trial


@pytest.mark.parametrize("promise", PROMISES, ids=lambda promise: f"{promise.topic}: {promise.name}")
def test_a_provider_keeps_its_promise(trial: Trial, promise: Promise) -> None:
    if lacks := promise.lacks(trial.place.can):
        pytest.skip(f"this provider does not claim {', '.join(lacks)}")
    trial.run(attempt(promise, trial.place))


@pytest.mark.parametrize("name", OF_A_DESKTOP)
def test_a_desktop_keeps_its_promise(desktop: Trial, name: str) -> None:
    desktop.run(attempt(BY_NAME[name], desktop.place))
