"""What the sandbox asks of Linux: system calls that Python has no functions for, and the filter of those it refuses.

Numbers are those of x86_64, the only machine that the sandbox runs on.
"""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Iterable

CLONE_NEWNS = 0x20000
CLONE_NEWCGROUP = 0x2000000
CLONE_NEWUTS = 0x4000000
CLONE_NEWIPC = 0x8000000
CLONE_NEWUSER = 0x10000000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000
ALL_NAMESPACES = (
    CLONE_NEWNS | CLONE_NEWCGROUP | CLONE_NEWUTS | CLONE_NEWIPC | CLONE_NEWUSER | CLONE_NEWPID | CLONE_NEWNET
)
MS_RDONLY = 1
MS_NOSUID = 2
MS_NODEV = 4
MS_NOEXEC = 8
MS_REMOUNT = 32
MS_BIND = 4096
MS_REC = 16384
MS_PRIVATE = 1 << 18

_PR_SET_DUMPABLE = 4
_PR_CAPBSET_DROP = 24
_PR_SET_NO_NEW_PRIVS = 38
_PR_CAP_AMBIENT = 47
_PR_SET_KEEPCAPS = 8
_PR_SET_SECCOMP = 22
_SECCOMP_MODE_FILTER = 2
_SYS_PIVOT_ROOT = 155
_SYS_CAPSET = 126
_SYS_MOUNT_SETATTR = 442
_MNT_DETACH = 2
_AT_FDCWD = -100
_AT_RECURSIVE = 0x8000
_ATTR_RDONLY = 1
_ATTR_NOSUID = 2
_ATTR_NODEV = 4
_ATTR_NOEXEC = 8

_libc = ctypes.CDLL(None, use_errno=True)


class CallError(OSError):
    """A system call failed; ``doing`` says what it was for."""

    def __init__(self, doing: str, number: int) -> None:
        super().__init__(number, f"{doing}: {os.strerror(number)}")
        self.doing = doing


def _check(result: int, doing: str) -> None:
    if result < 0:
        raise CallError(doing, ctypes.get_errno())


def unshare(flags: int) -> None:
    """Moves this process into new namespaces; for those of processes only its children are moved."""
    _check(_libc.unshare(flags), "creating namespaces")


def mount(source: str | None, target: str, kind: str | None, flags: int, options: str = "") -> None:
    """Mounts a file system, or a part of another one with MS_BIND."""
    parts = [None if part is None else part.encode() for part in (source, target, kind)]
    _check(
        _libc.mount(*parts, ctypes.c_ulong(flags), options.encode() or None), f"mounting {kind or source} on {target}"
    )


def restrict_mount(target: str, *, can_execute: bool = True) -> None:
    """No devices, no set-user-id and no writing, for a mount and all mounts below it."""
    attributes = _ATTR_NOSUID | _ATTR_NODEV | _ATTR_RDONLY | (0 if can_execute else _ATTR_NOEXEC)
    packed = struct.pack("QQQQ", attributes, 0, 0, 0)  # struct mount_attr: set, clear, propagation, user namespace
    call = _libc.syscall(_SYS_MOUNT_SETATTR, _AT_FDCWD, target.encode(), _AT_RECURSIVE, packed, len(packed))
    _check(call, f"restricting the mount {target}")


def enter_root(folder: str) -> None:
    """Makes a mount the root of the file system, and unmounts everything else."""
    os.chdir(folder)
    # with "." as both places the old root is mounted upon the new one, and the next call can unmount it
    _check(_libc.syscall(_SYS_PIVOT_ROOT, b".", b"."), "changing the root")
    _check(_libc.umount2(b".", _MNT_DETACH), "leaving the old root")
    os.chdir("/")


def set_dumpable(is_dumpable: bool) -> None:
    """Sets whether processes of the same user may trace this one, and whether its files in /proc belong to its user.

    Those of a process that may not be traced belong to root.
    """
    _check(_libc.prctl(_PR_SET_DUMPABLE, int(is_dumpable), 0, 0, 0), "setting who may look into a process")


def keep_capabilities() -> None:
    """Keeps capabilities over the next change of the user id."""
    _check(_libc.prctl(_PR_SET_KEEPCAPS, 1, 0, 0, 0), "keeping capabilities")


def drop_privileges() -> None:
    """Gives up every capability for good, and the means to get any by running a program."""
    for capability in range(64):
        if _libc.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0) < 0:
            break  # one beyond the last that this kernel knows
    _check(_libc.prctl(_PR_CAP_AMBIENT, 4, 0, 0, 0), "clearing ambient capabilities")  # 4 clears all
    # version 3 of the interface, this process; two times effective, permitted and inheritable capabilities: none
    header = struct.pack("Ii", 0x20080522, 0)
    data = struct.pack("IIIIII", *([0] * 6))
    _check(_libc.syscall(_SYS_CAPSET, header, data), "dropping capabilities")
    _check(_libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "forbidding new privileges")


REFUSED = {
    "modify_ldt": 154, "ptrace": 101, "process_vm_readv": 310, "process_vm_writev": 311, "process_madvise": 440,
    "kcmp": 312, "pidfd_getfd": 438, "move_pages": 279, "migrate_pages": 256,
    "mount": 165, "umount2": 166, "pivot_root": 155, "chroot": 161, "unshare": 272, "setns": 308, "fsopen": 430,
    "fsconfig": 431, "fsmount": 432, "fspick": 433, "open_tree": 428, "move_mount": 429, "mount_setattr": 442,
    "open_tree_attr": 467, "statmount": 457, "listmount": 458, "listns": 470, "lsm_set_self_attr": 460,
    "name_to_handle_at": 303, "open_by_handle_at": 304, "fanotify_init": 300, "quotactl": 179, "quotactl_fd": 443,
    "keyctl": 250, "add_key": 248, "request_key": 249, "bpf": 321, "perf_event_open": 298, "userfaultfd": 323,
    "io_uring_setup": 425, "io_uring_enter": 426, "io_uring_register": 427,
    "init_module": 175, "finit_module": 313, "delete_module": 176, "kexec_load": 246, "kexec_file_load": 320,
    "reboot": 169, "swapon": 167, "swapoff": 168, "acct": 163, "syslog": 103, "iopl": 172, "ioperm": 173,
    "personality": 135, "uselib": 134, "vhangup": 153, "sethostname": 170, "setdomainname": 171,
    "settimeofday": 164, "clock_settime": 227, "adjtimex": 159, "clock_adjtime": 305,
    "memfd_create": 319, "memfd_secret": 447, "shmget": 29, "shmat": 30, "semget": 64, "msgget": 68, "mq_open": 240,
}  # fmt: skip
"""System calls that a program in the sandbox is refused with EPERM, and their numbers."""
_CLONE = 56
_CLONE3 = 435
_SOCKET = 41
_SOCKETPAIR = 53
_AF_UNIX = 1
_AUDIT_ARCH_X86_64 = 0xC000003E
_X32_BIT = 0x40000000
_LOAD = 0x20
_JUMP_EQUAL = 0x15
_JUMP_AT_LEAST = 0x35
_JUMP_ANY_BIT = 0x45
_RETURN = 0x06
_ALLOW = 0x7FFF0000
_REFUSE = 0x00050000
_KILL = 0x80000000
_EPERM = 1
_ENOSYS = 38
_Instruction = tuple[int, int, int, int]


def refuse_calls() -> None:
    """Installs the filter on this process and all that it starts, for good.

    Beside ``REFUSED``: sockets other than local ones, new namespaces, and the ABIs of 32 bits. ``clone3``, whose flags
    no filter can read, seems not to exist; libraries then take ``clone``.
    """
    program = _seccomp_filter(REFUSED.values())
    buffer = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in program))
    packed = struct.pack("HxxxxxxQ", len(program), ctypes.addressof(buffer))  # struct sock_fprog
    _check(_libc.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, packed, 0, 0), "installing the filter of system calls")


def _seccomp_filter(refused: Iterable[int]) -> list[_Instruction]:
    """Classic BPF over ``struct seccomp_data``: number at 0, architecture at 4, low half of argument 1 at 16.

    An instruction is its code, how many to skip if a comparison holds, how many if not, and its operand.
    """
    # numbers mean other calls in other ABIs (32 bits, x32), so a call of one ends the process
    lines: list[_Instruction] = [
        (_LOAD, 0, 0, 4),
        (_JUMP_EQUAL, 1, 0, _AUDIT_ARCH_X86_64),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, 0),
        (_JUMP_AT_LEAST, 0, 1, _X32_BIT),
        (_RETURN, 0, 0, _KILL),
    ]
    for number in refused:
        lines += [(_JUMP_EQUAL, 0, 1, number), (_RETURN, 0, 0, _REFUSE | _EPERM)]
    # ENOSYS has libraries fall back to clone, whose flags can be read
    lines += [(_JUMP_EQUAL, 0, 1, _CLONE3), (_RETURN, 0, 0, _REFUSE | _ENOSYS)]
    # threads and processes may be started, but not with a flag for a new namespace
    lines += [(_JUMP_EQUAL, 0, 4, _CLONE), (_LOAD, 0, 0, 16), (_JUMP_ANY_BIT, 0, 1, ALL_NAMESPACES)]
    lines += [(_RETURN, 0, 0, _REFUSE | _EPERM), (_RETURN, 0, 0, _ALLOW)]
    # of sockets only local ones
    lines += [(_JUMP_EQUAL, 1, 0, _SOCKET), (_JUMP_EQUAL, 0, 3, _SOCKETPAIR)]
    lines += [(_LOAD, 0, 0, 16), (_JUMP_EQUAL, 1, 0, _AF_UNIX), (_RETURN, 0, 0, _REFUSE | _EPERM)]
    return [*lines, (_RETURN, 0, 0, _ALLOW)]
