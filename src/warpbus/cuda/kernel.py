"""Kernels as Python callables: compiled at their first launch on a device, or before it by `Unit.compile`."""

import ctypes
import functools
import re
import threading
from dataclasses import dataclass, field
from pathlib import Path

import torch

from warpbus.cuda import driver
from warpbus.cuda.capabilities import capabilities
from warpbus.cuda.devices import enter_context
from warpbus.cuda.jit import Cubin, Resources, architecture, compile_source
from warpbus.cuda.parameters import Parameters
from warpbus.errors import DeviceError

Extent = int | tuple[int, ...]

_LARGEST_WITHOUT_ASKING = 48 * 1024  # bytes of shared memory a block


@dataclass(frozen=True)
class Unit:
    """One compilation: a file of CUDA C++ with its macros.

    Attributes:
        source: the file; `root`: where its includes are looked up.
        needs: the oldest architecture that it compiles for ("sm_80"), or the only one, where it ends with "a".
        kernels: the declared kernels of the file by their names.
    """

    source: Path
    root: Path
    macros: tuple[tuple[str, str], ...] = ()
    needs: str = "sm_80"
    kernels: dict[str, "Kernel"] = field(default_factory=dict, repr=False, compare=False)
    _libraries: dict[str, ctypes.c_void_p] = field(default_factory=dict, repr=False, compare=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False, compare=False)

    @property
    def label(self) -> str:
        """How messages and tables name it: "gemm/sm80_hgemm.cu STAGES=3"."""
        return " ".join([str(self.source.relative_to(self.root)), *(f"{name}={text}" for name, text in self.macros)])

    def runs_on(self, arch: str) -> bool:
        """Whether it compiles for an architecture."""
        return runs_on(arch, self.needs)

    def compile(self, arch: str) -> Cubin:
        """Its machine code, from the cache or compiled.

        Raises:
            DeviceError: it needs another architecture; or see `compile_source`.
        """
        if not self.runs_on(arch):
            raise DeviceError(f"{self.label} needs {self.needs}, this GPU is {arch}")
        return compile_source(self.source, self.root, self.macros, arch)

    def kernel(self, name: str, parameters: Parameters) -> "Kernel":
        """Declare a kernel of the file; the same kernel for each call.

        Raises:
            DeviceError: it is declared with other parameters already.
        """
        declared = self.kernels.setdefault(name, Kernel(self, name, parameters))
        if declared.parameters is not parameters:
            raise DeviceError(f"{declared.label} is declared twice: declare its parameters once and import the kernel")
        return declared

    def load(self, arch: str) -> ctypes.c_void_p:
        """The loaded code; compiled and loaded at the first call."""
        with self._lock:
            if arch not in self._libraries:
                self._libraries[arch] = driver.load(self.compile(arch).code, self.label)
            return self._libraries[arch]


def runs_on(arch: str, needs: str) -> bool:
    """Whether what needs an architecture runs on `arch`: on the same alone if it ends with "a", else from there on."""
    if needs.endswith("a"):
        return arch == needs
    return int(re.sub(r"\D", "", arch)) >= int(re.sub(r"\D", "", needs))


class Kernel:
    """A `__global__` function, called as `kernel(grid, block, name=argument, ...)` with the names of its parameters.

    Args:
        unit: the compilation that has it.
        name: that of the function, which is `extern "C"`.
        parameters: those of the function; compared with the compiled code when it is loaded, where the driver has
            `cuKernelGetParamInfo` (CUDA 12.4).
    """

    def __init__(self, unit: Unit, name: str, parameters: Parameters):
        self.unit = unit
        self.name = name
        self.parameters = parameters
        self._handles: dict[int, ctypes.c_void_p] = {}
        self._shared: dict[int, int] = {}
        self._allowing = threading.Lock()
        self._resident: dict[tuple[int, ...], int] = {}

    def __call__(
        self,
        grid: Extent,
        block: Extent,
        *,
        shared: int = 0,
        cluster: int = 1,
        dependent: bool = False,
        **arguments: object,
    ) -> None:
        """Launch on torch's current stream of the device of the first tensor among the arguments.

        The first launch on a device compiles and loads the kernel, also while this thread captures a CUDA graph.

        Args:
            grid, block: one to three sides.
            shared: bytes of dynamic shared memory a block.
            cluster: blocks in a cluster along x.
            dependent: start early and wait inside (programmatic dependent launch); before Hopper, which has no such
                thing, it changes nothing. False where the host has just copied something that the kernel reads before
                it waits, or by the read-only path.
            arguments: one for each parameter, see `Parameters.pack`; tensors have to be on one device.

        Raises:
            DeviceError: arguments that do not fit the parameters; the launch failed, with the limits of the device; or
                the kernel could not be compiled.
        """
        try:
            packed, tensor = self.parameters.pack(arguments)
        except ValueError as error:
            raise DeviceError(f"{self.label}: {error}") from None
        index = torch.cuda.current_device() if tensor is None else tensor.get_device()
        if index < 0:
            raise DeviceError(
                f"{self.label}: a kernel runs on a GPU, and its tensors are on the CPU: move them with .cuda()"
            )
        current = torch.cuda.current_device()
        if index == current:
            self._launch(index, grid, block, packed, shared, cluster, dependent)
        else:
            with torch.cuda.device(index):
                self._launch(index, grid, block, packed, shared, cluster, dependent)

    def _launch(
        self, index: int, grid: Extent, block: Extent, packed: bytes, shared: int, cluster: int, dependent: bool
    ) -> None:
        handle = self._prepare(index, shared)
        sides = _three(grid), _three(block)
        status = driver.launch(
            handle,
            *sides,
            packed,
            self.parameters.offsets,
            shared=shared,
            stream=torch._C._cuda_getCurrentRawStream(index),  # its handle, without making an object
            cluster=cluster,
            dependent=dependent and self._may_depend(index),
        )
        if status:
            raise driver.explain_launch(status, *sides, shared, index, self.label)

    def resident_clusters(self, index: int, block: int, shared: int, cluster: int) -> int:
        """How many clusters of so many blocks a GPU can run at the same time.

        Args:
            index: of the GPU.
            block: threads; `shared`: bytes of dynamic shared memory a block.
        """
        key = index, block, shared, cluster
        if key not in self._resident:
            with torch.cuda.device(index):
                handle = self._prepare(index, shared)
                self._resident[key] = driver.resident_clusters(handle, (block, 1, 1), shared=shared, cluster=cluster)
        return self._resident[key]

    @property
    def label(self) -> str:
        """How messages name it: its unit and its name."""
        return f"{self.unit.label}: {self.name}"

    def resources(self, arch: str) -> Resources:
        """Registers, shared memory and spills on an architecture. Needs no GPU."""
        return self.unit.compile(arch).resources[self.name]

    @staticmethod
    @functools.cache
    def _may_depend(index: int) -> bool:
        return capabilities(architecture(index)).dependent_launch

    def _prepare(self, index: int, shared: int) -> ctypes.c_void_p:
        enter_context()
        handle = self._handles.get(index)
        if handle is None:
            with driver.relaxed_capture():
                handle = driver.kernel(self.unit.load(architecture(index)), self.name, self.unit.label)
                self._check_layout(driver.parameter_layout(handle, self.label))
            self._handles[index] = handle
        if shared > self._allowed(index):
            with self._allowing:  # a thread that asks for less must not come after one that asks for more
                if shared > self._allowed(index):
                    driver.allow_shared_memory(handle, shared, index, self.label)
                    self._shared[index] = shared
        return handle

    def _check_layout(self, compiled: list[tuple[int, int]] | None) -> None:
        """The declared parameters lie where the compiled kernel reads them; None: the driver cannot tell."""
        if compiled not in (None, self.parameters.layout):
            raise DeviceError(
                f"{self.label}: the declared parameters lie at (offset, size) {self.parameters.layout}, the compiled "
                f"kernel reads them at {compiled}: declare them as its source does"
            )

    def _allowed(self, index: int) -> int:
        """Bytes of dynamic shared memory with which a GPU lets the kernel be launched."""
        return self._shared.get(index, _LARGEST_WITHOUT_ASKING)


def _three(sides: Extent) -> tuple[int, int, int]:
    if isinstance(sides, int):
        return (sides, 1, 1)
    return (*sides, 1, 1)[:3]  # type: ignore[return-value]
