"""What a recipe may set on `rz/SWEBenchPro-v0`."""

from __future__ import annotations

from pydantic import Field

from ..options import EnvOptions

SYSTEM_PROMPT = (
    "You are a software engineer. You work in a git repository with the tools bash and str_replace_edit: "
    "find the cause, change the source, try the change, then call submit. Do not change tests; hidden ones "
    "decide. There is no network."
)


class SWEBenchProOptions(EnvOptions):
    """Memory, processes and files of the sandboxes are the recipe's `[sandbox]`, raised to what a test suite
    needs where that leaves a command's defaults.

    taskset        the dataset's .parquet or .jsonl file, or "sample": one small instance that is shipped
    scripts        folder with <instance_id>/run_script.sh and parser.py: the `run_scripts` of a clone of
                   SWE-bench_Pro-os (its `dockerfiles` beside it are read too); None: beside the taskset
    images         repository of the published images
    repo_path      where the repository is in a published image
    python         the interpreter inside that runs an instance's parser
    command_s      wall seconds of one bash command; all calls of a turn have three times as long
    setup_s        to make a sandbox, fill it and scrub the repository; past it the episode is masked
    tests_s        of the tests of one grading; past it they have failed
    output_chars   of a command's output that the policy sees: head and tail
    system_prompt  a first message; None: no such message
    """

    taskset: str | None = "sample"
    scripts: str | None = None
    images: str = "jefzda/sweap-images"
    repo_path: str = "/app"
    python: str = "python3"
    max_turns: int | None = Field(default=50, ge=1)
    command_s: float = Field(default=60.0, gt=0)
    setup_s: float = Field(default=600.0, gt=0)
    tests_s: float = Field(default=1800.0, gt=0)
    output_chars: int = Field(default=10_000, ge=200)
    system_prompt: str | None = SYSTEM_PROMPT

    @property
    def turn_s(self) -> float:
        """Wall seconds of all tool calls of one turn."""
        return 3 * self.command_s
