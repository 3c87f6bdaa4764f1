"""The `[sandbox]` table, how a provider is found by name, and the breaker on infrastructure failures."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rz_agent.errors import ConfigError, RunStopped
from rz_agent.recipes.recipe import parse
from rz_agent.sandboxes.config import SandboxConfig
from rz_agent.sandboxes.inside.output import Kept
from rz_agent.sandboxes.inside.wire import pack, take
from rz_agent.sandboxes.local.bubblewrap import outermost
from rz_agent.sandboxes.local.provider import LocalProvider
from rz_agent.sandboxes.pool import InfraBreaker
from rz_agent.sandboxes.provider import Provider
from rz_agent.sandboxes.registry import make_provider, provider_names
from rz_agent.sandboxes.secret import Secret

WHOLE = """
provider = "local"
shared = 2
lifetime_s = 1800
scoring_buffer_s = 60
max_live = 16
max_starting = 4
creates_per_s = 2.5
warm = 3
on_infra_failure = "retry"
infra_failed_share = 0.1
[limits]
memory_mb = 256
pids = 32
disk_mb = 16
cpu_s = 60
open_files = 64
timeout_s = 5
output_bytes = 4096
flood_bytes = 1000000
[total]
memory_mb = 2048
pids = 1024
cpus = 1.5
[network]
mode = "open"
[env]
WORD = "there"
[local]
isolation = "namespaces"
python = "/usr/bin/python3"
read_only = ["/usr"]
preload = ["math"]
[docker]
host = "unix:///run/podman/podman.sock"
[e2b]
api_key = { file = "~/.e2b" }
[desktop]
size = [1920, 1080]
"""


def test_every_key_of_the_table_reaches_the_spec() -> None:
    config = SandboxConfig.load(tomllib.loads(WHOLE), source="r.toml")
    spec = config.spec({"rz.run": "r"})
    assert (spec.limits.memory_mb, spec.limits.pids, spec.limits.timeout_s) == (256, 32, 5)
    assert (spec.total.memory_mb, spec.total.cpus, spec.network) == (2048, 1.5, "open")
    assert (spec.lifetime_s, spec.env) == (1800, {"WORD": "there"})
    assert spec.labels == {"rz.run": "r"}
    assert set(config.model_fields_set) == set(SandboxConfig.model_fields) - {"options"}


@pytest.mark.parametrize(
    ("table", "key", "words"),
    [
        ({"shard": 2}, "sandbox.shard", "Known keys: provider, shared"),
        ({"limits": {"memory": 2}}, "sandbox.limits.memory", "Known keys: memory_mb"),
        ({"limits": {"cpus": 1.0}}, "sandbox.limits.cpus", "Known keys: memory_mb"),
        ({"docker": {"images": "x"}}, "sandbox.docker.images", "Known keys: host, image"),
        ({"network": {"mode": "some"}}, "sandbox.network.mode", "Use 'none' or 'open'."),
        ({"max_live": 4, "warm": 4}, "sandbox.max_live", "shared + warm = 5"),
        ({"local": {"isolation": "landlock"}}, "sandbox.local.isolation", "'namespaces' or 'none'"),
        ({"shared": 0}, "sandbox.shared", "Use a number greater than or equal to 1."),
        ({"limits": 5}, "sandbox.limits", "is not a table.\n  Write a table: [sandbox.limits]."),
        ({"limits": {"pids": "many"}}, "sandbox.limits.pids", "is not a whole number"),
        ({"shared": True}, "sandbox.shared", "is not a whole number"),
        ({"limits": {"timeout_s": "10"}}, "sandbox.limits.timeout_s", "is not a number"),
        ({"e2b": {"api_key": "sk"}}, "sandbox.e2b.api_key", 'Write api_key = { env = "NAME" }'),
        ({"env": {"A": 1}}, "sandbox.env.A", "Write text in quotes."),
        ({"desktop": {"size": "big"}}, "sandbox.desktop.size", "Write an [array]."),
        ({"infra_failed_share": 2}, "sandbox.infra_failed_share", "less than or equal to 1"),
        ({"total": {"memory_mb": 256}}, "sandbox.limits.memory_mb", "total.memory_mb = 256: raise that"),
        ({"limits": {"disk_mb": 2048}}, "sandbox.limits.disk_mb", "raise total.memory_mb to 8256"),
        ({"limits": {"cpu_s": 1 << 70}}, "sandbox.limits.cpu_s", "less than or equal to"),
        ({"limits": {"output_bytes": 1 << 30}}, "sandbox.limits.output_bytes", "less than or equal to"),
        ({"total": {"pids": 9_999_999}}, "sandbox.total.pids", "less than or equal to"),
        ({"total": {"cpus": 0.001}}, "sandbox.total.cpus", "greater than or equal to 0.01"),
        ({"env": {"A=B": "1"}}, "sandbox.env", 'a name without "="'),
        ({"env": {"A": "\0"}}, "sandbox.env", "no NUL"),
        ({"docker": {"volumes": {"data": "/data"}}}, "sandbox.docker.volumes.data.[key]", "absolute paths"),
    ],
)
def test_a_wrong_key_is_refused_with_its_name_and_a_remedy(
    table: dict[str, Any], key: str, words: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        SandboxConfig.load(table, source="r.toml")
    assert caught.value.key == key
    assert str(caught.value).startswith(f"r.toml: {key} = ")
    assert words in str(caught.value)


KEY = "sk-0123456789"


@pytest.mark.parametrize("table", [{"api_key": KEY}, {"api_key": {"value": KEY}}, {"api_key": [KEY]}])
def test_a_key_written_where_its_place_belongs_is_refused_and_not_shown(table: dict[str, Any]) -> None:
    for refused in (
        lambda: SandboxConfig.load({"e2b": table}, source="r.toml"),
        lambda: parse({"sandbox": {"e2b": table}}, "r.toml"),
    ):
        with pytest.raises(ConfigError) as caught:
            refused()
        assert "sandbox.e2b.api_key" in str(caught.value)
        assert KEY not in str(caught.value)


@pytest.mark.parametrize(
    "table",
    [{"e2b": {"apikey": KEY}}, {"options": {"api_key": KEY}}, {"hf_token": KEY}, {"env": {"TOKEN": [KEY]}}],
)
def test_a_key_written_where_nobody_reads_it_is_refused_and_not_shown(table: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as caught:
        SandboxConfig.load(table, source="r.toml")
    assert KEY not in str(caught.value)


def test_a_recipe_keeps_the_place_of_a_secret_and_never_the_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RZ_TEST_KEY", KEY)
    recipe = parse({"sandbox": {"e2b": {"api_key": {"env": "RZ_TEST_KEY"}}}}, "r.toml")
    assert recipe.sandbox.e2b.api_key.read(source="r.toml", key="sandbox.e2b.api_key") == KEY
    assert 'env = "RZ_TEST_KEY"' in recipe.toml()
    for text in (recipe.toml(), repr(recipe), str(recipe.sandbox.spec())):
        assert KEY not in text


def test_an_empty_secret_is_refused_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RZ_TEST_KEY", raising=False)
    with pytest.raises(ConfigError, match="export RZ_TEST_KEY="):
        Secret(env="RZ_TEST_KEY").read(source="r.toml", key="sandbox.e2b.api_key")
    with pytest.raises(ConfigError, match="one of the two"):
        SandboxConfig.load({"e2b": {"api_key": {"env": "A", "file": "b"}}}, source="r.toml")


def test_a_life_too_short_for_an_episode_and_its_scoring_is_refused_when_the_recipe_is_read() -> None:
    tables: dict[str, dict[str, float]] = {
        "rollout": {"episode_deadline_s": 1000.0},
        "sandbox": {"lifetime_s": 1299, "scoring_buffer_s": 240},
    }
    with pytest.raises(ConfigError) as caught:
        parse(tables, "r.toml")
    assert str(caught.value).startswith(
        "r.toml: sandbox.lifetime_s = 1299.0 is shorter than rollout.episode_deadline_s + "
        "sandbox.scoring_buffer_s + 60 s to start = 1300"
    )
    assert "Use at least 1300" in caught.value.remedy
    tables["sandbox"]["lifetime_s"] = 1300
    parse(tables, "r.toml")


class Elsewhere(LocalProvider):
    """A provider of another package, as a plug-in would bring it."""

    name = "elsewhere"

    def __init__(self, config: SandboxConfig) -> None:
        super().__init__(config.local)


def test_a_provider_is_found_by_short_name_and_by_module_and_class() -> None:
    local: Provider = make_provider(SandboxConfig())
    assert local.name == "local"
    other = make_provider(SandboxConfig(provider=f"{__name__}:Elsewhere"))
    assert other.name == "elsewhere"
    assert "local" in provider_names()


def test_an_unknown_provider_is_refused_with_what_can_be_written() -> None:
    with pytest.raises(ConfigError, match=r"package\.module:Class") as caught:
        make_provider(SandboxConfig(provider="nonsense"), source="r.toml")
    assert caught.value.key == "sandbox.provider"


def test_options_reach_a_provider_of_another_package_and_are_refused_for_ours() -> None:
    config = SandboxConfig.load({"provider": "mine", "options": {"region": "eu"}}, source="r.toml")
    assert config.options == {"region": "eu"}
    with pytest.raises(ConfigError, match=r"sandbox\.options.*\n.*write \[sandbox\.local\]"):
        SandboxConfig.load({"options": {"region": "eu"}}, source="r.toml")


class Lacking:
    """No provider: it cannot even be closed."""

    def __init__(self, config: SandboxConfig) -> None:
        self.create = self.live = self.kill = self.reap = self.check = lambda: config
        self.capabilities = None


class Unlicensed:
    def __init__(self, config: SandboxConfig) -> None:
        raise RuntimeError("no licence")


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("no.such.module:Class", "cannot be imported from no.such.module:Class: ModuleNotFoundError"),
        ("rz_agent.errors:NoSuchClass", "cannot be imported from rz_agent.errors:NoSuchClass"),
        ("not_python:Class", "cannot be imported from not_python:Class: SyntaxError"),
        (f"{__name__}:__name__", "is a str in"),
        (f"{__name__}:Lacking", "has no capabilities, aclose."),
        (f"{__name__}:Unlicensed", "cannot be made: RuntimeError: no licence"),
    ],
)
def test_a_provider_that_cannot_be_one_is_told_with_its_reason(
    name: str, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "not_python.py").write_text("class Class(:\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError) as caught:
        make_provider(SandboxConfig(provider=name), source="r.toml")
    assert caught.value.key == "sandbox.provider"
    assert why in caught.value.why


def test_the_breaker_stops_a_run_past_its_share_and_not_before_its_window() -> None:
    breaker = InfraBreaker(share=0.5, window=4)
    for failed in (True, True, False, False):
        breaker.record(failed=failed)
    assert breaker.rate == 0.5
    breaker.record(failed=False)
    breaker.record(failed=True)
    breaker.record(failed=True)
    with pytest.raises(RunStopped, match=r"sandbox\.infra_failed_share = 0\.5"):
        breaker.record(failed=True)


@given(pieces=st.lists(st.binary(max_size=300), max_size=20), limit=st.integers(2, 200))
def test_kept_output_is_head_and_tail_of_the_whole(pieces: list[bytes], limit: int) -> None:
    kept, whole = Kept(limit), b"".join(pieces)
    for piece in pieces:
        kept.add(piece)
    assert kept.total == len(whole)
    half = limit // 2
    if len(whole) <= 2 * half:
        assert (kept.value(), kept.cut) == (whole, False)
    else:
        mark = f"\n[... {len(whole) - 2 * half} bytes cut ...]\n".encode()
        assert (kept.value(), kept.cut) == (whole[:half] + mark + whole[-half:], True)


@given(
    frames=st.lists(st.tuples(st.text(max_size=20), st.binary(max_size=50)), max_size=5),
    size=st.integers(1, 64),
)
def test_frames_survive_any_cut_of_the_stream(frames: list[tuple[str, bytes]], size: int) -> None:
    stream = b"".join(pack({"word": word}, body) for word, body in frames)
    buffer, seen = bytearray(), []
    for start in range(0, len(stream), size):
        buffer += stream[start : start + size]
        while (frame := take(buffer)) is not None:
            seen.append((frame[0]["word"], frame[1]))
    assert seen == frames
    assert not buffer


def test_a_folder_inside_another_is_not_shown_twice() -> None:
    assert outermost(["/usr", "/usr/lib", "/opt/py", "/opt/python"]) == ["/usr", "/opt/py", "/opt/python"]
