"""Launches of the project's own kernels without a GPU: each runs as a CUDA program on the CPU (`warpbus cuda run`).

Within `simulated`, the host code of `warpbus.kernels.ops` sees a small GPU and launches on tensors of the CPU. What a
kernel does is computed by its own source, thread by thread, with its barriers, copies and matrix instructions; only
the order and the timing are not those of a GPU.
"""

import functools
import re
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from warpbus.cuda import driver, programs, tensor_map
from warpbus.cuda.cpu import find_compiler
from warpbus.cuda.kernel import Kernel, Unit
from warpbus.kernels import operators

_INCLUDE = re.compile(r'^\s*#include "(.+)"')
_SYSTEM = re.compile(r"^\s*#include <(.+)>", re.MULTILINE)
_RESIDENT = 16  # blocks that the CPU can run together
_MARK = b"warpbus tensor map"  # in the parameters, in the place of one that the program encodes
_MAIN = Path(__file__).with_name("simulated_main.cu")


@dataclass
class Simulation:
    """The kernels that were launched.

    Attributes:
        arch: the architecture that the GPU claims to be.
        multiprocessors: of the GPU.
        launched: the names of the kernels, in order.
    """

    arch: str
    multiprocessors: int
    launched: list[str] = field(default_factory=list)
    _maps: list[tuple[Any, ...]] = field(default_factory=list)
    _mapped: torch.UntypedStorage | None = None

    def launch(
        self,
        kernel: Kernel,
        grid: Any,
        block: Any,
        *,
        shared: int = 0,
        cluster: int = 1,
        dependent: bool = False,
        **arguments: Any,
    ) -> None:
        """In the place of `Kernel.__call__`. The blocks of a small grid run together: they may wait for each other."""
        del dependent  # kernels run one after another
        self.launched.append(kernel.name)
        packed, _ = kernel.parameters.pack(arguments)
        storages: dict[int, torch.UntypedStorage] = {}
        for tensor in arguments.values():
            if isinstance(tensor, Tensor):
                storages.setdefault(tensor.untyped_storage().data_ptr(), tensor.untyped_storage())
        used = [
            (found.start(), self._maps[struct.unpack_from("<I", packed, found.end())[0]])
            for found in re.finditer(re.escape(_MARK), packed)
        ]
        for _, (storage, *_others) in used:
            storages.setdefault(storage.data_ptr(), storage)
        known = {address: number for number, address in enumerate(storages)}

        def place_of(address: int) -> tuple[int, int]:
            base = max(each for each in storages if each <= address)
            assert address < base + storages[base].nbytes(), (kernel.label, "an address outside of all arguments")
            return known[base], address - base

        fixes = [(at, *place_of(address)) for at, address in _addresses(kernel, packed)]
        maps = [
            (at, element, len(sides), *place_of(address), *sides, *strides, *box, swizzle)
            for at, (_, address, element, sides, strides, box, swizzle) in used
        ]
        offsets = kernel.parameters.offsets
        lines = [
            (*_three(grid), *_three(block)),
            (shared,),
            (len(offsets), *offsets),
            (len(storages),),
            (len(fixes),),
            *fixes,
            (len(maps),),
            *maps,
        ]
        with tempfile.TemporaryDirectory() as place:
            folder = Path(place)
            folder.joinpath("job").write_text("\n".join(" ".join(map(str, line)) for line in lines))
            folder.joinpath("parameters").write_bytes(packed)
            for number, storage in enumerate(storages.values()):
                whole = torch.empty(0, dtype=torch.uint8).set_(storage)
                folder.joinpath(str(number)).write_bytes(whole.numpy().tobytes())
            source = folder / kernel.unit.source.name
            together = cluster == 1 and prod(_three(grid)) <= _RESIDENT
            source.write_text(self._program(kernel.unit, kernel.name, cluster, cooperative=together))
            (run,) = programs.run_in_orders(source, [place], orders=("forward",))
            assert run.mistake is None, (kernel.label, run.mistake)
            assert run.code == 0, (kernel.label, run.errors[-2000:])
            for number, storage in enumerate(storages.values()):
                whole = torch.empty(0, dtype=torch.uint8).set_(storage)
                whole.copy_(torch.frombuffer(bytearray(folder.joinpath(str(number)).read_bytes()), dtype=torch.uint8))

    def _program(self, unit: Unit, kernel: str, cluster: int, *, cooperative: bool) -> str:
        macros = {**dict(unit.macros), "__CUDA_ARCH__": f"{re.sub(r'[^0-9]', '', self.arch)}0"}
        launch = "cudaLaunchCooperativeKernel" if cooperative else "cudaLaunchKernel"
        main = re.sub(r"\bKERNEL\b", kernel, _MAIN.read_text(encoding="utf-8"))
        main = re.sub(r"\bLAUNCH\b", launch, main)
        text = _preprocessed(_flat(unit.source, unit.root, set()), tuple(macros.items()))
        if cluster > 1:  # which a launch would ask for
            text = re.sub(r"\b__global__\b", f"__global__ __cluster_dims__({cluster}, 1, 1)", text)
        return f"{text}\n{main}"

    def encoding(self, function: Callable[..., bytes]) -> Callable[..., bytes]:
        """`tensor_map` or `tile_maps`, with the memory of the matrix for `encode`."""

        def encoded(matrix: Tensor, *others: Any, **more: Any) -> bytes:
            self._mapped = matrix.untyped_storage()
            _forget_maps()
            return function(matrix, *others, **more)

        return encoded

    def encode(self, *place: Any) -> bytes:
        """In the place of `tensor_map._encode`: the program encodes the map."""
        self._maps.append((self._mapped, *place))
        return (_MARK + struct.pack("<I", len(self._maps) - 1)).ljust(128, b"\0")


@contextmanager
def simulated(arch: str = "sm_90a", *, multiprocessors: int = 3) -> Iterator[Simulation]:
    """Within the block, the operators of `warpbus.kernels.ops` launch kernels on tensors of the CPU."""
    simulation = Simulation(arch, multiprocessors)
    of_block, of_multiprocessor = (227, 228) if arch == "sm_90a" else (163, 164)  # KB of shared memory
    replaced = {
        "shared_memory": lambda device: of_multiprocessor << 10,
        "is_gpu": lambda device: True,
        "multiprocessors": lambda device: multiprocessors,
        "architecture": lambda device: arch,
        "tensor_map": simulation.encoding(tensor_map.tensor_map),
        "tile_maps": simulation.encoding(tensor_map.tile_maps),
        "counters": lambda device, count: torch.zeros(count, dtype=torch.int32),
    }
    _forget_maps()
    with ExitStack() as stack:
        for name, module in list(sys.modules.items()):
            if not name.startswith("warpbus.kernels.ops."):
                continue
            for function, instead in replaced.items():
                if hasattr(module, function):
                    stack.enter_context(mock.patch.object(module, function, instead))
        attributes = {driver.MULTIPROCESSOR_COUNT: multiprocessors}
        stack.enter_context(mock.patch.object(driver, "attribute", lambda which, device: attributes[which]))
        stack.enter_context(mock.patch.object(driver, "shared_memory_of_block", return_value=of_block << 10))
        stack.enter_context(mock.patch.object(Kernel, "resident_clusters", return_value=multiprocessors))
        stack.enter_context(mock.patch.object(operators, "_device_of", return_value="cuda"))
        stack.enter_context(torch.no_grad())
        stack.enter_context(mock.patch.object(tensor_map, "_encode", simulation.encode))
        stack.enter_context(
            mock.patch.object(Kernel, "__call__", lambda kernel, *a, **b: simulation.launch(kernel, *a, **b))
        )
        yield simulation
    _forget_maps()


def _forget_maps() -> None:
    tensor_map._map.cache_clear()
    tensor_map._tile_maps.cache_clear()


def _addresses(kernel: Kernel, packed: bytes) -> Iterator[tuple[int, int]]:
    """Where addresses are among the packed parameters, and which."""
    at = 0
    for count, code in re.findall(r"(\d*)([xQqiIfs])", kernel.parameters._packer.format):
        if code in "xs":
            at += int(count or 1)
            continue
        if code == "Q":
            (address,) = struct.unpack_from("<Q", packed, at)
            if address:
                yield at, address
        at += struct.calcsize(f"<{code}")


def _flat(source: Path, root: Path, seen: set[str]) -> str:
    """A source with the project's own headers in the place of their includes."""
    lines = []
    for line in source.read_text(encoding="utf-8").splitlines():
        found = _INCLUDE.match(line)
        if found and found[1] not in seen:
            seen.add(found[1])
            lines.append(_flat(root / found[1], root, seen))
        elif not found and line.strip() != "#pragma once":
            lines.append(line)
    return "\n".join(lines)


@functools.cache
def _preprocessed(text: str, macros: tuple[tuple[str, str], ...]) -> str:
    """A source without macros, of which the statements `asm` may be made, and its includes of CUDA in front."""
    included = "".join(f"#include <{name}>\n" for name in dict.fromkeys(_SYSTEM.findall(text)))
    command = [*find_compiler(), "-E", "-P", "-x", "c++", "-", *(f"-D{name}={value}" for name, value in macros)]
    plain = subprocess.run(command, input=_SYSTEM.sub("", text), capture_output=True, text=True, check=True)
    return included + plain.stdout


def _three(sides: Any) -> tuple[int, int, int]:
    return (sides, 1, 1) if isinstance(sides, int) else (*sides, 1, 1)[:3]
