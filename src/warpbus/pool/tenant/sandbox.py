"""The sandbox of a tenant's process, whatever code runs in it: the kernel is asked for it before a client comes.

    enter(confinement)    first of all, before torch is loaded and there are threads: files, TCP, signals, capabilities
    limit_memory(nbytes)  on a CPU, before tensors are made
    seal(gpu=...)         when the device is open, before clients come: programs, processes, sockets

Both are for good. What this machine's kernel cannot do is left out; `missing` says what that is, and the daemon and
`warpbus doctor` tell it. Nothing here loads torch.
"""

import ctypes
import importlib.util
import json
import os
import resource
import site
import ssl
import sys
import sysconfig
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

from warpbus.errors import DeviceError
from warpbus.pool.tenant import landlock, seccomp

_PR_SET_NO_NEW_PRIVS, _PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL = 38, 47, 4  # linux/prctl.h
_CAPABILITY_VERSION = 0x20080522

# The paths that the loader, the C library, TLS and CUDA's driver read. No rule here leads to keys, tokens or homes.
_SYSTEM = (
    *("/usr", "/lib", "/lib32", "/lib64", "/bin", "/nix/store", "/proc", "/sys"),
    *("/etc/ld.so.cache", "/etc/ld.so.conf", "/etc/ld.so.conf.d", "/etc/ld.so.preload", "/etc/alternatives"),
    *("/etc/localtime", "/etc/nsswitch.conf", "/etc/passwd", "/etc/group", "/etc/hosts", "/etc/nvidia"),
    *("/etc/ssl/certs", "/etc/ssl/openssl.cnf", "/etc/pki/tls/certs", "/etc/pki/ca-trust", "/etc/ca-certificates"),
)
_DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")
_GPU_DEVICES = ("nvidia*", "dxg", "shm")
# What a tenant's process imports, with the requirements of torch.
_PACKAGES = (
    *("warpbus", "torch", "numpy", "msgpack", "safetensors"),
    *("filelock", "fsspec", "jinja2", "markupsafe", "mpmath", "networkx", "setuptools", "sympy", "typing_extensions"),
)
_OWN_THREADS = "/proc/self/task"  # CUDA's driver names its threads in it: where it cannot, cuInit returns error 304

_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True)
class Confinement:
    """The permissions of a process.

    Attributes:
        read: files and directories.
        write: the same; directories with all below them.
        gpu: it computes on a GPU. CUDA's driver needs Unix sockets (CUDA IPC, MPS) and /dev/shm, and names its threads.
    """

    read: tuple[str, ...]
    write: tuple[str, ...]
    gpu: bool

    @classmethod
    def of(cls, read: Iterable[Path], write: Iterable[Path], *, gpu: bool) -> Self:
        """The paths that this Python and its packages need, and these paths."""
        devices = [*map(Path, _DEVICES), *(each for name in _GPU_DEVICES * gpu for each in Path("/dev").glob(name))]
        devices += [Path(_OWN_THREADS)] * gpu
        return cls(
            tuple(sorted({*_SYSTEM, *map(str, (*_python(), *read))})), tuple(sorted(map(str, (*devices, *write)))), gpu
        )

    def exposes(self, path: Path) -> bool:
        """Whether a file can be read in it."""
        found = path.resolve()
        return any(found.is_relative_to(Path(each).resolve()) for each in (*self.read, *self.write))

    def encode(self) -> str:
        """As text, for `decode`."""
        return json.dumps(asdict(self))

    @classmethod
    def decode(cls, text: str) -> Self:
        """The text that `encode` has written."""
        found = json.loads(text)
        return cls(tuple(found["read"]), tuple(found["write"]), found["gpu"])


def enter(confinement: Confinement) -> None:
    """Give up the rest of the file system, TCP connections, signals to others, capabilities and set-user-ID programs.

    Raises:
        DeviceError: the kernel has what is needed, and refuses.
    """
    _no_new_privileges()
    _drop_capabilities()
    if landlock.version():
        if confinement.gpu:  # it stays open: a rule is for an inode, and procfs drops those that nobody has open
            os.open(_OWN_THREADS, os.O_PATH | os.O_CLOEXEC)
        landlock.restrict(map(Path, confinement.read), map(Path, confinement.write), unix_sockets=confinement.gpu)


def seal(*, gpu: bool) -> None:
    """Give up other programs and processes, and sockets, but for Unix sockets of a process that computes on a GPU.

    Raises:
        DeviceError: the kernel has what is needed, and refuses.
    """
    _no_new_privileges()
    if seccomp.available():
        seccomp.restrict(unix_sockets=gpu)


def missing() -> list[str]:
    """The restrictions that this machine cannot put on tenants' processes: a line for each, with the reason."""
    found = []
    version = landlock.version()
    if not version:
        found.append("files of the daemon's user can be read: this kernel has no Landlock (Linux 5.13, lsm=landlock)")
    elif version < 6:
        found.append(f"signals reach other processes: this kernel's Landlock is version {version}, 6 is in Linux 6.12")
    if not seccomp.available():
        found.append("programs can be started and TCP connections made: this kernel has no seccomp filters")
    return found


def _python() -> list[Path]:
    """Where Python and its packages are, torch and this one included. Not all of `sys.path`: the directory in which the
    daemon was started may be there, and may hold its keys."""
    listed = [sys.prefix, sys.base_prefix, sys.exec_prefix, *site.getsitepackages(), *sysconfig.get_paths().values()]
    listed += os.environ.get("LD_LIBRARY_PATH", "").split(":")
    if site.ENABLE_USER_SITE:
        listed.append(site.getusersitepackages())
    for package in _PACKAGES:  # they may be on PYTHONPATH
        found = importlib.util.find_spec(package)
        if found is not None and found.submodule_search_locations is None:
            listed.append(found.origin or "")  # a module that is one file
        listed += [str(Path(each).parent) for each in (found and found.submodule_search_locations) or ()]
    paths = ssl.get_default_verify_paths()
    listed += [each for each in (paths.cafile, paths.capath) if each]
    return [Path(each).resolve() for each in listed if each and Path(each).exists()]


def _no_new_privileges() -> None:
    if _libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0):
        raise DeviceError("no_new_privs cannot be set: this kernel is older than Linux 3.5")


class _CapabilityHeader(ctypes.Structure):
    """struct __user_cap_header_struct."""

    _fields_ = (("version", ctypes.c_uint32), ("pid", ctypes.c_int))


def _drop_capabilities() -> None:
    """A daemon that runs as root has them, and whatever it starts."""
    _libc.prctl(_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0)
    none = (ctypes.c_uint32 * 6)()
    if _libc.capset(ctypes.byref(_CapabilityHeader(_CAPABILITY_VERSION, 0)), ctypes.byref(none)):
        raise DeviceError(f"capabilities cannot be given up ({os.strerror(ctypes.get_errno())})")


def limit_memory(nbytes: int) -> None:
    """Let the process have so many bytes more than it has: what operators use while they run is in no quota."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    now = 1024 * int(status.partition("VmData:")[2].split()[0])
    _, most = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (now + nbytes, most))
