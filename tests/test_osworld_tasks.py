"""Published OSWorld tasks: how they are read, filled in, judged, and told apart by where they can run.

The machine here is a folder and this computer's programs: files and commands are real, the screen is words.
"""

from __future__ import annotations

import asyncio
import json
import sqlite3
import subprocess
from collections.abc import AsyncIterator, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import openpyxl
import osworld_metrics  # noqa: F401  # adds two
import pytest
from PIL import Image
from rz_agent.cli import app
from rz_agent.envs.failure import InfraFailure
from rz_agent.envs.osworld.evaluator import Verdict, conjoined, ends, evaluate
from rz_agent.envs.osworld.feasibility import OSWORLD_VM, Capabilities, feasibility
from rz_agent.envs.osworld.getters import GETTERS, Place
from rz_agent.envs.osworld.judge import Judge
from rz_agent.envs.osworld.machine import Executed, InputEvent
from rz_agent.envs.osworld.placeholders import fill
from rz_agent.envs.osworld.registry import Registry
from rz_agent.envs.osworld.task_file import OsworldTask, Step, parse_task, read_task, read_tasks
from rz_agent.envs.osworld.tasks import SHIPPED
from rz_agent.errors import ConfigError, EnvironmentBug
from rz_agent.sandboxes.errors import Died
from typer.testing import CliRunner

ROWS = Path(__file__).parent / "data" / "osworld" / "nemo_gym_example.jsonl"
RENAME = SHIPPED / "os__e0df059f-28a6-4169-924f-b9623e7184cc.json"
TREE = """<desktop-frame xmlns:st="https://accessibility.ubuntu.example.org/ns/state">
<application name="Chromium"><entry name="Address and search bar">chrome://settings</entry></application>
<application name="gnome-terminal-server"><terminal>old</terminal><terminal st:focused="true">$ stty size
43 132
</terminal><terminal>other</terminal></application></desktop-frame>"""


class FolderMachine:
    """See `machine.Machine`: its home is a folder of the test."""

    width, height, password = 1280, 801, "secret"

    def __init__(self, folder: Path) -> None:
        self.folder, self.home = folder, str(folder)
        self.tree = TREE

    async def execute(
        self, command: str | Sequence[str], *, shell: bool = False, timeout_s: float = 120
    ) -> Executed:
        argv = command if shell or not isinstance(command, str) else command.split()
        ended = await asyncio.to_thread(
            subprocess.run, argv, shell=shell, capture_output=True, text=True, cwd=self.home, check=False
        )
        return Executed(ended.stdout, ended.stderr, ended.returncode)

    async def launch(self, command: str | Sequence[str], *, shell: bool = False) -> None:
        raise NotImplementedError

    async def read(self, path: str) -> bytes:
        return (self.folder / path).read_bytes()

    async def write(self, path: str, data: bytes) -> None:
        (self.folder / path).parent.mkdir(parents=True, exist_ok=True)
        (self.folder / path).write_bytes(data)

    async def screenshot(self) -> bytes:
        return b""

    async def accessibility_tree(self) -> str:
        return self.tree

    async def window_titles(self) -> list[str]:
        return []

    async def activate_window(self, name: str, *, strict: bool = False, by_class: bool = False) -> bool:
        return False

    async def close_window(self, name: str, *, strict: bool = False, by_class: bool = False) -> bool:
        return False

    async def window_size(self, window_class: str) -> tuple[int, int]:
        if window_class != "vlc":
            raise LookupError(window_class)
        return 1280, 801

    async def perform(self, events: Sequence[InputEvent]) -> None:
        raise NotImplementedError


@pytest.fixture
def machine(tmp_path: Path) -> FolderMachine:
    folder = tmp_path / "home"
    folder.mkdir()
    return FolderMachine(folder)


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
async def judge(anyio_backend: str) -> AsyncIterator[Judge]:
    judge = Judge()
    yield judge
    await judge.aclose()


@pytest.fixture
def place(machine: FolderMachine, judge: Judge, tmp_path: Path) -> Place:
    folder, downloads = tmp_path / "episode", tmp_path / "downloads"
    return Place(machine=machine, folder=folder, judge=judge, downloads=downloads)


async def no_steps(steps: Sequence[Step], place: Place) -> None:
    """A task without a postconfig, or one that is not looked at."""


def judged(evaluator: dict[str, Any]) -> OsworldTask:
    """A task with this evaluator."""
    return parse_task({"id": "t", "instruction": "Do it.", "evaluator": evaluator}, "os", "t.json")


def says(*words: str, conj: str = "and") -> OsworldTask:
    """A task with an exact_match of "yes" for each word that a command says."""
    return judged(
        {
            "func": ["exact_match"] * len(words),
            "conj": conj,
            "result": [{"type": "vm_command_line", "command": ["printf", word]} for word in words],
            "expected": [{"type": "rule", "rules": {"expected": "yes"}}] * len(words),
        }
    )


async def verdict(task: OsworldTask, place: Place, last_action: str = "DONE") -> Verdict:
    return await evaluate(task, place, last_action=last_action, run_steps=no_steps)


# --- task files ---------------------------------------------------------------------------------------------


def test_every_published_task_of_both_forms_is_read() -> None:
    tasks = {task.id: task for task in (*read_tasks(ROWS), *read_tasks(SHIPPED))}
    assert len(tasks) == 37
    assert sum(task.evaluator.infeasible for task in tasks.values()) == 6
    domains = {"chrome", "gimp", "libreoffice_calc", "libreoffice_impress", "libreoffice_writer"}
    assert {task.domain for task in tasks.values()} == domains | {"multi_apps", "os", "vlc", "vs_code"}


def test_a_task_keeps_what_its_file_says() -> None:
    task = read_task(SHIPPED / "os__3ce045a0-877b-42aa-8d2c-b4a863336ab8.json")
    first, second = task.evaluator.checks
    assert (task.domain, task.snapshot, task.related_apps, task.proxy) == ("os", "os", ("os",), False)
    assert task.evaluator.conjunction == "or"
    assert (first.metric, first.result.type, second.result.config["shell"]) == (
        "check_include_exclude",
        "vm_command_line",
        True,
    )
    assert first.expected is not None
    assert first.expected.config["rules"]["include"] == ["Large text enabled"]
    assert [step.type for step in task.config] == ["execute"]
    assert task.metadata == {"trajectory": "trajectories/", "fixed_ip": False}


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"instruction": ""}, ["t.json: instruction = ''"]),
        ({"id": None}, ["t.json: id = None"]),
        ({"evaluator": {"func": "exact_match", "reslt": {}}}, ["evaluator.reslt", "Did you mean 'result'?"]),
        ({"evaluator": {"func": "exact_match"}}, ["t.json: evaluator", "needs a result"]),
        (
            {"evaluator": {"func": ["a", "b"], "result": [{"type": "x"}]}},
            ["func has 2 entries, result has 1"],
        ),
        (
            {"evaluator": {"func": "a", "result": [{"type": "x"}]}},
            ["must be a list exactly where func is one"],
        ),
        ({"evaluator": {"func": ["infeasible", "a"], "result": [None, {"type": "x"}]}}, ["stands alone"]),
        ({"evaluator": {"func": "a", "result": {"type": "x"}, "conj": "xor"}}, ["evaluator.conj = 'xor'"]),
        ({"config": [{"type": "sleep", "params": {}}]}, ["config.0.params", "Did you mean 'parameters'?"]),
    ],
)
def test_a_wrong_task_is_refused_with_file_field_and_remedy(change: dict[str, Any], told: list[str]) -> None:
    good = {"id": "t", "instruction": "Do it.", "evaluator": {"func": "infeasible"}}
    with pytest.raises(ConfigError) as error:
        parse_task({**good, **change}, "os", "t.json")
    assert all(part in str(error.value) for part in told), str(error.value)


def test_a_file_that_is_no_task_is_named_with_its_line(tmp_path: Path) -> None:
    rows = ROWS.read_text().splitlines()
    (tmp_path / "rows.jsonl").write_text(f"{rows[0]}\n{rows[1][:50]}\n")
    with pytest.raises(ConfigError, match=r"rows\.jsonl:2"):
        read_tasks(tmp_path / "rows.jsonl")
    with pytest.raises(ConfigError, match="has no task"):
        read_tasks(tmp_path / "nowhere")
    (tmp_path / "twice.jsonl").write_text(f"{rows[0]}\n{rows[0]}\n")
    with pytest.raises(ConfigError, match="is met twice"):
        read_tasks(tmp_path / "twice.jsonl")


# --- placeholders -------------------------------------------------------------------------------------------


def test_placeholders_are_filled_at_any_depth_and_other_braces_stay(machine: FolderMachine) -> None:
    given = {
        "command": ["echo {CLIENT_PASSWORD} | sudo -S x", "({SCREEN_WIDTH_HALF}, {SCREEN_HEIGHT_HALF})"],
        "files": [{"path": "/home/user/Desktop/a.png"}],
        "kept": ["awk '{print $1}'", "{SCREEN}", "/home/user2", "/mnt/home/user", 3, None],
        "size": "{SCREEN_WIDTH}x{SCREEN_HEIGHT}",
    }
    assert fill(given, machine) == {
        "command": ["echo secret | sudo -S x", "(640, 400)"],
        "files": [{"path": f"{machine.home}/Desktop/a.png"}],
        "kept": given["kept"],
        "size": "1280x801",
    }


# --- the evaluator ------------------------------------------------------------------------------------------


@pytest.mark.anyio
async def test_a_published_task_is_scored_by_what_the_machine_holds(
    place: Place, machine: FolderMachine
) -> None:
    task = judged(json.loads(RENAME.read_text().replace("~", "/home/user"))["evaluator"])
    assert (await verdict(task, place)).score == 0.0
    (machine.folder / "Desktop" / "todo_list_Jan_2").mkdir(parents=True)
    assert (await verdict(task, place)).score == 1.0


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("words", "conj", "right", "made"),
    [
        (("yes", "yes"), "and", 1.0, 2),
        (("no", "yes"), "and", 0.0, 1),
        (("yes", "no"), "and", 0.0, 2),
        (("yes", "no"), "or", 1.0, 1),
        (("no", "yes", "yes"), "or", 1.0, 2),
        (("no", "no"), "or", 0.0, 2),
    ],
)
async def test_a_check_that_settles_the_matter_is_the_last(
    place: Place, words: tuple[str, ...], conj: str, right: float, made: int
) -> None:
    found = await verdict(says(*words, conj=conj), place)
    assert (found.score, len(found.checks)) == (right, made)
    assert found.as_info() == json.loads(json.dumps(found.as_info()))


def test_partial_scores_are_averaged_by_and_and_the_best_counts_with_or() -> None:
    assert conjoined("and", [1.0, 0.5]) == 0.75
    assert conjoined("or", [0.25, 0.5]) == 0.5
    assert not ends("and", 0.5)
    assert not ends("or", 0.5)


@pytest.mark.anyio
async def test_fail_is_the_right_answer_to_an_infeasible_task_and_a_wrong_one_to_any_other(
    place: Place,
) -> None:
    infeasible = judged({"func": "infeasible"})
    scores = [(await verdict(infeasible, place, action)).score for action in ("FAIL", "DONE", "WAIT")]
    assert scores == [1.0, 0.0, 0.0]
    assert (await verdict(says("yes"), place, "FAIL")).score == 0.0


@pytest.mark.anyio
async def test_the_postconfig_runs_before_anything_is_looked_at(place: Place, machine: FolderMachine) -> None:
    async def save(steps: Sequence[Step], place: Place) -> None:
        assert [step.type for step in steps] == ["sleep"]
        await place.machine.write("a.json", b'{"a": 1}')

    evaluator = {
        "func": "check_json_settings",
        "result": {"type": "vm_file", "path": "/home/user/a.json", "dest": "a.json"},
        "expected": {"type": "rule", "rules": {"expected": {"a": 1}}},
    }
    assert (await verdict(judged(evaluator), place)).score == 0.0
    late = judged({**evaluator, "postconfig": [{"type": "sleep", "parameters": {"seconds": 1}}]})
    assert (await evaluate(late, place, last_action="DONE", run_steps=save)).score == 1.0


@pytest.mark.anyio
@pytest.mark.parametrize(("content", "why"), [(None, "there is no such file"), (b"PK\3\4", "cannot be read")])
async def test_what_the_agent_left_missing_or_damaged_scores_0_with_the_reason(
    place: Place, machine: FolderMachine, content: bytes | None, why: str
) -> None:
    if content is not None:
        await machine.write("a.xlsx", content)
    evaluator = {
        "func": "compare_table",
        "result": {"type": "vm_file", "path": "a.xlsx", "dest": "a.xlsx"},
        "options": {"rules": [{"type": "zoom", "sheet_idx": 0, "method": "eq", "ref": 100.0}]},
    }
    found = await verdict(judged(evaluator), place)
    assert found.score == 0.0
    assert why in found.checks[0].why


URL = "https://example.org/golds/my%20gold.png"


def brightness(expected: dict[str, Any]) -> OsworldTask:
    result = {"type": "vm_file", "path": "Desktop/dark.png", "dest": "dark.png"}
    name = "check_brightness_decrease_and_structure_sim"
    return judged({"func": name, "result": result, "expected": expected})


@pytest.mark.anyio
async def test_a_cloud_file_is_taken_from_the_downloads_and_its_absence_or_damage_masks(
    place: Place, machine: FolderMachine, tmp_path: Path
) -> None:
    (machine.folder / "Desktop").mkdir()
    Image.new("RGB", (20, 20), (90, 90, 90)).save(machine.folder / "Desktop" / "dark.png")
    task = brightness({"type": "cloud_file", "path": URL, "dest": "gold.png"})
    with pytest.raises(InfraFailure, match="not among the downloads"):
        await verdict(task, place)
    gold = tmp_path / "downloads" / "example.org" / "golds" / "my gold.png"
    gold.parent.mkdir(parents=True)
    gold.write_bytes(b"half a file")
    with pytest.raises(InfraFailure, match="expected file cannot be read"):
        await verdict(task, place)
    Image.new("RGB", (20, 20), (180, 180, 180)).save(gold)
    assert (await verdict(task, place)).score == 1.0


@pytest.mark.anyio
async def test_an_original_that_the_agent_has_damaged_on_the_machine_scores_0(
    place: Place, machine: FolderMachine
) -> None:
    (machine.folder / "Desktop").mkdir()
    Image.new("RGB", (20, 20)).save(machine.folder / "Desktop" / "dark.png")
    await machine.write("Desktop/original.png", b"half a file")
    task = brightness({"type": "vm_file", "path": "Desktop/original.png", "dest": "original.png"})
    assert (await verdict(task, place)).score == 0.0


class DyingMachine(FolderMachine):
    async def execute(self, *args: Any, **kwargs: Any) -> Executed:
        raise Died("the desktop is gone", provider="desktop", sandbox_id="d-1", cause="lost")


@pytest.mark.anyio
async def test_a_machine_that_dies_masks_the_episode(place: Place, tmp_path: Path) -> None:
    dying = replace(place, machine=DyingMachine(tmp_path))
    with pytest.raises(Died):
        await verdict(says("yes"), dying)


@pytest.mark.anyio
async def test_a_metric_of_somebody_elses_is_found_by_its_name_and_told_when_nobody_added_it(
    place: Place,
) -> None:
    evaluator = {"func": "test_is_long", "result": {"type": "vm_command_line", "command": ["printf", "long"]}}
    assert (await verdict(judged({**evaluator, "options": {"at_least": 4}}), place)).score == 1.0
    assert (await verdict(judged({**evaluator, "options": {"at_least": 5}}), place)).score == 0.0
    with pytest.raises(ConfigError, match="Did you mean 'test_is_long'"):
        await verdict(judged({**evaluator, "func": "test_is_longe"}), place)


def test_a_name_means_one_function() -> None:
    registry: Registry[Any] = Registry("metric")
    registry.add("same")(len)
    registry.add("same")(len)
    with pytest.raises(ConfigError, match=r"is taken by builtins\.len"):
        registry.add("same")(repr)


@pytest.mark.anyio
async def test_a_metric_that_gives_no_score_is_no_reward(place: Place) -> None:
    task = judged({"func": "test_half_a_dozen", "result": {"type": "vm_screen_size"}})
    with pytest.raises(EnvironmentBug, match="gave 6"):
        await verdict(task, place)


# --- getters ------------------------------------------------------------------------------------------------


def content(path: str | None) -> str | None:
    return path and Path(path).read_text()


async def got(place: Place, type: str, **config: Any) -> Any:
    return await GETTERS[type](place, config)


@pytest.mark.anyio
async def test_files_are_fetched_one_or_several_by_what_gives_selects(
    place: Place, machine: FolderMachine
) -> None:
    await machine.write("a.txt", b"A")
    await machine.write("b.txt", b"B")
    one = await got(place, "vm_file", path="a.txt", dest="kept.txt")
    assert content(one) == "A"
    several: dict[str, Any] = {"path": ["a.txt", "b.txt", "c.txt"], "dest": ["1", "2", "3"], "multi": True}
    assert Path(await got(place, "vm_file", **several)).name == "1"
    selected = await got(place, "vm_file", **several, gives=[1, 2])
    assert [content(path) for path in selected] == ["B", None]
    with pytest.raises(FileNotFoundError):
        await got(place, "vm_file", path="c.txt", dest="c.txt")
    with pytest.raises(FileNotFoundError):
        await got(place, "vm_file", **several, gives=[2])
    timed = await got(place, "vm_file", path="a.txt", dest="a.txt", time_suffix=True, time_format="%Y")
    assert Path(timed).name.startswith("a_2")
    assert await got(place, "cache_file", path="kept.txt") == one
    with pytest.raises(ValueError, match="leads out"):
        await got(place, "vm_file", path="a.txt", dest="../a.txt")


@pytest.mark.anyio
async def test_the_last_row_of_a_workbook_is_read_as_text(place: Place, machine: FolderMachine) -> None:
    book = openpyxl.Workbook()
    for row in (["Name", "Year"], ["Ann", 2023], [None, None]):
        book.active.append(row)
    book.save(machine.folder / "book.xlsx")
    asked = {"path": "/home/user/book.xlsx", "file_type": "xlsx", "file_content": "last_row"}
    assert await got(place, "content_from_vm_file", **fill(asked, machine)) == ["Ann", "2023"]
    with pytest.raises(ConfigError, match="file_content"):
        await got(place, "content_from_vm_file", path="book.xlsx", file_type="xlsx", file_content="first_row")


@pytest.mark.anyio
async def test_commands_say_what_they_write(place: Place, machine: FolderMachine) -> None:
    (machine.folder / "a b").mkdir()
    assert await got(place, "vm_command_line", command="echo out; echo err >&2", shell=True) == "out\n"
    assert await got(place, "vm_command_error", command="echo out; echo err >&2", shell=True) == "err\n"
    listed = await got(place, "list_directory", path=machine.home)
    assert listed["children"] == [{"name": "a b"}]
    with pytest.raises(FileNotFoundError):
        await got(place, "list_directory", path="nowhere")
    await machine.write("bin/xdg-mime", b"#!/bin/sh\ncase $3 in video/mp4) ;; *) echo vlc.desktop ;; esac\n")
    (machine.folder / "bin" / "xdg-mime").chmod(0o755)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", f"{machine.home}/bin", prepend=":")
        assert await got(place, "default_video_player") == "vlc.desktop"


@pytest.mark.anyio
async def test_the_screen_is_read_through_its_windows_and_its_accessibility_tree(
    place: Place, machine: FolderMachine
) -> None:
    assert await got(place, "vm_screen_size") == await got(place, "vm_window_size", app_class_name="vlc")
    assert await got(place, "vm_window_size", app_class_name="gimp") is None
    assert await got(place, "vm_terminal_output") == "$ stty size\n43 132"
    assert await got(place, "active_url_from_accessTree", goto_prefix="") == "chrome://settings"
    assert await got(place, "accessibility_tree") == TREE
    machine.tree = "<desktop-frame/>"
    assert await got(place, "vm_terminal_output") is None
    assert await got(place, "active_url_from_accessTree") is None


@pytest.mark.anyio
async def test_a_browsers_settings_are_those_of_its_profile_or_the_defaults(
    place: Place, machine: FolderMachine
) -> None:
    names = (
        "default_search_engine",
        "enable_enhanced_safety_browsing",
        "chrome_language",
        "new_startup_page",
    )
    assert [await got(place, name) for name in names] == ["Google", "false", "en-US", "true"]
    settings = {
        "default_search_provider_data": {"template_url_data": {"short_name": "Microsoft Bing"}},
        "safebrowsing": {"enhanced": True},
        "webkit": {"webprefs": {"default_font_size": 24}},
        "session": {"restore_on_startup": 1},
        "extensions": {"settings": {"a": {"path": "/x", "manifest": {"name": "X"}}, "b": {}}},
    }
    await machine.write(".config/chromium/Default/Preferences", json.dumps(settings).encode())
    await machine.write(".config/chromium/Local State", b'{"intl": {"app_locale": "ko"}}')
    assert [await got(place, name) for name in names] == ["Microsoft Bing", "true", "ko", "false"]
    assert (await got(place, "chrome_font_size"))["default_font_size"] == 24
    assert await got(place, "find_installed_extension_name") == ["X"]
    await machine.write(".config/google-chrome/Default/Preferences", b'{"webkit": 1, "extensions": []}')
    assert (await got(place, "chrome_font_size"))["default_font_size"] == 16
    assert await got(place, "find_unpacked_extension_path") == []


@pytest.mark.anyio
async def test_history_and_bookmarks_are_read_and_no_database_is_no_file(
    place: Place, machine: FolderMachine
) -> None:
    profile = machine.folder / ".config" / "chromium" / "Default"
    profile.mkdir(parents=True)
    with closing(sqlite3.connect(profile / "History")) as database:
        database.execute("CREATE TABLE urls (url, title, last_visit_time)")
        database.execute("INSERT INTO urls VALUES ('https://a.org', 'A', 1)")
        database.commit()
    assert await got(place, "history", dest="history") == [["https://a.org", "A", 1]]
    await machine.write(".config/chromium/Default/Cookies", b"no database")
    with pytest.raises(FileNotFoundError):
        await got(place, "cookie_data", dest="cookies")
    await machine.write(
        ".config/chromium/Default/Bookmarks", b'{"roots": {"bookmark_bar": {"children": []}}}'
    )
    assert await got(place, "bookmarks") == {"bookmark_bar": {"children": []}}


@pytest.mark.anyio
async def test_programs_settings_are_read_from_where_they_keep_them(
    place: Place, machine: FolderMachine
) -> None:
    with pytest.raises(FileNotFoundError):
        await got(place, "vlc_config", dest="vlcrc")
    await machine.write(".config/vlc/vlcrc", b"qt-bgcone=0")
    await machine.write(".config/GIMP/2.10/gimprc", b"(theme x)")
    await machine.write("Desktop/a.desktop", b"Name=A\n")
    assert content(await got(place, "vlc_config", dest="vlcrc")) == "qt-bgcone=0"
    assert content(await got(place, "gimp_config_file", file_name="gimprc", dest="g")) == "(theme x)"
    assert await got(place, "shortcuts_on_desktop") == {"a.desktop": "Name=A\n"}


# --- where a task can run -----------------------------------------------------------------------------------

DEBIAN = Capabilities(
    backend="desktop",
    has_program=lambda name: name != "code",
    has_schema=lambda name: name != "org.gnome.shell",
)


def reasons(name: str, backend: Capabilities = DEBIAN, downloads: Path | None = None) -> tuple[str, ...]:
    task = next(task for task in (*read_tasks(SHIPPED), *read_tasks(ROWS)) if task.id.startswith(name))
    (row,) = feasibility([task], [backend], downloads=downloads)
    assert row.feasible == (not row.reasons)
    return row.reasons


def test_a_task_runs_where_all_it_needs_is_and_else_says_what_is_missing() -> None:
    assert reasons("e0df059f") == ()
    assert reasons("276cc624") == ("needs code (Visual Studio Code, which is not in Debian)",)
    assert reasons("ec4e3f68") == ("needs the settings org.gnome.shell (apt-get install gnome-shell-common)",)
    assert reasons("b6781586") == ("needs a running systemd",)
    assert reasons("94d95f96") == ("needs the network",)
    assert [reason.partition(": ")[0] for reason in reasons("0810415c")] == ["needs a download"] * 3
    assert reasons("276cc624", OSWORLD_VM) == ()


def test_a_download_that_is_there_is_no_longer_missing(tmp_path: Path) -> None:
    (missing,) = reasons("357ef137", downloads=tmp_path)
    url = missing.removeprefix("needs a download: https://")
    (tmp_path / url).parent.mkdir(parents=True)
    (tmp_path / url).write_bytes(b"")
    assert reasons("357ef137", downloads=tmp_path) == ()


def test_unknown_steps_getters_and_metrics_are_named_on_every_backend() -> None:
    task = parse_task(
        {
            "id": "t",
            "instruction": "Do it.",
            "config": [{"type": "beam"}],
            "evaluator": {"func": "guess", "result": {"type": "vm_soul"}},
        },
        "os",
        "t.json",
    )
    rows = feasibility([task], [DEBIAN, OSWORLD_VM])
    login = parse_task(
        {
            "id": "l",
            "instruction": "Do it.",
            "config": [{"type": "login"}],
            "evaluator": {"func": "infeasible"},
        },
        "os",
        "l.json",
    )
    assert feasibility([login], [OSWORLD_VM])[0].reasons == ("needs an account of a website",)
    told = ("unknown step beam", "unknown metric guess", "unknown getter vm_soul")
    assert [row.reasons for row in rows] == [told, told]


def test_every_published_task_here_has_known_steps_getters_and_metrics() -> None:
    rows = feasibility([*read_tasks(SHIPPED), *read_tasks(ROWS)], [OSWORLD_VM])
    assert {reason.partition(":")[0] for row in rows for reason in row.reasons} == {"needs a download"}


def test_the_list_says_for_every_task_and_backend_whether_it_runs_there_or_why_not() -> None:
    said = CliRunner().invoke(app, ["env", "osworld", "list", "--feasible"]).output.splitlines()
    rows = {(task[:8], backend): words for task, backend, words in (line.split(None, 2) for line in said)}
    assert len(rows) == 3 * len(read_tasks(SHIPPED))
    assert rows["e0df059f", "e2b"] == rows["e0df059f", "http"] == "runs"
    assert rows["94d95f96", "e2b"] == "needs the network"
    assert rows["357ef137", "desktop"].startswith("needs a download: https://")
