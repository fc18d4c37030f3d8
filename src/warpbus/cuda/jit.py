"""CUDA C++ to machine code at run time: NVRTC through `cuda.core`, and a cache on disk.

A cache entry is one file, named by the hash of everything that decides about its content: the source with all files it
includes, the macros, the options, the architecture, and the versions of NVRTC and of CUDA's headers. It appears whole
(written aside and renamed), one process compiles while others that want the same wait, and an entry whose checksum
does not match is compiled again. Where the entry is there, no compiler is loaded.
"""

import functools
import hashlib
import importlib
import importlib.metadata
import io
import json
import os
import re
import tempfile
import threading
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from warpbus.cuda.compiled_cache import alone, cache_directory, lock_name, source_key
from warpbus.cuda.remote import remote_backend
from warpbus.errors import DeviceError

# The tests compile for these, on machines without a GPU too.
ARCHITECTURES = ("sm_80", "sm_86", "sm_89", "sm_90a", "sm_100a", "sm_120a")

_importing = threading.Lock()
_FORMAT = 1  # of a cache entry
_FUNCTION = re.compile(r"Compiling entry function '([^']+)'")
_STACK = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_USED = re.compile(r"Used (\d+) registers")
_SHARED = re.compile(r"(\d+) bytes smem")
# The options that decide about machine code, besides the architecture and the macros.
_OPTIONS: dict[str, Any] = {"std": "c++17", "lineinfo": True, "ptxas_options": ["-v"]}
# Of CUDA's headers, those that kernels include: where no wheel tells the version, their content does.
_INCLUDED = ("cuda_fp16.h", "cuda_fp16.hpp", "cuda_bf16.h", "cuda_bf16.hpp", "cuda_fp8.h", "cuda_fp8.hpp", "mma.h")
_INSTALL = "install it with: pip install 'warpbus[cuda]'"


@dataclass(frozen=True)
class Resources:
    """The resources of one kernel: registers per thread; bytes of static shared memory per block; bytes of stack, and
    of spilled registers stored and loaded, per thread."""

    registers: int
    shared: int
    stack: int
    spill_stores: int
    spill_loads: int


@dataclass(frozen=True)
class Cubin:
    """Machine code for one architecture.

    Attributes:
        resources: of each kernel by its name.
        remarks: warnings of the assembler, such as wgmma instructions that it had to serialize.
    """

    code: bytes
    resources: dict[str, Resources]
    remarks: tuple[str, ...]


def architecture(device: int | torch.device) -> str:
    """The architecture that code for a GPU is compiled for, with the instructions of its own generation: "sm_90a".

    Of a remote device it is that of the GPU behind it.
    """
    backend = remote_backend(device) if isinstance(device, torch.device) else None
    capability = None if backend is None else backend.capability()
    return _own_architecture(device) if capability is None else _named(*capability)


@functools.cache
def _own_architecture(device: int | torch.device) -> str:
    return _named(*torch.cuda.get_device_capability(device))


def _named(major: int, minor: int) -> str:
    return f"sm_{major}{minor}" + ("a" if major >= 9 else "")


def compile_source(source: Path, root: Path, macros: tuple[tuple[str, str], ...], arch: str) -> Cubin:
    """The cubin of a file of CUDA C++, from the cache or compiled.

    Args:
        source: the file.
        root: where its `#include "..."` are looked up.
        macros: names and values.
        arch: such as "sm_90a".

    Raises:
        DeviceError: no compiler is installed, or it rejected the source; the message has its first error.
    """
    entry = cache_directory() / f"{source.stem}-{arch}-{_key(source, root, macros, arch)}.cubin"
    found = _read(entry)
    if found is not None:
        return found
    try:
        with alone(entry):
            found = _read(entry)
            if found is None:
                found = _compile(source, root, macros, arch)
                _write(entry, found)
    except OSError as error:
        # A cache that cannot be written costs time and nothing else; the kernel is right all the same.
        warnings.warn(f"the kernel cache {entry.parent} cannot be used ({error}): compiling every time", stacklevel=2)
        found = _compile(source, root, macros, arch)
    return found


@functools.cache
def compiler_version() -> str:
    """The versions of NVRTC and of CUDA's headers, "13.0.88, headers 13.0.96".

    Of a system's toolkit, the library's file name and a hash of the headers: NVRTC itself tells no third number.

    Raises:
        DeviceError: NVRTC is not installed.
    """
    nvrtc = _distribution("nvidia-cuda-nvrtc") or _nvrtc_version()
    return f"{nvrtc}, headers {_distribution('nvidia-cuda-runtime') or _header_version()}"


def _distribution(name: str) -> str | None:
    """The version of an installed wheel: a hundred times faster than to load the library and to ask it."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _nvrtc_version() -> str:
    try:
        from cuda.bindings import nvrtc  # heavy, and absent on machines that only run on the CPU
        from cuda.pathfinder import load_nvidia_dynamic_lib
    except ImportError:
        raise DeviceError(f"no CUDA compiler (NVRTC) is installed: {_INSTALL}") from None
    try:
        _, major, minor = nvrtc.nvrtcVersion()
    except Exception as error:  # cuda.pathfinder raises its own types where the library is missing
        raise DeviceError(f"no CUDA compiler (NVRTC) was found ({error}): {_INSTALL}") from None
    return f"{major}.{minor} {Path(load_nvidia_dynamic_lib('nvrtc').abs_path or '').resolve().name}"


def _header_version() -> str:
    digest = hashlib.sha256()
    for name in _INCLUDED:
        path = next((Path(folder, name) for folder in _headers() if Path(folder, name).is_file()), None)
        if path is not None:
            digest.update(f"{name} {path.stat().st_size}\n".encode() + path.read_bytes())
    return f"of the system {digest.hexdigest()[:16]}"


def _key(source: Path, root: Path, macros: tuple[tuple[str, str], ...], arch: str) -> str:
    return source_key(source, root, _FORMAT, compiler_version(), arch, macros, json.dumps(_OPTIONS, sort_keys=True))


def _read(entry: Path) -> Cubin | None:
    """A cache entry, or `None` where it is absent or damaged."""
    try:
        header, code = entry.read_bytes().split(b"\n", 1)
        facts = json.loads(header)
        if facts["sha256"] != hashlib.sha256(code).hexdigest():
            return None
        resources = {name: Resources(**values) for name, values in facts["resources"].items()}
        return Cubin(code, resources, tuple(facts["remarks"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _write(entry: Path, cubin: Cubin) -> None:
    """Write an entry, within `alone`; what processes left behind that were killed at it is removed."""
    for abandoned in entry.parent.glob(f"*{lock_name(entry)}.*.part"):  # who writes there has the lock, and we have it
        abandoned.unlink(missing_ok=True)
    facts = {
        "sha256": hashlib.sha256(cubin.code).hexdigest(),
        "resources": {name: asdict(values) for name, values in cubin.resources.items()},
        "remarks": cubin.remarks,
    }
    handle, temporary = tempfile.mkstemp(dir=entry.parent, prefix=f"{entry.stem}.", suffix=".part")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(json.dumps(facts).encode() + b"\n" + cubin.code)
        os.replace(temporary, entry)
    except BaseException:
        os.unlink(temporary)
        raise


def _compile(source: Path, root: Path, macros: tuple[tuple[str, str], ...], arch: str) -> Cubin:
    core = _compiler()
    options = core.ProgramOptions(
        name=str(source.relative_to(root)),
        arch=arch,
        define_macro=list(macros) or None,
        include_path=[str(root), *_headers()],
        **_OPTIONS,
    )
    log = io.StringIO()
    try:
        code = core.Program(source.read_text(encoding="utf-8"), "c++", options).compile("cubin", logs=log).code
    except Exception as error:  # cuda.core raises private types
        lines = [line.strip() for line in str(error).splitlines()]
        first = next((line for line in lines if "error" in line and "NVRTC_ERROR" not in line), " ".join(lines))
        raise DeviceError(f"{source.relative_to(root)} does not compile for {arch}: {first}") from error
    return Cubin(bytes(code), *_parse(log.getvalue()))


def _compiler() -> ModuleType:
    """`cuda.core`, imported when it is needed: it is heavy, and absent on machines that only run on the CPU."""
    with _importing:  # its first import is not safe in several threads at once
        try:
            return importlib.import_module("cuda.core")
        except ImportError as error:
            raise DeviceError(f"a kernel has to be compiled, and cuda-core is missing ({error}): {_INSTALL}") from None


@functools.cache
def _headers() -> tuple[str, ...]:
    """The folders of CUDA's own headers: those of the wheels, then those of a toolkit."""
    from cuda.pathfinder import find_nvidia_header_directory, get_cuda_path_or_home  # with cuda.core

    toolkit = get_cuda_path_or_home() or "/usr/local/cuda"
    candidates = [find_nvidia_header_directory("cudart"), f"{toolkit}/include"]
    found = tuple(folder for folder in candidates if folder and Path(folder, "cuda_fp16.h").is_file())
    if not found:
        raise DeviceError(f"CUDA's headers (cuda_fp16.h) were not found: {_INSTALL}")
    return found


def _parse(log: str) -> tuple[dict[str, Resources], tuple[str, ...]]:
    """The resources of each kernel, and the warnings, from what the assembler printed."""
    resources: dict[str, Resources] = {}
    remarks = []
    name, stack = "", (0, 0, 0)
    for line in log.splitlines():
        if match := _FUNCTION.search(line):
            name = match[1]
        elif match := _STACK.search(line):
            stack = (int(match[1]), int(match[2]), int(match[3]))
        elif match := _USED.search(line):
            shared = _SHARED.search(line)
            resources[name] = Resources(int(match[1]), int(shared[1]) if shared else 0, *stack)
        elif "warning" in line.lower() or "Potential Performance Loss" in line:
            remarks.append(line.strip())
    return resources, tuple(remarks)
