"""Stand-alone CUDA programs: a `.cu` file with a `main`, compiled and run on a GPU by nvcc, or on the CPU.

On the CPU, `translate` rewrites the two things that C++ does not have, launches and dynamic shared memory, and the
host's compiler gets `on_cpu/cuda_runtime.h` in the place of CUDA's header. The program runs in a process of its own.
"""

import ctypes
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from warpbus.cuda import driver
from warpbus.cuda.cpp_compiler import find_compiler
from warpbus.errors import DataError, DeviceError

HEADERS = Path(__file__).parent / "on_cpu"

_SKIPPED = re.compile(r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\'', re.DOTALL)
_DYNAMIC = re.compile(r"\bextern\s+__shared__\s+(?:__align__\s*\(\s*\d+\s*\)\s*)?([\w:]+)\s+(\w+)\s*\[\s*\]\s*;")
_KERNEL = re.compile(r"[\w:]+\s*(?:<[^<>;{}()]*>)?\s*$")


@dataclass(frozen=True)
class ProgramRun:
    """What a program printed and how it ended.

    Attributes:
        code: the exit status, negative for a signal.
    """

    output: str
    errors: str
    code: int


def has_gpu() -> bool:
    """Whether this machine has a GPU that its driver finds, and nvcc."""
    try:
        loaded, count = driver.library(), ctypes.c_int()
    except DeviceError:
        return False
    return (
        loaded.cuInit(0) == 0
        and loaded.cuDeviceGetCount(ctypes.byref(count)) == 0
        and count.value > 0
        and bool(_nvcc())
    )


def _nvcc() -> str | None:
    return shutil.which("nvcc") or shutil.which("/usr/local/cuda/bin/nvcc")


def run_on_cpu(source: Path, arguments: Sequence[str] = (), *, order: str = "forward") -> ProgramRun:
    """Compile a program for the CPU and run it.

    Args:
        source: a `.cu` file; its includes are looked up beside it.
        arguments: of its `main`.
        order: "forward" or "reverse": the order in which the threads of a block run.

    Raises:
        DataError: the file cannot be read, or the compiler rejects it: the message has the compiler's.
        DeviceError: there is no C++ compiler.
    """
    return run_in_orders(source, arguments, orders=(order,))[0]


def run_in_orders(
    source: Path,
    arguments: Sequence[str] = (),
    *,
    orders: Sequence[str] = ("forward", "reverse"),
    appended: str = "",
    limit: float | None = None,
) -> list[ProgramRun]:
    """Compile a program for the CPU and run it once per order of threads.

    Args:
        source, arguments: see `run_on_cpu`.
        appended: more of the program, behind the file.
        limit: seconds after which a program that has not ended is stopped.

    Raises:
        DataError, DeviceError: see `run_on_cpu`; DataError also if the program did not end within the limit.
    """
    compiler = find_compiler()
    try:
        text = source.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{source}: cannot be read ({error}): give a .cu file") from None
    name = str(source).replace("\\", "\\\\").replace('"', '\\"')
    pieces = ['#include "cuda_runtime.h"', f'#line 1 "{name}"', translate(text)]
    if appended:
        pieces += ['#line 1 "test"', translate(appended)]
    # An access to address 0 has to happen, so that it is explained: it must not be optimized away.
    flags = ["-std=c++20", "-O1", "-w", "-fno-delete-null-pointer-checks", f"-I{HEADERS}", f"-I{source.parent}"]
    with tempfile.TemporaryDirectory() as place:
        translated, program = Path(place, f"{source.stem}.cpp"), Path(place, source.stem)
        translated.write_text("\n".join(pieces) + "\n", encoding="utf-8")
        _compile([*compiler, *flags, str(translated), "-o", str(program)], source)
        try:
            return [_run(program, arguments, {"WARPBUS_ORDER": order}, limit) for order in orders]
        except subprocess.TimeoutExpired:
            raise DataError(f"{source}: did not end within {limit:g} s: look for an endless loop") from None


def run_on_gpu(source: Path, arguments: Sequence[str] = ()) -> ProgramRun:
    """Compile a program with nvcc for the GPU of this machine and run it.

    Raises:
        DataError: see `run_on_cpu`.
        DeviceError: there is no nvcc.
    """
    compiler = _nvcc()
    if compiler is None:
        raise DeviceError(
            "a program with a main needs nvcc, which was not found: install the CUDA toolkit, or give --device cpu"
        )
    if not source.is_file():
        raise DataError(f"{source}: no such file: give a .cu file")
    with tempfile.TemporaryDirectory() as place:
        program = Path(place, source.stem)
        _compile([compiler, "-std=c++17", "-O2", "-arch=native", str(source), "-o", str(program)], source)
        return _run(program, arguments, {}, None)


def translate(text: str) -> str:
    """CUDA C++ as C++: `kernel<<<grid, block>>>(arguments)` becomes a call, and line numbers stay.

    Raises:
        DataError: a launch is not complete.
    """
    plain = _SKIPPED.sub(lambda found: re.sub(r"[^\n]", " ", found[0]), text)
    edits: list[tuple[int, int, str]] = [
        (*found.span(), f"{found[1]} *{found[2]} = reinterpret_cast<{found[1]} *>(warpbus::dynamic.data());")
        for found in _DYNAMIC.finditer(plain)
    ]
    start = plain.find("<<<")
    while start >= 0:
        line = plain.count("\n", 0, start) + 1
        kernel, middle = _KERNEL.search(plain, 0, start), plain.find(">>>", start)
        opened = plain.find("(", middle)
        if kernel is None or middle < 0 or plain[middle + 3 : opened].strip() or opened < 0:
            raise DataError(f"line {line}: expected a launch such as kernel<<<grid, block>>>(arguments)")
        closed = _closing(plain, opened, line)
        name = text[kernel.start() : start].strip()
        call = f'warpbus::Launch("{name}", {text[start + 3 : middle]})([&] {{ {name}{text[opened : closed + 1]}; }})'
        edits.append((kernel.start(), closed + 1, call))
        start = plain.find("<<<", closed)
    for begin, end, new in sorted(edits, reverse=True):
        text = text[:begin] + new + text[end:]
    return text


def _closing(text: str, opened: int, line: int) -> int:
    """The position of the parenthesis that closes the one at `opened`."""
    depth = 0
    for position in range(opened, len(text)):
        depth += {"(": 1, ")": -1}.get(text[position], 0)
        if depth == 0:
            return position
    raise DataError(f"line {line}: the parenthesis of a launch is not closed")


def _compile(command: list[str], source: Path) -> None:
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    if found.returncode:
        lines = [line for line in found.stderr.splitlines() if "error" in line] or found.stderr.splitlines()
        raise DataError(f"{source}: the compiler rejects it: {lines[0] if lines else 'without a message'}")


def _run(program: Path, arguments: Sequence[str], environment: dict[str, str], limit: float | None) -> ProgramRun:
    words, variables = [str(program), *arguments], os.environ | environment
    found = subprocess.run(words, capture_output=True, text=True, errors="replace", env=variables, timeout=limit)
    return ProgramRun(found.stdout, found.stderr, found.returncode)
