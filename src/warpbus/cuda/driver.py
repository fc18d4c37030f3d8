"""The CUDA driver: load machine code, launch it, ask a device for its limits.

`ctypes` on `libcuda.so.1` and nothing else: a launch costs a few microseconds from Python, and the parameters of a
kernel, tensor maps among them, are packed at once by `struct`. Source: the CUDA driver API reference, the chapters on
library management and execution control.
"""

import ctypes
import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from warpbus.errors import DeviceError

# CUdevice_attribute
MAX_THREADS_PER_BLOCK = 1
MAX_BLOCK_DIM_X = 2
MAX_GRID_DIM_X = 5
MULTIPROCESSOR_COUNT = 16
CAPABILITY_MAJOR = 75
CAPABILITY_MINOR = 76
MAX_SHARED_MEMORY_PER_BLOCK_OPTIN = 97

_MAX_DYNAMIC_SHARED = 8  # CUfunction_attribute
NON_BLOCKING = 1  # CUstream_flags
_RELAXED = 2  # CUstreamCaptureMode
_INVALID_VALUE = 1  # CUresult
_CLUSTER_DIMENSION = 4  # CUlaunchAttributeID
_PROGRAMMATIC_STREAM_SERIALIZATION = 6


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute: an id, padding, and a union of 64 bytes, of which we use integers."""

    _fields_ = (("id", ctypes.c_uint), ("padding", ctypes.c_uint), ("value", ctypes.c_uint * 16))


class _Configuration(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("count", ctypes.c_uint),
    )


@functools.cache
def library() -> ctypes.CDLL:
    """The driver's library.

    Raises:
        DeviceError: no NVIDIA driver is installed.
    """
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError:
        raise DeviceError("no NVIDIA driver (libcuda.so.1) was found: install it, or use --device cpu") from None


def check(status: int, what: str) -> None:
    """Raise what a driver call returned, unless it succeeded.

    Raises:
        DeviceError: with the driver's own name and description of the error.
    """
    if status:
        raise DeviceError(f"{what}: {describe(status)}")


def describe(status: int) -> str:
    """The driver's name and description of a status."""
    name, text = ctypes.c_char_p(), ctypes.c_char_p()
    library().cuGetErrorName(status, ctypes.byref(name))
    library().cuGetErrorString(status, ctypes.byref(text))
    return f"{(name.value or b'error').decode()} ({status}), {(text.value or b'unknown').decode()}"


@functools.cache
def attribute(which: int, device: int) -> int:
    """One of the limits of a device, by its number in `CUdevice_attribute`."""
    value = ctypes.c_int()
    check(library().cuDeviceGetAttribute(ctypes.byref(value), which, device), f"attribute {which} of GPU {device}")
    return value.value


def shared_memory_of_block(device: int) -> int:
    """Bytes of shared memory that a block can ask for."""
    return attribute(MAX_SHARED_MEMORY_PER_BLOCK_OPTIN, device)


def create_stream() -> int:
    """The handle of a new stream of the current context, which does not wait for others by itself."""
    handle = ctypes.c_void_p()
    check(library().cuStreamCreate(ctypes.byref(handle), NON_BLOCKING), "making a stream")
    assert handle.value
    return handle.value


@contextmanager
def relaxed_capture() -> Iterator[None]:
    """Allow this thread the calls that a stream capture forbids, such as loading code, while it captures."""
    mode = ctypes.c_int(_RELAXED)
    check(library().cuThreadExchangeStreamCaptureMode(ctypes.byref(mode)), "relaxing the capture mode")
    try:
        yield
    finally:
        status = library().cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))  # back to what it was
    check(status, "restoring the capture mode")


def load(code: bytes, label: str) -> ctypes.c_void_p:
    """Load a cubin into this process, for every device that it fits. It stays until the process ends."""
    handle = ctypes.c_void_p()
    status = library().cuLibraryLoadData(ctypes.byref(handle), code, None, None, 0, None, None, 0)
    check(status, f"loading {label}")
    return handle


def kernel(loaded: ctypes.c_void_p, name: str, label: str) -> ctypes.c_void_p:
    """A kernel of a loaded cubin by its name, loaded into the current context: the driver would do so at its launch."""
    handle, function = ctypes.c_void_p(), ctypes.c_void_p()
    check(library().cuLibraryGetKernel(ctypes.byref(handle), loaded, name.encode()), f"{label}: kernel {name}")
    check(library().cuKernelGetFunction(ctypes.byref(function), handle), f"{label}: loading kernel {name}")
    return handle


def parameter_layout(handle: ctypes.c_void_p, label: str) -> list[tuple[int, int]] | None:
    """Offset and size in bytes of each parameter of a kernel; None with a driver before CUDA 12.4.

    Offsets count from the first parameter. The driver counts from the constant bank, in which a first parameter that is
    aligned to 64 bytes (a tensor map) begins at 48.
    """
    ask = getattr(library(), "cuKernelGetParamInfo", None)
    if ask is None:
        return None
    found: list[tuple[int, int]] = []
    offset, size = ctypes.c_size_t(), ctypes.c_size_t()
    while True:
        status = ask(handle, ctypes.c_size_t(len(found)), ctypes.byref(offset), ctypes.byref(size))
        if status == _INVALID_VALUE:  # no parameter has that number
            return [(begin - found[0][0], nbytes) for begin, nbytes in found]
        check(status, f"{label}: parameter {len(found)}")
        found.append((offset.value, size.value))


def allow_shared_memory(handle: ctypes.c_void_p, size: int, device: int, label: str) -> None:
    """Let a kernel be launched with `size` bytes of dynamic shared memory, which beyond 48 KB it has to ask for.

    Raises:
        DeviceError: the device has less.
    """
    limit = shared_memory_of_block(device)
    if size > limit:
        raise DeviceError(f"{label} needs {size} bytes of shared memory a block, GPU {device} has {limit}")
    status = library().cuKernelSetAttribute(_MAX_DYNAMIC_SHARED, size, handle, device)
    check(status, f"{label}: {size} bytes of shared memory")


def launch(
    handle: ctypes.c_void_p,
    grid: tuple[int, int, int],
    block: tuple[int, int, int],
    parameters: bytes,
    offsets: tuple[int, ...],
    *,
    shared: int,
    stream: int,
    cluster: int,
    dependent: bool,
) -> int:
    """Launch a kernel and return the driver's status.

    Args:
        parameters: the kernel's parameters laid out as C would, all in one; `offsets`: where each of them begins.
        shared: dynamic shared memory, bytes.
        stream: the driver's handle.
        cluster: blocks that form a cluster along x (compute capability 9.0 and later); 1 for none.
        dependent: the kernel may start before the one ahead of it in the stream has ended, and waits for it itself
            (griddepcontrol.wait).
    """
    configuration = _Configuration(grid, block, shared, stream, *_attributes(cluster, dependent))
    packed = _buffer(len(parameters)).from_buffer_copy(parameters)
    base = ctypes.addressof(packed)
    # One pointer a parameter: passed as one buffer, tensor maps arrive where the copy engine cannot read them.
    places = _pointers(len(offsets))(*[base + offset for offset in offsets])
    status: int = library().cuLaunchKernelEx(ctypes.byref(configuration), handle, places, None)
    return status


@functools.cache
def _attributes(cluster: int, dependent: bool) -> tuple[ctypes.Array[_Attribute], int]:
    """The attributes of a launch, which the driver only reads, and their number."""
    attributes = (_Attribute * 2)()
    count = 0
    if cluster > 1:
        attributes[count].id = _CLUSTER_DIMENSION
        attributes[count].value[:3] = (cluster, 1, 1)
        count += 1
    if dependent:
        attributes[count].id = _PROGRAMMATIC_STREAM_SERIALIZATION
        attributes[count].value[0] = 1
        count += 1
    return attributes, count


@functools.cache
def _buffer(nbytes: int) -> type[ctypes.Array[ctypes.c_char]]:
    return ctypes.c_char * nbytes


@functools.cache
def _pointers(count: int) -> type[ctypes.Array[ctypes.c_void_p]]:
    return ctypes.c_void_p * count


def resident_clusters(handle: ctypes.c_void_p, block: tuple[int, int, int], *, shared: int, cluster: int) -> int:
    """How many clusters of a kernel a device can run at the same time; 0 if it cannot run one.

    Args:
        block, shared, cluster: as `launch` has them; the kernel is allowed the shared memory.
    """
    attributes = (_Attribute * 1)()
    attributes[0].id = _CLUSTER_DIMENSION
    attributes[0].value[:3] = (cluster, 1, 1)
    configuration = _Configuration((cluster, 1, 1), block, shared, None, attributes, 1)
    count = ctypes.c_int()
    status = library().cuOccupancyMaxActiveClusters(ctypes.byref(count), handle, ctypes.byref(configuration))
    return 0 if status else count.value


def explain_launch(status: int, grid: Any, block: Any, shared: int, device: int, label: str) -> DeviceError:
    """The error of a launch that failed, with the limit of the device that it broke."""
    threads = block[0] * block[1] * block[2]
    limits = [attribute(MAX_GRID_DIM_X + axis, device) for axis in range(3)]
    sides = [attribute(MAX_BLOCK_DIM_X + axis, device) for axis in range(3)]
    most = attribute(MAX_THREADS_PER_BLOCK, device)
    at_most = shared_memory_of_block(device)
    if min(*grid, *block) < 1:
        reason = "every side of grid and block has to be at least 1"
    elif threads > most or any(side > limit for side, limit in zip(block, sides, strict=True)):
        reason = f"a block has {threads} threads, GPU {device} allows {most}, at most {sides} a side"
    elif any(side > limit for side, limit in zip(grid, limits, strict=True)):
        reason = f"GPU {device} allows a grid of at most {limits}"
    elif shared > at_most:
        reason = f"{shared} bytes of shared memory a block, GPU {device} allows {at_most}"
    else:
        reason = describe(status)
    return DeviceError(f"{label}: launch with grid {tuple(grid)}, block {tuple(block)} failed: {reason}")
