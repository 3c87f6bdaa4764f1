"""`rz/SWEBenchPro-v0` in containers: with a repository of this machine, and with images as published."""

from __future__ import annotations

import asyncio
import io
import json
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from dockerd import Dockerd, image_root
from rz_agent.envs.play import play_one
from rz_agent.envs.registry import load
from rz_agent.envs.script import call, replayed, scripted
from rz_agent.envs.swebench_pro.instance import image_tag
from rz_agent.envs.swebench_pro.make import Wish, make_instance
from rz_agent.envs.swebench_pro.scripted import solve, wrong
from rz_agent.sandboxes.config import SandboxConfig
from rz_agent.sandboxes.pool import SandboxPool
from xmltodict_instance import FAILING, SECRET, History, command, history, pytest_folder


@pytest.fixture(scope="module")
def shown() -> Iterator[Path]:
    with pytest_folder() as folder:
        yield folder


@pytest.fixture(scope="module")
def past(tmp_path_factory: pytest.TempPathFactory) -> History:
    return history(tmp_path_factory.mktemp("docker") / "clone")


@pytest.fixture(scope="module")
def config(dockerd: Dockerd, shown: Path) -> SandboxConfig:
    volumes = {"/usr": "/usr", str(shown): str(shown)}
    table = {"provider": "docker", "docker": dockerd.table(volumes=volumes).model_dump()}
    return SandboxConfig.load(table, source="test")


@pytest.fixture(scope="module")
def instances(config: SandboxConfig, past: History, shown: Path) -> Path:
    """An instance that was made with containers."""
    out = past.folder.parent / "made"

    async def made() -> None:
        async with SandboxPool.of(config) as pool:
            wish = Wish(repository=past.folder, fix=past.fix, out=out, command=command(shown))
            assert (await make_instance(wish, pool)).fail_to_pass == (FAILING,)

    asyncio.run(made())
    return out / "instances.jsonl"


def episode(config: SandboxConfig, taskset: Path, agent: Any) -> Any:
    async def played() -> Any:
        async with (
            SandboxPool.of(config) as pool,
            load("swebench-pro", sandboxes=pool, taskset=str(taskset)) as made,
        ):
            return await play_one(made, made.taskset.load("train")[0], agent, name="swebench-pro", options={})

    return asyncio.run(played())


def test_a_repository_of_this_machine_in_containers(
    config: SandboxConfig, instances: Path, dockerd: Dockerd
) -> None:
    rewards = [episode(config, instances, agent).reward for agent in (scripted(solve), scripted(wrong))]
    assert rewards == [1.0, 0.0]
    assert episode(config, instances, replayed([call("submit")])).reward == 0.0
    assert dockerd.wait_until_empty(10) == []


def test_an_image_as_they_are_published(
    config: SandboxConfig, instances: Path, past: History, dockerd: Dockerd
) -> None:
    row = json.loads(instances.read_text()) | {"dockerhub_tag": ""}
    _publish(dockerd, past, f"jefzda/sweap-images:{image_tag(row['instance_id'], row['repo'])}")
    published = instances.parent / "published.jsonl"
    published.write_text(json.dumps(row) + "\n")
    found = episode(config, published, scripted(solve))
    assert (found.reward, found.fate) == (1.0, "terminated")
    look = "pwd; git log --all --format=%H; git cat-file --batch-all-objects --batch | grep -ac secret"
    peek = call("bash", command=look.replace("secret", f'"{SECRET}"') + "; touch /root/x /app/y && id -u")
    looked = episode(config, published, replayed([peek, call("submit")]))
    (answer, _) = (said.text for said in looked.said if said.role == "tool")
    assert answer.splitlines()[:3] == ["/app", past.base, "0"]
    assert int(answer.splitlines()[3]) > 0, "no program is root"
    assert looked.reward == 0.0
    assert dockerd.wait_until_empty(10) == []
    client = dockerd.client()
    assert not client.volumes()["Volumes"], "the copy of the repository goes with its container"
    client.close()


def _publish(dockerd: Dockerd, past: History, name: str) -> None:
    """An image with the whole clone at /app, root's, and root's home."""
    layers = io.BytesIO(image_root())
    with tarfile.open(fileobj=layers, mode="a") as tar:
        tar.add(past.folder, "app", filter=_roots)
    client = dockerd.client()
    repository, _, tag = name.partition(":")
    client.import_image_from_data(layers.getvalue(), repository=repository, tag=tag)
    client.close()


def _roots(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    entry.uid = entry.gid = 0
    return entry
