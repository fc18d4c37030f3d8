"""Landlock: the Linux security module by which a process gives up files, TCP and signals to others, for good.

Source: the kernel's documentation, "Landlock: unprivileged access control" (userspace-api/landlock), and
include/uapi/linux/landlock.h. It concerns the calling thread and all that it starts later, so it comes before threads.
"""

import ctypes
import os
import stat
from collections.abc import Iterable
from pathlib import Path

from warpbus.errors import DeviceError

# The numbers of these calls are the same on all architectures.
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_VERSION = 1  # LANDLOCK_CREATE_RULESET_VERSION
_PATH_BENEATH = 1

_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = 1, 1 << 1, 1 << 2, 1 << 3
_REMOVE_DIR, _REMOVE_FILE, _MAKE_DIR, _MAKE_REG = 1 << 4, 1 << 5, 1 << 7, 1 << 8
_REFER, _TRUNCATE = 1 << 13, 1 << 14
_FILES_OF_FIRST_VERSION = (1 << 13) - 1
_TCP = 0b11  # bind and connect
_ABSTRACT_SOCKETS, _SIGNALS = 1, 2

_READ = _EXECUTE | _READ_FILE | _READ_DIR
_WRITE = _READ_FILE | _READ_DIR | _WRITE_FILE | _REMOVE_DIR | _REMOVE_FILE | _MAKE_DIR | _MAKE_REG | _REFER | _TRUNCATE
_OF_A_FILE = _EXECUTE | _READ_FILE | _WRITE_FILE | _TRUNCATE

_libc = ctypes.CDLL(None, use_errno=True)


class _Ruleset(ctypes.Structure):
    """struct landlock_ruleset_attr."""

    _fields_ = (("files", ctypes.c_uint64), ("net", ctypes.c_uint64), ("scoped", ctypes.c_uint64))


class _PathBeneath(ctypes.Structure):
    """struct landlock_path_beneath_attr."""

    _pack_ = 1
    _fields_ = (("allowed", ctypes.c_uint64), ("parent", ctypes.c_int32))


def version() -> int:
    """Of Landlock in this kernel; 0 where there is none. 4 restricts TCP, 6 signals and abstract Unix sockets."""
    found: int = _libc.syscall(_CREATE_RULESET, None, ctypes.c_size_t(0), ctypes.c_uint(_VERSION))
    return max(0, found)


def restrict(read: Iterable[Path], write: Iterable[Path], *, unix_sockets: bool) -> None:
    """Leave this process only these files and directories, no TCP connections of its own, and no signals to others, as
    far as `version` can. The process needs `no_new_privs` (prctl(2)) before.

    Args:
        read: files and directories that it may read and execute; those that are not there are left out.
        write: that it may also write; in directories it may make, rename and remove files and directories.
        unix_sockets: it may connect to abstract Unix sockets of others.

    Raises:
        DeviceError: the kernel refuses.
    """
    found = version()
    files = _FILES_OF_FIRST_VERSION | (_REFER if found >= 2 else 0) | (_TRUNCATE if found >= 3 else 0)
    scoped = 0 if found < 6 else _SIGNALS if unix_sockets else _SIGNALS | _ABSTRACT_SOCKETS
    attributes = _Ruleset(files, _TCP if found >= 4 else 0, scoped)
    size = 8 if found < 4 else 16 if found < 6 else 24
    ruleset = _call(_CREATE_RULESET, ctypes.byref(attributes), ctypes.c_size_t(size), ctypes.c_uint(0))
    try:
        for paths, access in ((read, _READ), (write, _WRITE)):
            for path in paths:
                _allow(ruleset, path, access & files)
        _call(_RESTRICT_SELF, ctypes.c_int(ruleset), ctypes.c_uint(0))
    finally:
        os.close(ruleset)


def _allow(ruleset: int, path: Path, access: int) -> None:
    try:
        descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:  # it is not there, or out of reach already
        return
    try:
        if not stat.S_ISDIR(os.fstat(descriptor).st_mode):
            access &= _OF_A_FILE
        rule = _PathBeneath(access, descriptor)
        _call(_ADD_RULE, ctypes.c_int(ruleset), ctypes.c_int(_PATH_BENEATH), ctypes.byref(rule), ctypes.c_uint(0))
    finally:
        os.close(descriptor)


def _call(number: int, *arguments: object) -> int:
    result: int = _libc.syscall(number, *arguments)
    if result < 0:
        raise DeviceError(f"Landlock cannot be used ({os.strerror(ctypes.get_errno())}): see warpbus doctor")
    return result
