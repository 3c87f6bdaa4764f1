"""SWE-bench Pro without a sandbox: its rows, the names of its images, its parsers, and the verdict."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rz_agent.envs.failure import InfraFailure
from rz_agent.envs.swebench_pro import parse_logs, verdict
from rz_agent.envs.swebench_pro.dataset import instance_of, load_dataset
from rz_agent.envs.swebench_pro.grader import Grade, Run
from rz_agent.envs.swebench_pro.instance import Instance, image_tag
from rz_agent.envs.swebench_pro.options import SWEBenchProOptions
from rz_agent.envs.swebench_pro.room import room
from rz_agent.envs.swebench_pro.runners import pytest_parser, unittest_parser
from rz_agent.envs.swebench_pro.scripts import find_scripts
from rz_agent.envs.swebench_pro.tree import strip_binary
from rz_agent.envs.swebench_pro.verdict import statuses
from rz_agent.envs.task import Resources
from rz_agent.errors import ConfigError
from rz_agent.sandboxes.spec import Limits, SandboxSpec

PUBLISHED = Path(__file__).parent / "data" / "swebench_pro" / "published"
SHA, OTHER = "0ea40e09d1b35bcb69ff4d9cecf3d0defa4b36e8", "30a923fb5c164d6cd18280c02422f75e611e8fb2"
ROW: dict[str, Any] = {
    "repo": "owner/project",
    "instance_id": f"instance_owner__project-{SHA}-vnan",
    "base_commit": OTHER,
    "patch": "diff --git a/x b/x\n",
    "test_patch": "",
    "problem_statement": '"## Title\\nIt says \\"no\\"."',
    "requirements": "- It says yes.",
    "interface": "No new interfaces are introduced.",
    "repo_language": "python",
    "fail_to_pass": "['tests/test_a.py::test_x']",
    "pass_to_pass": "['tests/test_a.py::test_y', \"tests/test_a.py::test_z[it's]\"]",
    "issue_specificity": '["major"]',
    "issue_categories": '["bug"]',
    "before_repo_set_cmd": f"git reset --hard {OTHER}\ngit clean -fd \ngit checkout {SHA} -- tests/a.py",
    "selected_test_files_to_run": '["tests/test_a.py"]',
    "dockerhub_tag": "owner.project-owner__project-0ea4",
}


def instance(**changes: Any) -> Instance:
    return Instance.of({**ROW, **changes}, where="rows.jsonl:3")


# -- rows ------------------------------------------------------------


def test_a_published_row_is_read_whole() -> None:
    found = instance()
    assert found.fail_to_pass == ("tests/test_a.py::test_x",)
    assert found.pass_to_pass[1] == "tests/test_a.py::test_z[it's]"
    assert found.checkout_tests == f"git checkout {SHA} -- tests/a.py"
    assert found.statement == (
        '## Title\nIt says "no".\n\nRequirements:\n- It says yes.\n\n'
        "New interfaces introduced:\nNo new interfaces are introduced."
    )


@pytest.mark.parametrize("tests", ["['a', \"it's\"]", '["a", "it\'s"]', ["a", "it's"]])
def test_lists_are_python_literals_or_json_under_either_spelling(tests: object) -> None:
    other = {key: value for key, value in ROW.items() if key != "fail_to_pass"}
    found = Instance.of({**other, "FAIL_TO_PASS": tests}, where="row")
    assert found.fail_to_pass == ("a", "it's") == instance(fail_to_pass=tests).fail_to_pass


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("fail_to_pass", "__import__('os').getcwd()"),
        ("fail_to_pass", "[1, 2]"),
        ("fail_to_pass", "[]"),
        ("base_commit", "HEAD"),
        ("instance_id", "../../etc"),
        ("repo", "project"),
        ("problem_statement", ""),
    ],
)
def test_a_wrong_value_is_refused_with_its_row_and_column(column: str, value: str) -> None:
    with pytest.raises(ConfigError) as refused:
        instance(**{column: value})
    told = str(refused.value)
    assert told.startswith(f"rows.jsonl:3: {column} = ")
    assert len(told.splitlines()) == 2, "what is wrong, and what to write"


def test_a_missing_column_is_named() -> None:
    with pytest.raises(ConfigError, match=r"row: base_commit = None is missing\n  Write the full hash"):
        Instance.of({key: value for key, value in ROW.items() if key != "base_commit"}, where="row")


def test_jsonl_rows_become_tasks_and_a_broken_line_is_named(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps(ROW) + "\n\n")
    (task,) = load_dataset(file, SWEBenchProOptions()).load("train")
    assert task.image == "jefzda/sweap-images:owner.project-owner__project-0ea4"
    assert instance_of(task) == instance()
    file.write_text(json.dumps(ROW) + "\nno json\n")
    with pytest.raises(ConfigError, match=r"rows.jsonl:2: row = 'no json'"):
        load_dataset(file, SWEBenchProOptions())


def test_parquet_rows_are_the_same_and_a_published_file_is_the_split_test(tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    file = tmp_path / "test-00000-of-00001.parquet"
    parquet.write_table(arrow.Table.from_pylist([ROW]), file)
    (task,) = load_dataset(file, SWEBenchProOptions()).load("test")
    assert instance_of(task) == instance()
    file.write_bytes(b"PAR1 cut off")
    with pytest.raises(ConfigError, match="Download it anew"):
        load_dataset(file, SWEBenchProOptions())


def test_a_local_repository_is_looked_for_from_the_files_own_folder(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps({**ROW, "dockerhub_tag": "local:project"}) + "\n")
    with pytest.raises(ConfigError, match=r"'local:project' names .*/project, which is not there"):
        load_dataset(file, SWEBenchProOptions())
    (tmp_path / "project").mkdir()
    (task,) = load_dataset(file, SWEBenchProOptions()).load("train")
    assert task.image == f"local:{tmp_path / 'project'}"


@pytest.mark.parametrize(
    ("instance_id", "repo", "tag"),
    [
        (
            f"instance_ansible__ansible-{SHA}-v{OTHER}",
            "ansible/ansible",
            f"ansible.ansible-ansible__ansible-{SHA}-v{OTHER}",
        ),
        (
            f"instance_NodeBB__NodeBB-{SHA}-vnan",
            "NodeBB/NodeBB",
            f"nodebb.nodebb-NodeBB__NodeBB-{SHA}",
        ),
        (
            f"instance_future-architect__vuls-{SHA}-v{OTHER}",
            "future-architect/vuls",
            f"future-architect.vuls-future-architect__vuls-{SHA}-v{OTHER}"[:128],
        ),
        (
            "instance_element-hq__element-web-71fe08ea0f159ccb707904d87f0a4aef205a167c-vnan",
            "element-hq/element-web",
            "element-hq.element-element-hq__element-web-71fe08ea0f159ccb707904d87f0a4aef205a167c",
        ),
        (
            "instance_element-hq__element-web-ec0f940ef0e8e3b61078f145f34dc40d1938e6c5-vnan",
            "element-hq/element-web",
            "element-hq.element-web-element-hq__element-web-ec0f940ef0e8e3b61078f145f34dc40d1938e6c5-vnan",
        ),
    ],
)
def test_the_tag_of_an_image_follows_the_published_rule(instance_id: str, repo: str, tag: str) -> None:
    assert image_tag(instance_id, repo) == tag
    assert len(tag) <= 128


# -- its own files ------------------------------------------------------------


def test_scripts_are_found_beside_each_other_or_as_in_the_published_clone(tmp_path: Path) -> None:
    name = next(path.name for path in PUBLISHED.iterdir() if "NodeBB" in path.name)
    exports = find_scripts(PUBLISHED, name).exports
    assert 'export CI=\'{ "host": "127.0.0.1"' in exports
    assert exports.splitlines()[-1] == "export UV_HTTP_TIMEOUT=60"
    clone = tmp_path / "run_scripts" / "one"
    clone.mkdir(parents=True)
    for file in ("run_script.sh", "parser.py"):
        (clone / file).write_text(file)
    docker = tmp_path / "dockerfiles" / "base_dockerfile" / "one"
    docker.mkdir(parents=True)
    (docker / "Dockerfile").write_text("FROM x\nENV A=b\nENVELOPE=1\n")
    assert find_scripts(tmp_path / "run_scripts", "one").exports == "export A=b\n"


def test_an_instance_without_scripts_cannot_be_graded_which_is_nobodys_answer(tmp_path: Path) -> None:
    with pytest.raises(InfraFailure, match=r"run_script.sh cannot be read"):
        find_scripts(tmp_path, "gone")


def test_a_sandbox_has_room_for_a_repository_and_never_a_network() -> None:
    options, asked = SWEBenchProOptions(), SandboxSpec(limits=Limits(pids=99), network="open")
    spec = room(asked, instance(), options, Resources(memory_mb=9000, cpus=2))
    assert (spec.network, spec.limits.pids, spec.limits.memory_mb, spec.total.cpus) == ("none", 99, 9000, 2)
    assert (spec.total.memory_mb, spec.limits.disk_mb) == (9000, 2048)
    assert (spec.image, spec.owned) == ("jefzda/sweap-images:" + ROW["dockerhub_tag"], ("/app", "/root"))
    spec = room(asked, instance(dockerhub_tag="local:/src"), options, Resources())
    assert (spec.network, spec.image, spec.owned, spec.limits.memory_mb) == ("none", None, (), 4096)


# -- parsers and verdicts ------------------------------------------------------------

ANSIBLE = "test/units/utils/test_vars.py::TestVariableUtils::"


def mocha(of: Instance, failed: int = 0) -> str:
    """A report in which the first `failed` tests do."""
    titles = [name.partition(" | ")[2] for name in of.fail_to_pass]
    tests = [{"fullTitle": title, "file": "/app/test/tokens.js"} for title in titles]
    report = {"stats": {}, "pending": [], "failures": tests[:failed], "passes": tests[failed:]}
    return f"Running selected tests: test/tokens.js\nPONG\n{json.dumps(report, indent=2)}\n"


SUITE = "containers/contacts/group/ContactGroupDetailsModal.test.tsx"


def xdist(status: str, name: str) -> str:
    return f"[gw1] [ 50%] \x1b[32m{status}\x1b[0m {name} \n"


def go(status: str) -> str:
    return f"=== RUN   TestCleanup\n--- {status}: TestCleanup (0.10s)\n"


# (whose parser, what the log is of, the log, whether that is resolved)
LOGS: list[tuple[str, str, Callable[[Instance], str], bool]] = [
    ("flipt", "all pass", lambda i: go("PASS") + "PASS\nok  \tgo.flipt.io/flipt/x\t0.2s\n", True),
    ("flipt", "one fails", lambda i: go("FAIL") + "FAIL\nFAIL\tgo.flipt.io/flipt/x\t0.2s\n", False),
    ("flipt", "cut off", lambda i: "=== RUN   TestCleanup\n", False),
    ("flipt", "empty", lambda i: "", False),
    (
        "flipt",
        "a forged PASS beside the FAIL",
        lambda i: "--- PASS: TestCleanup (0.00s)\n" + go("FAIL"),
        False,
    ),
    ("flipt", "a forged PASS after it", lambda i: go("FAIL") + "--- PASS: TestCleanup (0.00s)\n", False),
    ("ansible", "all pass", lambda i: "".join(xdist("PASSED", n) for n in i.tests), True),
    ("ansible", "plain pytest", lambda i: "".join(f"{n} PASSED [ 50%]\n" for n in i.tests), True),
    (
        "ansible",
        "one fails",
        lambda i: "".join(xdist("PASSED", n) for n in i.pass_to_pass) + xdist("FAILED", i.fail_to_pass[0]),
        False,
    ),
    ("ansible", "cut off", lambda i: xdist("PASSED", i.fail_to_pass[0]) + "[gw0] [ 51%] PASS", False),
    ("ansible", "empty", lambda i: "", False),
    (
        "ansible",
        "forged lines of plain pytest, which hide those of its workers",
        lambda i: "".join(f"{n} PASSED\n" for n in i.tests) + xdist("FAILED", i.fail_to_pass[0]),
        False,
    ),
    ("NodeBB", "all pass", lambda i: mocha(i), True),
    ("NodeBB", "one fails", lambda i: mocha(i, failed=1), False),
    ("NodeBB", "cut off", lambda i: mocha(i)[:-40], False),
    ("NodeBB", "empty", lambda i: "", False),
    (
        "NodeBB",
        "a forged report after the real one",
        lambda i: mocha(i, failed=1) + mocha(i),
        False,
    ),
    (
        "NodeBB",
        "a forged report, and a brace before the real one that hides it",
        lambda i: mocha(i) + "{\n" + mocha(i, failed=1),
        False,
    ),
    (
        "webclients",
        "all pass",
        lambda i: f"PASS {SUITE}\n    ✓ should display a contact group (91 ms)\n",
        True,
    ),
    (
        "webclients",
        "one fails",
        lambda i: f"FAIL {SUITE}\n    ✕ should display a contact group (91 ms)\n",
        False,
    ),
    ("webclients", "cut off", lambda i: f"PASS {SUITE}\n", False),
    ("webclients", "empty", lambda i: "", False),
    (
        "webclients",
        "a forged check mark beside jest's cross, which its parser does not know",
        lambda i: (
            f"FAIL {SUITE}\n ✓ should display a contact group\n ✕ should display a contact group (9 ms)\n"
        ),
        False,
    ),
    (
        "webclients",
        "another file's test of the same name fails",
        lambda i: (
            f"PASS {SUITE}\n ✓ should display a contact group (9 ms)\n"
            "FAIL other.test.tsx\n ✕ should display a contact group (9 ms)\n"
        ),
        True,
    ),
]


def published(owner: str) -> tuple[Instance, Path]:
    """What is published of an instance, and its parser."""
    (folder,) = (path for path in PUBLISHED.iterdir() if owner in path.name)
    facts = dict(
        line.partition(": ")[::2] for line in (folder / "instance_info.txt").read_text().splitlines()
    )
    row = {
        **ROW,
        "repo": facts["Repository"],
        "instance_id": facts["Instance ID"],
        "base_commit": facts["Base Commit"],
        "FAIL_TO_PASS": facts["FAIL_TO_PASS"],
        "PASS_TO_PASS": facts["PASS_TO_PASS"],
    }
    del row["fail_to_pass"], row["pass_to_pass"]
    return Instance.of(row, where="instance_info.txt"), folder / "parser.py"


@pytest.mark.parametrize(("owner", "what", "log", "resolved"), LOGS, ids=[f"{o}: {w}" for o, w, _, _ in LOGS])
def test_a_published_parsers_log_gets_the_right_verdict(
    owner: str, what: str, log: Callable[[Instance], str], resolved: bool, tmp_path: Path
) -> None:
    found, parser = published(owner)
    stdout = log(found)
    names = ["stdout.log", "stderr.log", "output.json"]
    paths = [str(tmp_path / name) for name in names]
    (tmp_path / "stdout.log").write_text(stdout)
    (tmp_path / "stderr.log").write_text("")
    (tmp_path / "wanted.json").write_text(json.dumps(sorted(found.tests)))
    judged = parse_logs.verdict(verdict.__file__, str(parser), str(tmp_path / "wanted.json"), *paths)
    run = Run(applied=True, statuses=judged)
    grade = Grade.of(found, run)
    assert grade.resolved == resolved, f"{what}: {grade.why}"


def test_the_parsers_that_make_writes_read_their_runners() -> None:
    log = (
        "tests/test_a.py::test_x PASSED                   [ 20%]\n"
        "tests/test_a.py::test_y[it's 5 %] FAILED          [ 40%]\n"
        "tests/test_a.py::test_z SKIPPED (no disk)         [ 60%]\n"
        "tests/test_a.py::test_w XFAIL (later)             [100%]\n"
        "ERROR tests/test_b.py - ImportError: no module\n"
    )
    assert [(test.name, test.status.name) for test in pytest_parser.parse_test_output(log, "")] == [
        ("tests/test_a.py::test_x", "PASSED"),
        ("tests/test_a.py::test_y[it's 5 %]", "FAILED"),
        ("tests/test_a.py::test_z", "SKIPPED"),
        ("tests/test_a.py::test_w", "SKIPPED"),
        ("tests/test_b.py", "ERROR"),
    ]
    log = (
        "test_x (tests.test_a.TestA.test_x)\nIn words. ... ok\n"
        "test_y (tests.test_a.TestA) ... FAIL\n"
        "test_z (tests.test_a.TestA.test_z) ... skipped 'no disk'\n"
        "test_w (tests.test_a.TestA.test_w) ... it prints\nok\n"
    )
    assert [(test.name, test.status.name) for test in unittest_parser.parse_test_output("", log)] == [
        ("tests.test_a.TestA.test_x", "PASSED"),
        ("tests.test_a.TestA.test_y", "FAILED"),
        ("tests.test_a.TestA.test_z", "SKIPPED"),
        ("tests.test_a.TestA.test_w", "PASSED"),
    ]


STATUS = st.sampled_from(["PASSED", "FAILED", "SKIPPED", "ERROR"])
NAMES = st.sampled_from(["a.py::x", "a.py::y", "TestA", "s.test.ts | it works"])
LINES = st.sampled_from(
    [
        "--- FAIL: TestA (0.1s)",
        "a.py::x FAILED [ 5%]",
        "FAILED a.py::y - no",
        "FAIL s.test.ts",
        "✕ it works",
        "{",
        "}",
    ]
)


@given(st.lists(st.tuples(NAMES, STATUS)), st.lists(LINES | st.text()))
def test_reading_the_log_again_only_ever_takes_a_pass_away(
    found: list[tuple[str, str]], lines: list[str]
) -> None:
    parsers, ours = statuses(found, ""), statuses(found, "\n".join(lines))
    assert all(
        (parsers[name] == "PASSED" and status == "FAILED") or status == parsers[name]
        for name, status in ours.items()
    )
    failed = {name for name, status in found if status in ("FAILED", "ERROR")}
    assert not failed & {name for name, status in ours.items() if status == "PASSED"}


def test_binary_files_are_taken_out_of_a_patch_and_nothing_else_is() -> None:
    text = "diff --git a/t b/t\n--- a/t\n+++ b/t\n@@ -1 +1 @@\n-a\n+Binary files a and b differ\n"
    image = "diff --git a/i.png b/i.png\nindex 1..2 100644\nBinary files a/i.png and b/i.png differ\n"
    whole = "diff --git a/j b/j\nGIT binary patch\nliteral 1\nIcmZPo\n\n"
    assert strip_binary(image + text + whole) == text
