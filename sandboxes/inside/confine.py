"""What one program in the sandbox may do: namespaces, limits, capabilities, system calls.

Runs between fork and the program, inside the sandbox, standard library only. Each step raises OSError
with its name when the kernel refuses it, so that no program ever starts half confined.

Much of what a short command costs is spent here, as each page that a forked interpreter touches is copied or
mapped first: so files are opened without their text layer, and what can be made before the fork is.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import resource
import socket
import struct

libc = ctypes.CDLL(None, use_errno=True)

SHM_MB = 8  # of commands
CLONE_NEWNS, CLONE_NEWIPC, CLONE_NEWUSER = 0x00020000, 0x08000000, 0x10000000
CLONE_NEWPID, CLONE_NEWNET, CLONE_NEWCGROUP = 0x20000000, 0x40000000, 0x02000000
MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_BIND, MS_REC, MS_PRIVATE = 2, 4, 8, 0x1000, 0x4000, 0x40000
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_CAPBSET_DROP = 1, 4, 22, 24
PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS, PR_CAP_AMBIENT = 36, 38, 47

# x86_64 numbers of calls that reach the kernel's rarely used corners, or other processes, or mounts.
DENIED = {
    "mount": 165, "umount2": 166, "pivot_root": 155, "chroot": 161, "unshare": 272, "setns": 308,
    "fsopen": 430, "fsconfig": 431, "fsmount": 432, "move_mount": 429, "open_tree": 428,
    "mount_setattr": 442, "ptrace": 101, "process_vm_readv": 310, "process_vm_writev": 311, "kcmp": 312,
    "keyctl": 250, "add_key": 248, "request_key": 249, "bpf": 321, "perf_event_open": 298,
    "userfaultfd": 323, "io_uring_setup": 425, "io_uring_enter": 426, "io_uring_register": 427,
    "kexec_load": 246, "kexec_file_load": 320, "init_module": 175, "finit_module": 313,
    "delete_module": 176, "open_by_handle_at": 304, "name_to_handle_at": 303, "swapon": 167,
    "swapoff": 168, "reboot": 169, "acct": 163, "syslog": 103, "iopl": 172, "ioperm": 173,
    "quotactl": 179, "personality": 135,
}  # fmt: skip
# Calls that change how a process is scheduled, or its limits: the first argument is whose ...
OF_A_PROCESS = {
    "sched_setparam": 142, "sched_setscheduler": 144, "sched_setattr": 314, "sched_setaffinity": 203,
    "prlimit64": 302,
}  # fmt: skip
# ... or what kind of whose, by the number that means one process, and the second whose.
OF_A_KIND = {"setpriority": (141, 0), "ioprio_set": (251, 1)}
# of every architecture
_LANDLOCK_CREATE, _LANDLOCK_ADD, _LANDLOCK_RESTRICT = 444, 445, 446
_WRITE, _REFER = 1 << 1, 1 << 13  # open a file for writing; move a file to another folder
_ALLOW, _KILL, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
_Instruction = tuple[int, int, int, int]


def _load(offset: int) -> _Instruction:
    return (0x20, 0, 0, offset)


def _jump_equal(value: int, then: int, other: int) -> _Instruction:
    return (0x15, then, other, value)


def _answer(value: int) -> _Instruction:
    return (0x06, 0, 0, value)


def _scheduling(guarded: bool) -> dict[int, list[_Instruction]]:
    """No program delays the process that is to end it, by giving that the idle class beside busy loops.

    That is PID 1, which has the program's uid. A guard has any pid, and its program's uid while it ends that:
    there a program may change nobody but its calling thread, which is 0.
    """
    refused = _answer(_ERRNO | errno.EPERM)
    unless_whose = [(0x15, 1, 0, 0) if guarded else (0x15, 0, 1, 1), refused, _answer(_ALLOW)]
    blocks = {number: [_load(16), *unless_whose] for number in OF_A_PROCESS.values()}
    for number, process in OF_A_KIND.values():
        blocks[number] = [_load(16), _jump_equal(process, 1, 0), refused, _load(24), *unless_whose]
    return blocks


def _blocks(guarded: bool) -> dict[int, list[_Instruction]]:
    """What is done for a call by its number; each block ends with an answer."""
    refused, allowed = _answer(_ERRNO | errno.EPERM), _answer(_ALLOW)
    blocks = {number: [refused] for number in DENIED.values()} | _scheduling(guarded)
    # clone3 hides its flags in memory: refuse it, the C library then falls back to clone
    blocks[435] = [_answer(_ERRNO | errno.ENOSYS)]
    blocks[56] = [_load(16), (0x45, 0, 1, 0x7E020000), refused, allowed]  # clone with a namespace flag
    # socket and socketpair: UNIX, INET, INET6 and NETLINK only (no vsock, packet, alg, bluetooth ...)
    families = [_jump_equal(1, 4, 0), _jump_equal(2, 3, 0), _jump_equal(10, 2, 0), _jump_equal(16, 1, 0)]
    blocks[41] = blocks[53] = [_load(16), *families, _answer(_ERRNO | errno.EAFNOSUPPORT), allowed]
    blocks[16] = [_load(24), _jump_equal(0x5412, 0, 1), refused, allowed]  # ioctl TIOCSTI: types for others
    return blocks


def _search(blocks: list[tuple[int, list[_Instruction]]]) -> list[_Instruction]:
    """Find the block by halves. The kernel tries a filter with every number when it is installed."""
    if len(blocks) == 1:
        ((number, block),) = blocks
        return [_jump_equal(number, 0, len(block)), *block, _answer(_ALLOW)]
    half = len(blocks) // 2
    low, high = _search(blocks[:half]), _search(blocks[half:])
    return [(0x35, len(low), 0, blocks[half][0]), *low, *high]  # at least: over the lower ones


def syscall_filter(*, guarded: bool = False) -> bytes | None:
    """The classic BPF program, or None on a machine whose call numbers are not known here."""
    if os.uname().machine != "x86_64":
        return None
    code = [
        _load(4), _jump_equal(0xC000003E, 1, 0), _answer(_KILL),  # another architecture's call table
        _load(0), (0x35, 0, 1, 0x40000000), _answer(_ERRNO | errno.ENOSYS),  # x32
        *_search(sorted(_blocks(guarded).items())),
    ]  # fmt: skip
    return b"".join(struct.pack("HBBI", *instruction) for instruction in code)


class Filter(ctypes.Structure):
    """A classic BPF program as the kernel takes it: the count of its instructions, and where they are."""

    _fields_ = (("length", ctypes.c_ushort), ("code", ctypes.c_char_p))

    @classmethod
    def of(cls, program: bytes) -> Filter:
        """It keeps the bytes alive."""
        return cls(len(program) // 8, program)


def _check(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def unshare(flags: int) -> None:
    """New namespaces for this process (for its children, with CLONE_NEWPID)."""
    _check(libc.unshare(flags), f"unshare {flags:#x}")


def setns(fd: int, kind: int) -> None:
    """Enter the namespace behind `fd`."""
    _check(libc.setns(fd, kind), "setns")


def prctl(option: int, value: int) -> None:
    """prctl with one argument."""
    _check(libc.prctl(option, value, 0, 0, 0), f"prctl {option}")


def mount(source: str, target: str, kind: str, flags: int, data: str = "") -> None:
    """mount(2)."""
    done = libc.mount(source.encode(), target.encode(), kind.encode(), flags, data.encode())
    _check(done, f"mount {target}")


def inodes(disk_mb: int) -> int:
    """As many as there are pages: what is empty takes memory too, which a bound in bytes does not count."""
    return disk_mb << 8


def _bounded_files(folder: str, disk_mb: int) -> None:
    bounds = f"size={disk_mb}m,nr_inodes={inodes(disk_mb)},mode=0755"
    mount("tmpfs", folder, "tmpfs", MS_NOSUID | MS_NODEV, bounds)


def shared_files(disk_mb: int) -> None:
    """A mount namespace of this process and its children, with a bounded tmpfs in each folder of commands.

    Not bubblewrap's: that bounds no inodes.
    """
    unshare(CLONE_NEWNS)
    mount("none", "/", "none", MS_REC | MS_PRIVATE)
    for folder, size in (("/box", disk_mb), ("/tmp", disk_mb), ("/dev/shm", SHM_MB)):
        _bounded_files(folder, size)


def private_files(disk_mb: int) -> None:
    """One bounded tmpfs of this mount namespace's own behind /box, /tmp and /dev/shm."""
    _bounded_files("/tmp", disk_mb)
    for name, target in (("box", "/box"), ("shm", "/dev/shm"), ("tmp", "/tmp")):
        os.mkdir("/tmp/" + name)
        mount("/tmp/" + name, target, "none", MS_BIND)


_OWN = CLONE_NEWNS | CLONE_NEWIPC | (CLONE_NEWCGROUP if os.path.exists("/proc/self/ns/cgroup") else 0)


def private_mounts(*, network: bool) -> None:
    """Own mount, IPC and cgroup namespaces, and a /proc that shows only this PID namespace.

    network   and a network namespace, in which nothing is up
    Of cgroups only here, in the program's group: version 2 lets nobody move into a group outside of the
    namespace's root where it is mounted with nsdelegate, as systemd mounts it.
    """
    unshare(_OWN | (CLONE_NEWNET if network else 0))
    mount("none", "/", "none", MS_REC | MS_PRIVATE)
    mount("proc", "/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC)


def raise_loopback() -> None:
    """Bring up `lo` of this network namespace: programs may talk to themselves and to nobody else."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as handle:
        fcntl.ioctl(handle, 0x8914, struct.pack("16sh14x", b"lo", 0x1))  # SIOCSIFFLAGS, IFF_UP


def _put(path: str, text: bytes, folder: int | None = None) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC, dir_fd=folder)
    try:
        os.write(fd, text)
    finally:
        os.close(fd)


def join_cgroups(folders: list[int], name: str) -> None:
    """Move this process below the sandbox's cgroup folders (open directories), into `name`."""
    for folder in folders:
        _put(name + "/cgroup.procs", b"0", folder)


def first_victim() -> None:
    """When memory runs out this process goes before the agent does.

    A program may take that back, unless /proc is closed to it (`only_read_proc`).
    """
    _put("/proc/self/oom_score_adj", b"1000")


def become_user() -> None:
    """A nested user namespace in which this process is uid 1000, not the namespace's root.

    The kernel counts RLIMIT_NPROC per user namespace, so programs do not share one count either.
    """
    prctl(PR_SET_DUMPABLE, 1)  # else /proc/self/uid_map belongs to root
    unshare(CLONE_NEWUSER)
    _put("/proc/self/setgroups", b"deny")
    _put("/proc/self/uid_map", b"1000 0 1")
    _put("/proc/self/gid_map", b"1000 0 1")


def bound(kind: int, value: int, extra: int = 0) -> None:
    """Set a resource limit, or keep the hard limit that is already lower."""
    hard = resource.getrlimit(kind)[1]
    top = value + extra if hard == resource.RLIM_INFINITY else min(value + extra, hard)
    resource.setrlimit(kind, (min(value, top), top))


def set_limits(limits: dict[str, int]) -> None:
    """Resource limits of each process. `address_mb` = 0 where a memory cgroup bounds the program instead."""
    bound(resource.RLIMIT_CPU, limits["cpu_s"], 1)
    bound(resource.RLIMIT_FSIZE, limits["disk_mb"] << 20)
    bound(resource.RLIMIT_NOFILE, limits["open_files"])
    bound(resource.RLIMIT_CORE, 0)
    if limits["pids"]:
        bound(resource.RLIMIT_NPROC, limits["pids"])
    if limits["address_mb"]:
        bound(resource.RLIMIT_AS, limits["address_mb"] << 20)


def mapped_uids() -> int:
    """How many uids there are in this user namespace, from 0 on; half of all at most."""
    with open("/proc/self/uid_map") as handle:
        lengths = [int(line.split()[2]) for line in handle if line.split()[0] == "0"]
    return min(max(lengths), 1 << 31)


def use_files_as(uid: int) -> None:
    """The kernel treats files for this process as it does for `uid`."""
    libc.setfsgid(uid)
    libc.setfsuid(uid)


def become(uid: int) -> None:
    """From root to `uid`, for good. Its own /proc entries stay readable to it, as after an exec."""
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)
    prctl(PR_SET_DUMPABLE, 1)


def drop_bounding_set() -> None:
    """No capability can be gained by exec; needs CAP_SETPCAP."""
    for capability in range(64):
        if libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0) != 0:
            break  # past the kernel's last one


_OF_THIS_PROCESS, _NOTHING_IN_ANY_SET = struct.pack("Ii", 0x20080522, 0), bytes(24)


def drop_capabilities() -> None:
    """No capability in any set, and none to be regained by exec."""
    drop_bounding_set()
    prctl(PR_CAP_AMBIENT, 4)
    _check(libc.capset(_OF_THIS_PROCESS, _NOTHING_IN_ANY_SET), "capset")


def no_new_privileges() -> None:
    """set-user-ID programs no longer gain anything."""
    prctl(PR_SET_NO_NEW_PRIVS, 1)


def all_but_proc() -> int:
    """Landlock's rules for `only_read_proc`, a descriptor; -1 where the kernel has none.

    They are about the folders that are there now: what is mounted over one of them later is closed as well.
    Its first version, of Linux 5.13 to 5.18, would refuse to move a file from folder to folder.
    """
    if libc.syscall(_LANDLOCK_CREATE, None, 0, 1) < 2:
        return -1
    rules: int = libc.syscall(_LANDLOCK_CREATE, struct.pack("Q", _WRITE | _REFER), 8, 0)
    if rules < 0:
        _check(rules, "landlock_create_ruleset")
    with os.scandir("/") as entries:
        for path in [entry.path for entry in entries if entry.is_dir(follow_symlinks=False)]:
            if path != "/proc":
                folder = os.open(path, os.O_PATH)
                below = struct.pack("=Qi", _WRITE | _REFER, folder)
                _check(libc.syscall(_LANDLOCK_ADD, rules, 1, below, 0), f"landlock_add_rule {path}")
                os.close(folder)
    return rules


def only_read_proc(rules: int) -> None:
    """This process and all that it starts write to nothing in /proc; needs `no_new_privileges`."""
    if rules >= 0:
        _check(libc.syscall(_LANDLOCK_RESTRICT, rules, 0), "landlock_restrict_self")
        os.close(rules)


def install(program: Filter) -> None:
    """Install a system call filter for this process and all that it starts."""
    _check(libc.prctl(PR_SET_SECCOMP, 2, ctypes.byref(program), 0, 0), "seccomp")
