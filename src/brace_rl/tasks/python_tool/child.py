"""The other side of :mod:`brace_rl.tasks.python_tool.runner`: isolates itself, then runs the code it was given.

Run as a script by ``python -I -S``, standard library only. It never executes another program: the interpreter that is
running already needs nothing from the machine's files but the modules the code imports.

::

    launcher --- new user, network, mount, PID, IPC and UTS namespaces
       +-- init (PID 1) --- new root: an empty tmpfs, the standard library and shared libraries read-only
              +-- worker --- limits, no capabilities, system-call filter; runs the code

When ``init`` ends, the kernel kills whatever is left in its PID namespace. Numbers and structures are Linux's own; see
namespaces(7), mount_setattr(2), seccomp(2), capset(2).
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import os
import platform
import resource
import runpy
import signal
import struct
import sys
import traceback
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC = 0x00020000, 0x04000000, 0x08000000
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
NAMESPACES = CLONE_NEWUSER | CLONE_NEWNET | CLONE_NEWNS | CLONE_NEWPID | CLONE_NEWIPC | CLONE_NEWUTS
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_CAPBSET_DROP, PR_SET_NO_NEW_PRIVS = 1, 4, 22, 24, 38
MS_NOSUID, MS_NODEV, MS_BIND, MS_REC, MS_PRIVATE = 2, 4, 4096, 16384, 1 << 18
MNT_DETACH, AT_FDCWD, AT_RECURSIVE = 2, -100, 0x8000
MOUNT_ATTR_RDONLY, MOUNT_ATTR_NOSUID, MOUNT_ATTR_NODEV = 1, 2, 4
SECCOMP_MODE_FILTER, SECCOMP_RET_KILL_PROCESS, SECCOMP_RET_ERRNO, SECCOMP_RET_ALLOW = (
    2,
    0x80000000,
    0x00050000,
    0x7FFF0000,
)
CAPABILITY_VERSION_3, LAST_CAPABILITY = 0x20080522, 63
X32_BIT = 0x40000000
NOBODY = 65534
"""User and group that root becomes: the limit on processes does not bind root."""
OWN_PROCESSES = 3
"""Launcher, init and worker; where root runs them, the worker alone counts as nobody's."""

# Names of system calls the code may not make, with their numbers by machine: (AUDIT_ARCH, numbers). socket: network
# namespaces do not cover every family (AF_VSOCK); io_uring_setup: it opens sockets past the filter; shmget, msgget,
# semget, memfd_create, memfd_secret: memory that no limit on an address space counts; the rest: ways to rearrange
# namespaces, mounts, keys and other processes.
MACHINES = {
    "x86_64": (
        0xC000003E,
        {
            "socket": 41, "ptrace": 101, "chroot": 161, "mount": 165, "umount2": 166, "pivot_root": 155, "unshare": 272,
            "setns": 308, "bpf": 321, "add_key": 248, "request_key": 249, "keyctl": 250, "perf_event_open": 298,
            "userfaultfd": 323, "open_by_handle_at": 304, "process_vm_readv": 310, "process_vm_writev": 311,
            "shmget": 29, "semget": 64, "msgget": 68, "memfd_create": 319,
        },
    ),
    "aarch64": (
        0xC00000B7,
        {
            "socket": 198, "ptrace": 117, "chroot": 51, "mount": 40, "umount2": 39, "pivot_root": 41, "unshare": 97,
            "setns": 268, "bpf": 280, "add_key": 217, "request_key": 218, "keyctl": 219, "perf_event_open": 241,
            "userfaultfd": 282, "open_by_handle_at": 265, "process_vm_readv": 270, "process_vm_writev": 271,
            "shmget": 194, "semget": 190, "msgget": 186, "memfd_create": 279,
        },
    ),
}  # fmt: skip
ANY_MACHINE = {
    "io_uring_setup": 425, "open_tree": 428, "move_mount": 429, "fsopen": 430, "mount_setattr": 442,
    "memfd_secret": 447,
}  # fmt: skip
SYS_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
SYS_MOUNT_SETATTR = 442

libc = ctypes.CDLL(None, use_errno=True)


def checked(what: str, result: int) -> int:
    """Raise the C library's error as OSError, saying what failed."""
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{what}: {os.strerror(code)}")
    return result


def text(value: str | None) -> bytes | None:
    """For the C library."""
    return None if value is None else os.fsencode(value)


def mount(source: str | None, target: str, kind: str | None, flags: int, options: str | None = None) -> None:
    """mount(2)."""
    checked(f"mount {target}", libc.mount(text(source), text(target), text(kind), ctypes.c_ulong(flags), text(options)))


def write(path: str, content: str) -> None:
    """Write a file of /proc."""
    with open(path, "w") as file:
        file.write(content)


def enter_namespaces(was_root: bool) -> None:
    """New namespaces, in which nobody exists but this user and, where that is root, the one it will become."""
    uid, gid = os.getuid(), os.getgid()
    if was_root:
        # Two users may only be mapped from outside, by a process with the rights of root.
        go, wait = os.pipe(), os.pipe()
        launcher = os.getpid()
        helper = os.fork()
        if not helper:
            os.read(go[0], 1)
            for name in ("uid_map", "gid_map"):
                write(f"/proc/{launcher}/{name}", f"0 0 1\n{NOBODY} {NOBODY} 1\n")
            os.write(wait[1], b".")
            os._exit(0)
        checked("unshare", libc.unshare(NAMESPACES))
        os.write(go[1], b".")
        os.close(wait[1])
        mapped = os.read(wait[0], 1)
        os.waitpid(helper, 0)
        for end in (*go, wait[0]):
            os.close(end)
        if not mapped:
            raise OSError(errno.EPERM, "the users of the new namespace could not be mapped")
    else:
        checked("unshare", libc.unshare(NAMESPACES))
        write("/proc/self/setgroups", "deny")
        write("/proc/self/uid_map", f"{uid} {uid} 1")
        write("/proc/self/gid_map", f"{gid} {gid} 1")
    with contextlib.suppress(OSError):  # the filter below refuses most ways to make another namespace; this, the rest
        write("/proc/sys/user/max_user_namespaces", "0")


def leave_root() -> None:
    """Become nobody, who owns nothing but the folder we are in."""
    os.chown(".", NOBODY, NOBODY)
    os.setgroups([])
    os.setresgid(NOBODY, NOBODY, NOBODY)
    os.setresuid(NOBODY, NOBODY, NOBODY)
    if not os.access(os.__file__, os.R_OK):
        raise OSError(errno.EACCES, f"{os.path.dirname(os.__file__)}: not readable by other users than root")


def library_folders() -> list[str]:
    """What the interpreter may still read: the standard library and the shared libraries its modules load."""
    standard = os.path.dirname(os.__file__)
    folders = {"/lib", "/lib64", "/usr/lib", "/usr/lib64", os.path.dirname(standard), standard}
    return sorted(folder for folder in folders if os.path.isdir(folder))


def new_root(disk_bytes: int) -> None:
    """Replace the root by a small tmpfs that holds the libraries, read-only, and an empty folder, which we enter."""
    mount(None, "/", None, MS_REC | MS_PRIVATE)
    folders = library_folders()
    # Opened before /tmp is covered, under which some of them may lie.
    handles = {folder: os.open(folder, os.O_PATH) for folder in folders if not os.path.islink(folder)}
    links = {folder: os.readlink(folder) for folder in folders if os.path.islink(folder)}
    mount("tmpfs", "/tmp", "tmpfs", MS_NOSUID | MS_NODEV, f"size={disk_bytes},nr_inodes=4096,mode=755")
    for folder, handle in handles.items():
        target = "/tmp" + folder
        if not os.path.isdir(target):
            os.makedirs(target)
        mount(f"/proc/self/fd/{handle}", target, None, MS_BIND | MS_REC)
        attributes = struct.pack("QQQQ", MOUNT_ATTR_RDONLY | MOUNT_ATTR_NOSUID | MOUNT_ATTR_NODEV, 0, 0, 0)
        buffer = ctypes.create_string_buffer(attributes, len(attributes))
        call = libc.syscall(SYS_MOUNT_SETATTR, AT_FDCWD, text(target), AT_RECURSIVE, buffer, len(attributes))
        checked(f"mount_setattr {target}", call)
        os.close(handle)
    for folder, destination in links.items():
        os.symlink(destination, "/tmp" + folder)
    os.mkdir("/tmp/work")
    os.chdir("/tmp")
    checked("pivot_root", libc.syscall(SYS_PIVOT_ROOT[platform.machine()], b".", b"."))
    checked("umount2", libc.umount2(b".", MNT_DETACH))
    os.chdir("/work")


def give_up_rights() -> None:
    """No capability, and no system call that could win one back or reach outside."""
    for capability in range(LAST_CAPABILITY + 1):
        libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0)  # those the kernel does not know fail, harmlessly
    header = struct.pack("Ii", CAPABILITY_VERSION_3, 0)
    checked("capset", libc.capset(header, bytes(24)))
    checked("prctl", libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
    arch, numbers = MACHINES[platform.machine()]
    program = seccomp_program(arch, sorted({**numbers, **ANY_MACHINE}.values()))
    buffer = ctypes.create_string_buffer(program, len(program))
    pointer = struct.pack("HxxxxxxQ", len(program) // 8, ctypes.addressof(buffer))
    checked("seccomp", libc.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, pointer, 0, 0))


def seccomp_program(arch: int, numbers: Sequence[int]) -> bytes:
    """A filter that refuses these calls with EPERM, and any of another machine's numbering altogether."""
    load, equal, at_least, answer = 0x20, 0x15, 0x35, 0x06
    deny = len(numbers) + 1
    lines = [
        (load, 0, 0, 4),  # seccomp_data.arch
        (equal, 1, 0, arch),
        (answer, 0, 0, SECCOMP_RET_KILL_PROCESS),
        (load, 0, 0, 0),  # seccomp_data.nr
        (at_least, deny, 0, X32_BIT),
        *((equal, deny - 1 - place, 0, number) for place, number in enumerate(numbers)),
        (answer, 0, 0, SECCOMP_RET_ALLOW),
        (answer, 0, 0, SECCOMP_RET_ERRNO | errno.EPERM),
    ]
    return b"".join(struct.pack("HBBI", *line) for line in lines)


def set_limits(limits: Mapping[str, Any], own_processes: int) -> None:
    """Hard limits of this process and its children."""
    cpu = int(limits["cpu_s"])
    resource.setrlimit(resource.RLIMIT_CPU, (cpu, cpu + 1))
    resource.setrlimit(resource.RLIMIT_AS, (limits["memory_bytes"],) * 2)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limits["disk_bytes"],) * 2)
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if own_processes:
        resource.setrlimit(resource.RLIMIT_NPROC, (own_processes + limits["processes"],) * 2)


def run(code: bytes) -> int:
    """Run the code as a script; a traceback holds its own frames alone. The exit status."""
    with open("code.py", "wb") as file:
        file.write(code)
    status = 0
    try:
        runpy.run_path("code.py", run_name="__main__")
    except SystemExit as stop:
        status = stop.code if isinstance(stop.code, int) else 0 if stop.code is None else 1
        if status == 1 and not isinstance(stop.code, int):
            print(stop.code, file=sys.stderr)
    except BaseException as error:
        status = 1
        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == "code.py"]
        lines = traceback.format_list(frames) + traceback.format_exception_only(type(error), error)
        sys.stderr.write("".join(lines[-12:]))
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    return status & 0xFF


def die_with_parent() -> None:
    """Be killed when the parent ends. A change of user undoes it."""
    checked("prctl", libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0))


def continue_in_child(ready: int) -> None:
    """Fork, and return in the child alone; the parent waits for it and ends as it ends."""
    child = os.fork()
    if not child:
        die_with_parent()
        return
    os.close(ready)
    while True:
        pid, status = os.wait()
        if pid == child:
            code = os.waitstatus_to_exitcode(status)
            os._exit(code if code >= 0 else 128 - code)


def main() -> NoReturn:
    """Isolate, report, run, end."""
    limits = json.loads(sys.argv[1])
    ready = int(sys.argv[2])
    isolated = limits["isolated"]
    was_root = os.geteuid() == 0
    code = sys.stdin.buffer.read()
    try:
        if isolated:
            die_with_parent()
            enter_namespaces(was_root)
            continue_in_child(ready)
            new_root(limits["disk_bytes"])
            continue_in_child(ready)
            if was_root:
                leave_root()
                die_with_parent()
        set_limits(limits, isolated and (1 if was_root else OWN_PROCESSES))
        if isolated:
            give_up_rights()
    except (OSError, KeyError, ValueError) as error:
        os.write(ready, str(error).encode())
        os._exit(1)
    os.write(ready, b"ready")
    os.close(ready)
    os._exit(run(code))


if __name__ == "__main__":
    main()
