"""The failures that a person or the controller acts on; everything else is an ordinary exception.

`ConfigError` says which file, key and value are wrong and what to write instead (exit code 2).
`EnvironmentBug` is a mistake in an environment's own code (exit code 1).
`RunStopped` is a breaker's decision (exit code 3), `Interrupted` a person's (130). `NonFinite` and
`MissingLogprob` are never softened into a number: a token without a finite log-probability cannot be
trained on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial


class RzError(Exception):
    """Base of every error that rz-agent raises on purpose."""

    exit_code = 1


class ConfigError(RzError):
    """A recipe, flag or file says something that cannot be run.

    >>> print(ConfigError(source="r.toml", key="max_lag", value=65, remedy="Use 0 to 64."))
    r.toml: max_lag = 65
      Use 0 to 64.
    """

    exit_code = 2

    def __init__(self, *, source: str, key: str, value: object, remedy: str, why: str = "") -> None:
        self.source, self.key, self.value, self.remedy, self.why = source, key, value, remedy, why
        reason = f" {why}" if why else ""
        super().__init__(f"{source}: {key} = {value!r}{reason}\n  {remedy}")

    def __reduce__(self) -> tuple[Callable[[], ConfigError], tuple[()]]:
        """Errors travel between processes; pickle would call the class with the message alone."""
        again = partial(
            ConfigError, source=self.source, key=self.key, value=self.value, remedy=self.remedy, why=self.why
        )
        return again, ()


class EnvironmentBug(RzError):
    """Code of an environment's author raised; the message has hook, task, file and line (`envs/bug.py`)."""


class Interrupted(RzError):
    """A person asked for the end before there was anything to save; the run can be resumed all the same."""

    exit_code = 130


class RunStopped(RzError):
    """A breaker ended the run: infrastructure failures, an audit difference, a non-finite number."""

    exit_code = 3


class NonFinite(RunStopped):
    """A NaN or infinite number where a finite one is owed; the message names its place."""


class MissingLogprob(RunStopped):
    """The engine returned a sampled token without its log-probability."""


@contextmanager
def ungrouped() -> Iterator[None]:
    """Around a task group: its first failure is raised as itself, chained to what it was raised from."""
    try:
        yield
    except BaseExceptionGroup as failures:
        first = failures.exceptions[0]
        raise first from first.__cause__
