"""One row of the dataset: a repository at a commit, what is asked of it, and the tests that decide.

    Instance.of(row, where="rows.jsonl:3") -> Instance        ConfigError names row, column, value, remedy

Invariants: list columns are Python literals with mixed quotes, as published, or JSON, or lists; they are read
as data and never evaluated. FAIL_TO_PASS and fail_to_pass are one column. Nothing here waits.
"""

from __future__ import annotations

import ast
import json
import reprlib
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from ...errors import ConfigError

LISTS = ("fail_to_pass", "pass_to_pass", "selected_test_files_to_run")
_LOCAL = "local:"
_KEEPS_ITS_NAME = "instance_element-hq__element-web-ec0f940ef0e8e3b61078f145f34dc40d1938e6c5-vnan"


class Instance(BaseModel):
    """The columns by their published names. What is not needed to set up, ask or grade may be empty.

    patch                 the gold patch; test_patch: what it changes in tests
    fail_to_pass          tests that fail before the change and must pass after it
    pass_to_pass          tests that pass before it and must still pass
    before_repo_set_cmd   its last line checks the test files out
    dockerhub_tag         of the published image, or "local:PATH" of a git checkout or bundle
    """

    model_config = ConfigDict(frozen=True, extra="ignore")

    repo: str = Field(pattern=r"^[^/\s]+/[^/\s]+$")
    instance_id: str = Field(pattern=r"^[\w.-]+$")
    base_commit: str = Field(pattern=r"^[0-9a-f]{40}([0-9a-f]{24})?$")
    patch: str = ""
    test_patch: str = ""
    problem_statement: str = Field(min_length=1)
    requirements: str = ""
    interface: str = ""
    repo_language: str = ""
    fail_to_pass: tuple[str, ...] = Field(min_length=1)
    pass_to_pass: tuple[str, ...] = ()
    issue_specificity: str = ""
    issue_categories: str = ""
    before_repo_set_cmd: str = Field(min_length=1)
    selected_test_files_to_run: tuple[str, ...] = ()
    dockerhub_tag: str = ""

    @field_validator(*LISTS, mode="before")
    @classmethod
    def _listed(cls, value: object) -> object:
        return _list_of(value) if isinstance(value, str) else value

    @field_validator("problem_statement", "requirements", "interface", mode="before")
    @classmethod
    def _plain(cls, value: object) -> object:
        """Some rows hold the text as a JSON string."""
        if isinstance(value, str) and value[:1] == value[-1:] == '"' and len(value) > 1:
            try:
                decoded = json.loads(value)
            except ValueError:
                return value
            return decoded if isinstance(decoded, str) else value
        return "" if value is None else value

    @classmethod
    def of(cls, row: Mapping[str, Any], *, where: str) -> Instance:
        """The row, whichever way its columns are spelt."""
        columns = {key.lower(): value for key, value in row.items() if value is not None}
        try:
            return cls.model_validate(columns)
        except ValidationError as error:
            fault = error.errors(include_url=False)[0]
            column = ".".join(map(str, fault["loc"]))
            missing = fault["type"] == "missing"
            raise ConfigError(
                source=where,
                key=column,
                value=None if missing else reprlib.repr(fault["input"]),
                why="is missing" if missing else "",
                remedy=_REMEDIES.get(column, "Write it as the published dataset does")
                + ("." if missing else f" ({fault['msg']})."),
            ) from None

    @property
    def tests(self) -> frozenset[str]:
        """All that must pass."""
        return frozenset(self.fail_to_pass) | frozenset(self.pass_to_pass)

    @property
    def local(self) -> str | None:
        """The path of the repository on this machine; None where the image holds it."""
        tag = self.dockerhub_tag
        return tag.removeprefix(_LOCAL) if tag.startswith(_LOCAL) else None

    @property
    def checkout_tests(self) -> str:
        """The shell command that checks the test files out."""
        return self.before_repo_set_cmd.strip().splitlines()[-1]

    @property
    def statement(self) -> str:
        """What is asked, in the published form.

        Requirements and interface are part of it: without them the tests are not determined.
        """
        return (
            f"{self.problem_statement}\n\nRequirements:\n{self.requirements}\n\n"
            f"New interfaces introduced:\n{self.interface}"
        )

    def image(self, repository: str) -> str:
        """Where its files come from: the published image, or "local:PATH"."""
        if self.local is not None:
            return self.dockerhub_tag
        return f"{repository}:{self.dockerhub_tag or image_tag(self.instance_id, self.repo)}"


_REMEDIES = {
    "repo": 'Write "owner/project"',
    "base_commit": "Write the full hash of a commit",
    "fail_to_pass": "Write a list of test names, as a Python or JSON list; one test at least must decide",
    "pass_to_pass": "Write a list of test names, as a Python or JSON list",
    "selected_test_files_to_run": "Write a list of arguments for run_script.sh, as a Python or JSON list",
}


def image_tag(instance_id: str, repo: str) -> str:
    """The tag of the published image, for rows without the column.

    >>> image_tag("instance_flipt-io__flipt-0b11", "flipt-io/flipt")
    'flipt-io.flipt-flipt-io__flipt-0b11'
    """
    owner, _, project = repo.lower().partition("/")
    rest = instance_id.replace("instance_", "")
    if instance_id != _KEEPS_ITS_NAME:  # the one image that was pushed under its whole name
        rest = rest.removesuffix("-vnan")
        if "element-hq" in owner and "element-web" in project:
            project = "element"
    return f"{owner}.{project}-{rest}"[:128]


def _list_of(text: str) -> list[str]:
    """A list in words, of Python or of JSON. ValueError says what it is instead."""
    found: object
    try:
        found = ast.literal_eval(text.strip())
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        found = json.loads(text)
    if not isinstance(found, list | tuple) or not all(isinstance(entry, str) for entry in found):
        raise ValueError("it is no list of texts")
    return list(found)
