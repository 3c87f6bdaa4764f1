"""Sandboxes on this machine: bubblewrap namespaces, cgroups where there are any, no daemon.

    create(): interpreter asked once -> cgroup -> bubblewrap as a uid of its own -> agent says hello

Invariant: what is made before a failure is unmade before the error leaves `create`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import socket
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from ..agent.interpreter import Interpreter, inspect, unreachable
from ..errors import CreateError, Misconfigured, Unavailable
from ..inside.confine import syscall_filter
from ..inside.wire import Header
from ..ledger import Ledger
from ..owner import RUN_LABEL, Owner
from ..provider import Capabilities, CheckResult, SandboxInfo
from ..spec import SandboxSpec
from ..tables import LocalTable
from . import bubblewrap, census
from .cgroups import SandboxGroups, is_orphan, owner_name, remove_tree, sweep
from .hierarchy import Hierarchy, find_hierarchies
from .janitor import Janitor
from .process import Process
from .sandbox import PROVIDER, LocalSandbox

START_S = 60.0
INSTALL = "apt-get install -y bubblewrap (Debian, Ubuntu), dnf install bubblewrap (Fedora)"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ground:
    """What is found out once, before the first sandbox."""

    interpreter: Interpreter
    binary: str
    hierarchies: list[Hierarchy]
    janitor: Janitor
    scratch: Path | None
    archive: str


class LocalProvider:
    """See `provider.Provider`. The run of a sandbox that another process made is in the `ledger`."""

    name = PROVIDER
    place = ""

    def __init__(self, config: LocalTable, ledger: Ledger | None = None) -> None:
        self._config, self._ledger = config, ledger or Ledger()
        self._isolated = config.isolation == "namespaces"
        self._owner = owner_name()
        self._ground: _Ground | None = None
        self._preparing = asyncio.Lock()
        self._open: dict[str, LocalSandbox] = {}

    @property
    def owner(self) -> str:
        """The name of its cgroups and scratch folder."""
        return self._owner

    # -- before the first -------------------------------------------------------------------------------

    async def _prepared(self) -> _Ground:
        async with self._preparing:
            if self._ground is None:
                self._ground = await asyncio.to_thread(self._prepare)
            return self._ground

    def _prepare(self) -> _Ground:
        interpreter = inspect(self._config.python)
        binary = self._binary() if self._isolated else ""
        hierarchies = find_hierarchies()
        sweep(hierarchies)
        _sweep_scratch()
        groups = [hierarchy.path / self._owner for hierarchy in hierarchies]
        if self._isolated:
            self._visible(interpreter)
            return _Ground(
                interpreter=interpreter, binary=binary, hierarchies=hierarchies,
                janitor=Janitor(None, groups), scratch=None, archive=bubblewrap.ARCHIVE,
            )  # fmt: skip
        scratch = Path(tempfile.mkdtemp(prefix=f"{census.SCRATCH}{self._owner}-"))
        (scratch / "agent.zip").write_bytes(interpreter.archive)
        return _Ground(
            interpreter=interpreter, binary="", hierarchies=hierarchies,
            janitor=Janitor(scratch, groups), scratch=scratch, archive=str(scratch / "agent.zip"),
        )  # fmt: skip

    def _binary(self) -> str:
        found = shutil.which(bubblewrap.BINARY)
        if found is None:
            raise Unavailable(
                f'bubblewrap ("{bubblewrap.BINARY}") is not installed\n  {INSTALL}, or write '
                'sandbox.local.isolation = "none" to run the policy\'s code without isolation.',
                provider=PROVIDER,
            )
        return found

    def _shown(self, interpreter: Interpreter) -> list[str]:
        return bubblewrap.outermost([*self._config.read_only, *interpreter.folders])

    def _visible(self, interpreter: Interpreter) -> None:
        for folder in self._shown(interpreter):
            if not os.path.isabs(folder) or not os.path.isdir(folder):
                raise Misconfigured(
                    f"sandbox.local.read_only names {folder!r}, which is not a folder of this machine\n"
                    "  Give absolute paths of folders that exist.",
                    provider=PROVIDER,
                )
            closed = unreachable(folder) if os.geteuid() == 0 else None
            if closed is not None:
                raise Misconfigured(
                    f"{folder!r} must be seen in the sandbox, but {closed!r} is closed to other users\n"
                    f"  Use a Python outside {closed} (sandbox.local.python), or open it: chmod o+x {closed}",
                    provider=PROVIDER,
                )

    # -- making one -------------------------------------------------------------------------------------

    async def create(self, spec: SandboxSpec) -> LocalSandbox:
        """A new sandbox. CreateError when it does not start, Unavailable or Misconfigured with the remedy."""
        ground = await self._prepared()
        name = owner_name()
        uid = bubblewrap.sandbox_uid() if self._isolated else None
        groups = self._groups(ground, name, spec, uid)
        scratch = None if ground.scratch is None else ground.scratch / name
        try:
            if scratch is not None:
                (scratch / "box").mkdir(parents=True)
            sandbox = LocalSandbox(name, spec, groups=groups, scratch=scratch, on_close=self._forget)
        except OSError as error:
            if groups is not None:
                await groups.close()
            raise CreateError(f"did not start: {error}", provider=PROVIDER) from error
        self._open[name] = sandbox
        try:
            await self._start(sandbox, ground, spec, uid, groups)
        except (OSError, EOFError, TimeoutError, ValueError) as error:
            text = sandbox.error_text()
            await sandbox.close()
            raise self._explain(text, error) from error
        except BaseException:
            await sandbox.close()
            raise
        return sandbox

    def _groups(self, ground: _Ground, name: str, spec: SandboxSpec, uid: int | None) -> SandboxGroups | None:
        if not ground.hierarchies:
            return None
        try:
            return SandboxGroups(ground.hierarchies, self._owner, name, spec.total, uid)
        except OSError as error:
            text = (
                f"its cgroups were not made: {error}\n  `rz-agent sandbox reap` removes those of dead owners."
            )
            raise CreateError(text, provider=PROVIDER) from error

    def _forget(self, sandbox: LocalSandbox) -> None:
        self._open.pop(sandbox.id, None)

    def _explain(self, text: str, error: BaseException) -> CreateError | Unavailable:
        if "setting up uid map" in text or "No permissions to create" in text or "unshare" in text:
            return Unavailable(
                f"this machine forbids user namespaces: {text}\n  Allow them (sysctl "
                "kernel.unprivileged_userns_clone=1, kernel.apparmor_restrict_unprivileged_userns=0; in a "
                'container: --security-opt seccomp=unconfined), or write sandbox.local.isolation = "none".',
                provider=PROVIDER,
            )
        return CreateError(f"did not start: {text or error!r}", provider=PROVIDER)

    async def _start(
        self, sandbox: LocalSandbox, ground: _Ground, spec: SandboxSpec, uid: int | None,
        groups: SandboxGroups | None,
    ) -> None:  # fmt: skip
        # A file: bubblewrap would die of a pipe that nobody reads any more, and leave its child behind.
        info = os.memfd_create("rz-agent-info", os.MFD_CLOEXEC)
        try:
            process, ours, settings = await self._launch(sandbox, ground, spec, uid, groups, info)
            reader, writer = await asyncio.open_unix_connection(sock=ours)
            await sandbox.channel.open(reader, writer, settings, START_S)
            if self._isolated:
                process.adopt(json.loads(os.pread(info, 4096, 0))["child-pid"])
        finally:
            os.close(info)

    async def _launch(
        self, sandbox: LocalSandbox, ground: _Ground, spec: SandboxSpec, uid: int | None,
        groups: SandboxGroups | None, info: int,
    ) -> tuple[Process, socket.socket, Header]:  # fmt: skip
        """Start it; our end of its socket, and what goes there first. What it was lent is closed here."""
        ours, theirs = socket.socketpair()
        with contextlib.ExitStack() as undo, contextlib.ExitStack() as lent:
            undo.callback(ours.close)
            lent.callback(theirs.close)

            def lend(fd: int) -> int:
                lent.callback(os.close, fd)
                return fd

            owner = lend(os.pidfd_open(os.getpid()))
            join = [lend(fd) for fd in groups.join_fds()] if groups else []
            folders = [lend(fd) for fd in groups.folder_fds()] if groups else []
            files = {path: lend(bubblewrap.holder(data)) for path, data in self._files(ground).items()}
            args = self._args(ground, spec, theirs.fileno(), files, info, sandbox.id)
            given = [theirs.fileno(), owner, *join, *folders, info, *files.values()]
            process = await self._started(sandbox, args, given, uid)
            undo.pop_all()
            return process, ours, self._settings(sandbox, ground, spec, owner, join, folders)

    async def _started(
        self, sandbox: LocalSandbox, args: list[str], given: list[int], uid: int | None
    ) -> Process:
        """Its process, which the sandbox knows of even when the caller is cancelled meanwhile."""
        starting = asyncio.create_task(
            asyncio.to_thread(
                bubblewrap.start, args, fds=given, errors=sandbox.errors_fd, uid=uid,
                cwd="/" if self._isolated else sandbox.box,
            )
        )  # fmt: skip
        try:
            await asyncio.shield(starting)
        finally:
            await asyncio.wait([starting])
            if starting.exception() is None:
                process = Process(starting.result())
                sandbox.started(process)
        return process

    def _files(self, ground: _Ground) -> dict[str, bytes]:
        """What is shown inside without being a file of this machine."""
        if not self._isolated:
            return {}
        return {
            bubblewrap.ARCHIVE: ground.interpreter.archive,
            "/etc/passwd": bubblewrap.PASSWD,
            "/etc/group": bubblewrap.GROUP,
        }

    def _args(
        self, ground: _Ground, spec: SandboxSpec, control: int, files: dict[str, int], info_fd: int,
        name: str,
    ) -> list[str]:  # fmt: skip
        agent = bubblewrap.agent_command(ground.interpreter, control, ground.archive, census.mark(name))
        if not self._isolated:
            return agent
        shown = self._shown(ground.interpreter)
        outer = bubblewrap.command(ground.binary, read_only=shown, files=files, info_fd=info_fd)
        return [*outer, *agent]

    def _settings(
        self, sandbox: LocalSandbox, ground: _Ground, spec: SandboxSpec, owner: int, join: list[int],
        folders: list[int],
    ) -> Header:  # fmt: skip
        return {
            "isolation": self._config.isolation,
            "owner": owner,
            "join": join,
            "cgroups": folders,
            "preload": list(self._config.preload),
            "bundle": ground.archive,
            "lifetime_s": spec.lifetime_s,
            "writable": list(sandbox.folders),
            "disk_mb": spec.limits.disk_mb,
        }

    # -- about all of them ------------------------------------------------------------------------------

    async def live(self, *, run_id: str | None = None) -> list[SandboxInfo]:
        """Those of this user on this machine (root: everybody's), found by their processes and folders."""
        found = await asyncio.to_thread(census.take_census)
        # of every provider: a desktop's sandbox is one of ours
        runs = {entry.sandbox_id: entry.run_id for entry in self._ledger.entries()}
        runs |= {name: sandbox.labels.get(RUN_LABEL, "") for name, sandbox in self._open.items()}
        infos = [_info(one, runs.get(one.name, "")) for one in found.values()]
        return [info for info in infos if run_id in (None, info.run_id)]

    async def kill(self, sandbox_id: str) -> bool:
        """End one and wait for the end of its processes."""
        return await asyncio.to_thread(census.end, sandbox_id)

    async def reap(self, *, run_id: str | None = None, dead_owners: bool = True) -> list[str]:
        """End what dead owners left, and remove the cgroups and scratch folders above it."""
        removed = []
        for info in await self.live(run_id=run_id):
            owner = Owner.parse(info.owner)
            if (owner is None or owner.is_dead or not dead_owners) and await self.kill(info.id):
                removed.append(info.id)
        if run_id is None:
            removed += await asyncio.to_thread(lambda: sweep(find_hierarchies()) + _sweep_scratch())
        return sorted({*removed})

    def capabilities(self) -> Capabilities:
        """What is enforced here, by looking at this machine's cgroups."""
        controllers = frozenset(c for hierarchy in find_hierarchies() for c in hierarchy.controllers)
        memory, pids = "memory" in controllers, "pids" in controllers
        filtered = self._isolated and syscall_filter() is not None
        return Capabilities(
            isolates_files=self._isolated,
            isolates_network=self._isolated,
            isolates_processes=self._isolated,
            isolates_sessions=self._isolated,
            bounds_disk=self._isolated,
            snapshots=True,
            bounds_total_memory=memory,
            bounds_session_memory=memory,
            bounds_pids=pids or self._isolated,
            filters_syscalls=filtered,
            not_bounded=tuple(_not_bounded(self._isolated, controllers, filtered)),
        )

    async def check(self) -> list[CheckResult]:
        """Look at bubblewrap, user namespaces (by making a sandbox), cgroups, the Python, the folders."""
        from .check import check

        return await check(self, self._config)

    async def aclose(self) -> None:
        """Close every sandbox, then let the janitor remove the folders above them."""
        await asyncio.gather(*(sandbox.close() for sandbox in list(self._open.values())))
        ground, self._ground = self._ground, None
        if ground is not None:
            for hierarchy in ground.hierarchies:
                remove_tree(hierarchy.path / self._owner)
            await asyncio.to_thread(ground.janitor.dismiss)


def _info(one: census.Found, run_id: str) -> SandboxInfo:
    return SandboxInfo(
        id=one.name,
        provider=PROVIDER,
        state="running" if one.pids else "ended",
        owner=str(one.owner or ""),
        run_id=run_id,
        age_s=max(0.0, time.time() - one.begun),
    )


def _sweep_scratch() -> list[str]:
    """Scratch folders (isolation "none") whose harness is no more."""
    removed = []
    for owner, folder in census.scratch_folders():
        if is_orphan(owner):
            shutil.rmtree(folder, ignore_errors=True)
            removed.append(folder.name)
    return removed


def _not_bounded(isolated: bool, controllers: frozenset[str], filtered: bool) -> list[str]:
    missing = []
    if not isolated:
        missing += [
            "files: programs read and write whatever this user can, and sessions share one folder",
            "network: programs reach whatever this machine can",
            "processes: programs see and signal all of this user's; one may outlive its call",
            "the sandbox's own life: programs can end its agent, and such an episode is masked",
            "disk: only the size of each file",
        ]
        if "pids" not in controllers:
            missing.append("processes: a fork bomb is stopped only by its timeout")
    else:
        if not filtered:
            missing.append("system calls: no filter is known for this processor")
        if "pids" not in controllers:
            missing.append("processes: no cgroup here, so only those of each program, not sandbox.total.pids")
    if "memory" not in controllers:
        missing.append("memory: no cgroup here, so only the address space of each process, not their sum")
    if "cpu" not in controllers:
        missing.append("CPU: no cgroup here, so sandbox.total.cpus bounds nothing")
    return missing
