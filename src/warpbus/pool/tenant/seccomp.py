"""seccomp: a filter of system calls that a process gives itself, for good, in all of its threads.

System calls that are not named here are allowed, since CUDA's driver makes undocumented ones. Denied calls fail with
EPERM.
Source: seccomp(2) and the kernel's documentation (userspace-api/seccomp_filter); numbers are of the kernel's tables of
system calls for x86-64 and for arm64.
"""

import ctypes
import errno
import os
import platform
from collections.abc import Mapping
from types import MappingProxyType

from warpbus.errors import DeviceError

_ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}  # AUDIT_ARCH_*
_SECCOMP = {"x86_64": 317, "aarch64": 277}

_SET_MODE_FILTER, _GET_ACTION_AVAIL = 1, 2
_TSYNC = 1  # SECCOMP_FILTER_FLAG_TSYNC: all threads

_KILL, _ERRNO, _ALLOW = 0x80000000, 0x00050000, 0x7FFF0000  # SECCOMP_RET_*
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06  # BPF_LD|W|ABS, BPF_JMP|JEQ|K, ...
_NUMBER, _ARCHITECTURE, _ARGUMENTS = 0, 4, 16  # offsets in struct seccomp_data

_X32 = 0x40000000
_CLONE_THREAD = 0x10000
_AF_UNIX = 1
_TIOCSTI, _TIOCLINUX = 0x5412, 0x541C  # they type on the terminal that the daemon was started in

# Of each system call its numbers on x86-64 and on arm64, None where it does not exist.
_DENIED: Mapping[str, tuple[int | None, int | None]] = MappingProxyType({
    # other programs and processes
    "execve": (59, 221), "execveat": (322, 281), "fork": (57, None), "vfork": (58, None), "ptrace": (101, 117),
    "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "process_madvise": (440, 440),
    "process_mrelease": (448, 448), "kcmp": (312, 272), "pidfd_open": (434, 434), "pidfd_getfd": (438, 438),
    "pidfd_send_signal": (424, 424), "tkill": (200, 130), "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240),
    # namespaces and file systems
    "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41), "chroot": (161, 51), "open_tree": (428, 428),
    "move_mount": (429, 429), "fsopen": (430, 430), "fsconfig": (431, 431), "fsmount": (432, 432),
    "fspick": (433, 433), "mount_setattr": (442, 442), "open_tree_attr": (467, 467), "setns": (308, 268),
    "unshare": (272, 97), "open_by_handle_at": (304, 265), "name_to_handle_at": (303, 264), "quotactl": (179, 60),
    "quotactl_fd": (443, 443), "swapon": (167, 224), "swapoff": (168, 225), "acct": (163, 89),
    # large parts of the kernel that nothing here uses, io_uring also because it makes calls that no filter sees
    "io_uring_setup": (425, 425), "io_uring_enter": (426, 426), "io_uring_register": (427, 427), "bpf": (321, 280),
    "perf_event_open": (298, 241), "userfaultfd": (323, 282), "keyctl": (250, 219), "add_key": (248, 217),
    "request_key": (249, 218), "modify_ldt": (154, None), "personality": (135, 92), "vhangup": (153, 58),
    # memory, semaphores and queues that are shared by number with all processes of the user
    "shmget": (29, 194), "shmat": (30, 196), "semget": (64, 190), "msgget": (68, 186), "mq_open": (240, 180),
    # the machine
    "init_module": (175, 105), "finit_module": (313, 273), "delete_module": (176, 106), "kexec_load": (246, 104),
    "kexec_file_load": (320, 294), "reboot": (169, 142), "syslog": (103, 116), "settimeofday": (170, 170),
    "clock_settime": (227, 112), "adjtimex": (159, 171), "clock_adjtime": (305, 266), "iopl": (172, None),
    "ioperm": (173, None),
})  # fmt: skip
# Denied where the process may not have sockets of its own at all.
_SOCKETS: Mapping[str, tuple[int | None, int | None]] = MappingProxyType({
    "socket": (41, 198), "connect": (42, 203), "bind": (49, 200), "listen": (50, 201), "accept": (43, 202),
    "accept4": (288, 242),
})  # fmt: skip
_CLONE, _CLONE3 = (56, 220), 435
_KILL_CALL, _TGKILL, _PRLIMIT, _IOCTL = (62, 129), (234, 131), (302, 261), (16, 29)

_libc = ctypes.CDLL(None, use_errno=True)


class _BpfInstruction(ctypes.Structure):
    """struct sock_filter."""

    _fields_ = (("code", ctypes.c_uint16), ("jt", ctypes.c_uint8), ("jf", ctypes.c_uint8), ("k", ctypes.c_uint32))


class _BpfProgram(ctypes.Structure):
    """struct sock_fprog."""

    _fields_ = (("length", ctypes.c_uint16), ("instructions", ctypes.POINTER(_BpfInstruction)))


def available() -> bool:
    """Whether this kernel has it, for an architecture whose system calls are known here."""
    machine = platform.machine()
    if machine not in _ARCHITECTURES:
        return False
    action = ctypes.c_uint32(_ERRNO)
    found: int = _libc.syscall(_SECCOMP[machine], _GET_ACTION_AVAIL, ctypes.c_uint(0), ctypes.byref(action))
    return found == 0


def restrict(*, unix_sockets: bool) -> None:
    """Deny all threads of this process to start programs and processes, to create namespaces, and to open sockets.

    The process needs `no_new_privs` (prctl(2)) before.

    Args:
        unix_sockets: it may make Unix sockets, and none of other kinds.

    Raises:
        DeviceError: the kernel refuses.
    """
    code = _filter(platform.machine(), os.getpid(), unix_sockets=unix_sockets)
    program = _BpfProgram(len(code), (_BpfInstruction * len(code))(*code))
    number = ctypes.c_long(_SECCOMP[platform.machine()])
    result = _libc.syscall(number, _SET_MODE_FILTER, ctypes.c_uint(_TSYNC), ctypes.byref(program))
    if result:
        why = os.strerror(ctypes.get_errno()) if result < 0 else f"thread {result} has another filter"
        raise DeviceError(f"a seccomp filter cannot be set ({why}): see warpbus doctor")


def _filter(machine: str, pid: int, *, unix_sockets: bool) -> list[_BpfInstruction]:
    which = list(_ARCHITECTURES).index(machine)
    deny = _BpfInstruction(_RETURN, 0, 0, _ERRNO | errno.EPERM)
    allow = _BpfInstruction(_RETURN, 0, 0, _ALLOW)

    def when(number: int | None, *block: _BpfInstruction) -> list[_BpfInstruction]:
        """`block` returns, for the system call of that number; others go on behind it."""
        return [] if number is None else [_BpfInstruction(_EQUAL, 0, len(block), number), *block]

    def argument(index: int, code: int, *values: int) -> list[_BpfInstruction]:
        """Allow the call if its argument is one of the values (or has one of the bits), else deny it."""
        tests = [_BpfInstruction(code, len(values) - at, 0, value) for at, value in enumerate(values)]
        return [_BpfInstruction(_LOAD, 0, 0, _ARGUMENTS + 8 * index), *tests, deny, allow]

    code = [
        _BpfInstruction(_LOAD, 0, 0, _ARCHITECTURE),
        _BpfInstruction(_EQUAL, 1, 0, _ARCHITECTURES[machine]),
        _BpfInstruction(_RETURN, 0, 0, _KILL),
        _BpfInstruction(_LOAD, 0, 0, _NUMBER),
    ]
    if machine == "x86_64":
        code += [_BpfInstruction(_AT_LEAST, 0, 1, _X32), deny]
    for numbers in (*_DENIED.values(), *(() if unix_sockets else _SOCKETS.values())):
        code += when(numbers[which], deny)
    if unix_sockets:
        code += when(_SOCKETS["socket"][which], *argument(0, _EQUAL, _AF_UNIX))
    # The C library tries clone3 first, whose flags a filter cannot read, and is content if there is none.
    code += when(_CLONE3, _BpfInstruction(_RETURN, 0, 0, _ERRNO | errno.ENOSYS))
    code += when(_CLONE[which], *argument(0, _ANY_BIT, _CLONE_THREAD))
    code += when(_KILL_CALL[which], *argument(0, _EQUAL, pid))
    code += when(_TGKILL[which], *argument(0, _EQUAL, pid))
    code += when(_PRLIMIT[which], *argument(0, _EQUAL, 0, pid))
    terminal = argument(1, _EQUAL, _TIOCSTI, _TIOCLINUX)
    code += when(_IOCTL[which], *terminal[:-2], allow, deny)
    return [*code, allow]
