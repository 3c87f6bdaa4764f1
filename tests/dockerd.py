"""A docker daemon that the tests start, and end: with files in a folder and a network of its own.

Neither this machine's containers nor its firewall are touched. The image needs no registry: an empty root,
in which the folder /usr of this machine is a read-only volume.
"""

from __future__ import annotations

import io
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from missing_tools import installs_itself
from rz_agent.sandboxes.docker.daemon import connect
from rz_agent.sandboxes.docker.provider import DockerProvider
from rz_agent.sandboxes.tables import DockerTable

IMAGE = "rz-agent-test:1"
BARE = "rz-agent-test:bare"  # nothing in it at all
OPEN = "srv"  # a folder of the image that anybody may write to, were it not read-only
OLD_PYTHON = "opt/python3.7"  # says that it is
_OLD = b"""#!/bin/sh
exec /usr/bin/python3 -c 'import sys
sys.version_info, sys.version = (3, 7), "3.7.3 (made up)"
exec(sys.argv[5])' "$@"
"""
START_S = 60.0
PORT = 5000
DRIVERS = ("overlay2", "vfs")  # the first does not work on top of an overlay


class Dockerd:
    """A daemon that runs."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.host = f"unix://{folder}/docker.sock"

    def table(self, **changes: Any) -> DockerTable:
        """`[sandbox.docker]` for it."""
        facts = {"host": self.host, "image": IMAGE, "pull": "never", "volumes": {"/usr": "/usr"}}
        return DockerTable.model_validate(facts | changes)

    def provider(self, **changes: Any) -> DockerProvider:
        """A provider of its containers."""
        return DockerProvider(self.table(**changes))

    def client(self) -> Any:
        """The SDK's client, to look behind the provider's back."""
        return connect(self.host, 60.0)

    @contextmanager
    def registry(self) -> Iterator[str]:
        """A registry in its network: what stands before the names of images there."""
        ready = self.folder / "registry"
        pid = (self.folder / "pid").read_text()
        server = Path(__file__).with_name("registry.py")
        command = ["nsenter", "--target", pid, "--net", sys.executable, str(server), str(PORT), str(ready)]
        running = subprocess.Popen(command)
        try:
            end = time.monotonic() + START_S
            while not ready.exists() and running.poll() is None and time.monotonic() < end:
                time.sleep(0.05)
            yield f"127.0.0.1:{PORT}/"
        finally:
            running.terminate()
            running.wait()
            ready.unlink(missing_ok=True)

    def containers(self) -> list[str]:
        """Names of all of them, in whatever state."""
        client = self.client()
        try:
            return sorted(facts["Names"][0].lstrip("/") for facts in client.containers(all=True))
        finally:
            client.close()

    def kill(self, name: str) -> None:
        """End a container's first process."""
        client = self.client()
        client.kill(name)
        client.close()

    def remove(self, name: str) -> None:
        """Remove a container that somebody else may have made."""
        client = self.client()
        client.remove_container(name, force=True)
        client.close()

    def wait_until_empty(self, seconds: float) -> list[str]:
        """What is left then."""
        end = time.monotonic() + seconds
        while (left := self.containers()) and time.monotonic() < end:
            time.sleep(0.1)
        return left


@pytest.fixture(scope="session")
def dockerd() -> Iterator[Dockerd]:
    """One for the session. Where it cannot run the test is skipped, or fails if it could be installed."""
    if shutil.which("dockerd") is None:
        pytest.skip("docker.io is not installed")
    if os.geteuid() != 0:
        pytest.skip("only root starts a docker daemon")
    try:
        with started() as running:
            yield running
            assert running.wait_until_empty(10) == [], "a test left containers"
    except NotStarted as error:
        pytest.fail(str(error)) if installs_itself() else pytest.skip(str(error))


class NotStarted(Exception):
    """A daemon that ended at once, with the last that it said."""


@contextmanager
def started() -> Iterator[Dockerd]:
    """A daemon with its images; leaves no process, no mount and no file."""
    folder = Path(tempfile.mkdtemp(prefix="rz-agent-dockerd-"))
    daemon: subprocess.Popen[bytes] | None = None
    try:
        daemon = _start(folder)
        if daemon is None:
            raise NotStarted(f"dockerd does not start here: {_log(folder)}")
        running = Dockerd(folder)
        _import_images(running)
        yield running
    finally:
        if daemon is not None:
            _stop(daemon)
        _remove(folder)


def _start(folder: Path) -> subprocess.Popen[bytes] | None:
    for driver in DRIVERS:
        command = [
            "unshare", "--net", "dockerd", "--storage-driver", driver, "--host", f"unix://{folder}/docker.sock",
            "--data-root", str(folder / "data"), "--exec-root", str(folder / "exec"),
            "--pidfile", str(folder / "pid"),
        ]  # fmt: skip
        with (folder / "log").open("ab") as log:
            daemon = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
        if _answers(daemon, folder):
            return daemon
        _stop(daemon)
    return None


def _answers(daemon: subprocess.Popen[bytes], folder: Path) -> bool:
    end = time.monotonic() + START_S
    while daemon.poll() is None and time.monotonic() < end:
        if (folder / "docker.sock").exists():
            connect(f"unix://{folder}/docker.sock", START_S).close()  # asks for the version
            return True
        time.sleep(0.1)
    return False


def _stop(daemon: subprocess.Popen[bytes]) -> None:
    daemon.send_signal(signal.SIGTERM)
    try:
        daemon.wait(20)
    except subprocess.TimeoutExpired:
        os.killpg(daemon.pid, signal.SIGKILL)
        daemon.wait()


def _log(folder: Path) -> str:
    return (folder / "log").read_text(errors="replace")[-600:]


def _remove(folder: Path) -> None:
    mounts = [line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    for mount in sorted((m for m in mounts if m.startswith(f"{folder}/")), reverse=True):
        subprocess.run(["umount", "--lazy", mount], check=False)
    shutil.rmtree(folder)


def _import_images(running: Dockerd) -> None:
    client = running.client()
    for name, data in ((IMAGE, image_root()), (BARE, _tar({}, {}, ["tmp"]))):
        repository, _, tag = name.partition(":")
        client.import_image_from_data(data, repository=repository, tag=tag)
    client.close()


def image_root() -> bytes:
    """A tar of what the image has besides /usr."""
    shown = [Path("/", name) for name in ("bin", "sbin", "lib", "lib32", "lib64")]
    shown += Path("/etc/alternatives").glob("*")
    links = {str(link).lstrip("/"): os.readlink(link) for link in shown if link.is_symlink()}
    files = {"etc/passwd": b"root:x:0:0:root:/root:/bin/sh\n", "etc/group": b"root:x:0:\n", OLD_PYTHON: _OLD}
    for name in ("etc/ld.so.cache", "etc/ld.so.conf"):
        if os.path.exists(f"/{name}"):
            files[name] = Path(f"/{name}").read_bytes()
    folders = [
        "usr",
        "etc",
        "etc/alternatives",
        "opt",
        "proc",
        "sys",
        "dev",
        "tmp",
        "var",
        "root",
        "run",
        OPEN,
    ]
    return _tar(files, links, folders)


def _tar(files: dict[str, bytes], links: dict[str, str], folders: list[str]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for name in folders:
            entry = tarfile.TarInfo(name)
            entry.type, entry.mode = tarfile.DIRTYPE, 0o1777 if name == OPEN else 0o755
            tar.addfile(entry)
        for name, target in links.items():
            entry = tarfile.TarInfo(name)
            entry.type, entry.linkname = tarfile.SYMTYPE, target
            tar.addfile(entry)
        for name, data in files.items():
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = len(data), 0o755
            tar.addfile(entry, io.BytesIO(data))
    return buffer.getvalue()
