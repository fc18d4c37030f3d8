"""C++ to machine code for this machine's CPU at run time, by the system's compiler, kept in `compiled_cache`.

A library is compiled once for each of `VARIANTS` that is used: for the newest instructions that the CPU has. A cache
entry is a shared library, named by the hash of everything that decides about its content. It appears whole (written
aside and renamed), and one process compiles while others that want the same wait.
"""

import contextlib
import ctypes
import functools
import os
import platform
import subprocess
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from warpbus.cuda.compiled_cache import alone, cache_directory, source_key
from warpbus.cuda.cpu import INSTALL, cpu_instructions, find_compiler
from warpbus.errors import DeviceError

# No contraction of products and sums on the compiler's own account: the same bits from every compiler.
_FLAGS = ("-std=c++17", "-O3", "-ffp-contract=off", "-fPIC", "-shared", "-pthread")
_ROOT = 0  # user id
_LONGEST = 600  # seconds of a compilation


@dataclass(frozen=True)
class CpuVariant:
    """The targets that a library can be compiled for.

    Attributes:
        needs: instruction sets, by the names of Linux.
        flags: of the compiler.
    """

    name: str
    needs: frozenset[str]
    flags: tuple[str, ...]

    @property
    def runs_here(self) -> bool:
        """Whether this machine's CPU has the instructions."""
        return self.needs <= cpu_instructions()


def _x86(name: str, macros: str, needs: str, flags: str) -> CpuVariant:
    defined = (f"-D{macro}" for macro in macros.split())
    return CpuVariant(name, frozenset(needs.split()), (*defined, *(f"-m{flag}" for flag in flags.split())))


_AVX512_NEEDS = "avx512f avx512bw avx512dq avx512vl avx512_vnni fma f16c"
_AVX512_FLAGS = "avx512f avx512bw avx512dq avx512vl avx512vnni fma f16c"

VARIANTS = (
    # Compilers that do not know AMX would refuse its flags; csrc/cpu/amx.h does without.
    _x86("amx", "LANES_AVX512_VNNI LANES_AMX", f"{_AVX512_NEEDS} amx_tile amx_int8", _AVX512_FLAGS),
    _x86("avx512-vnni", "LANES_AVX512_VNNI", _AVX512_NEEDS, _AVX512_FLAGS),
    _x86("avx-vnni", "LANES_AVX_VNNI", "avx2 avx_vnni fma f16c", "avx2 avxvnni fma f16c"),
    _x86("avx2", "LANES_AVX2", "avx2 fma f16c", "avx2 fma f16c"),
    CpuVariant("plain", frozenset(), ()),
)
"""Those with the newest instructions first; the last one runs on every CPU."""


def own_variant() -> CpuVariant:
    """The first of `VARIANTS` that this CPU runs."""
    return next(variant for variant in VARIANTS if variant.runs_here)


@functools.cache
def load_library(source: Path, root: Path, variant: CpuVariant) -> ctypes.CDLL:
    """Compile a file of C++, or find it in the cache, and load it.

    Args:
        source: the file.
        root: where its `#include "..."` are looked up.
        variant: one that runs here.

    Raises:
        DeviceError: there is no compiler, it rejected the source, or what it made cannot be loaded.
    """
    flags = (*_FLAGS, *variant.flags)
    entry = _entry(source, root, variant.name, flags, ".so")
    try:
        _make_once(source, root, variant.name, flags, entry)
        return ctypes.CDLL(str(entry))
    except OSError as error:
        _warn_of_cache(error)
    with tempfile.TemporaryDirectory(prefix="warpbus-") as directory:
        temporary = Path(directory) / entry.name
        try:
            _compile(source, root, variant.name, flags, temporary)
            return ctypes.CDLL(str(temporary))
        except OSError as error:
            raise DeviceError(
                f"{source.name}, compiled for this CPU, cannot be loaded ({error}): let TMPDIR name a directory on a "
                "file system that may hold programs"
            ) from error


def make_library(source: Path, root: Path, variant: CpuVariant) -> None:
    """Compile a file of C++ to its `library_path`, unless it is in the cache.

    Raises:
        DeviceError: there is no compiler, or it rejected the source.
        OSError: the cache cannot be used.
    """
    _make_once(source, root, variant.name, (*_FLAGS, *variant.flags), library_path(source, root, variant))


def library_path(source: Path, root: Path, variant: CpuVariant) -> Path:
    """The place of a library in the cache, whether it is there or not.

    Raises:
        DeviceError: there is no compiler, whose version decides about the place.
    """
    return _entry(source, root, variant.name, (*_FLAGS, *variant.flags), ".so")


def open_library(path: Path) -> ctypes.CDLL | None:
    """Load what `make_library` has made, by its `library_path`; None if it is not there yet.

    Raises:
        OSError: it cannot be loaded, or belongs to another user.
    """
    if not path.exists():
        return None
    if not _is_ours(path):
        raise PermissionError(f"{path} belongs to another user")
    return ctypes.CDLL(str(path))


@contextlib.contextmanager
def kept_object(source: Path, root: Path, flags: Sequence[str]) -> Iterator[Path]:
    """An object file, compiled once with these flags; without a usable cache, every time.

    Args:
        source, root: see `load_library`.
        flags: of the compiler.

    Raises:
        DeviceError: there is no compiler, or it rejected the source.
    """
    target, all_flags = platform.machine(), (*flags, "-c")
    entry = _entry(source, root, target, all_flags, ".o")
    try:
        _make_once(source, root, target, all_flags, entry)
    except OSError as error:
        _warn_of_cache(error)
    else:
        yield entry
        return
    with tempfile.TemporaryDirectory(prefix="warpbus-") as directory:
        temporary = Path(directory) / entry.name
        _compile(source, root, target, all_flags, temporary)
        yield temporary


def _entry(source: Path, root: Path, target: str, flags: Sequence[str], ending: str) -> Path:
    compiler = find_compiler()
    key = source_key(source, root, compiler, compiler_version(compiler), tuple(flags), platform.machine())
    return cache_directory() / f"{source.stem}-{target}-{key}{ending}"


def _make_once(source: Path, root: Path, target: str, flags: Sequence[str], entry: Path) -> None:
    if not _is_ours(entry):
        with alone(entry):
            if not _is_ours(entry):
                _compile(source, root, target, flags, entry)


def _warn_of_cache(error: OSError) -> None:
    warnings.warn(f"the kernel cache {cache_directory()} cannot be used ({error}): compiling every time", stacklevel=3)


def _is_ours(entry: Path) -> bool:
    """Whether an entry is there, and was written by this user or the system's: it is going to be executed."""
    try:
        return entry.stat().st_uid in (_ROOT, os.getuid())
    except FileNotFoundError:
        return False


@functools.cache
def compiler_version(compiler: tuple[str, ...]) -> str:
    """What a compiler says of itself."""
    return _run((*compiler, "--version")).stdout


def _compile(source: Path, root: Path, target: str, flags: Sequence[str], entry: Path) -> None:
    handle, temporary = tempfile.mkstemp(dir=entry.parent, prefix=f"{entry.stem}.", suffix=".part")
    os.close(handle)
    try:
        done = _run((*find_compiler(), *flags, "-I", str(root), "-o", temporary, str(source)))
        if done.returncode:
            lines = done.stderr.splitlines()
            first = next((line for line in lines if "error" in line), " ".join(lines[:1]))
            raise DeviceError(f"{source.relative_to(root)} does not compile for {target}: {first}")
        os.replace(temporary, entry)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def _run(command: tuple[str, ...]) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=False, timeout=_LONGEST)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise DeviceError(f"the C++ compiler {' '.join(command)} does not run ({error}): {INSTALL}") from error
