"""Stand-alone CUDA programs: a `.cu` file with a `main`, compiled and run on a GPU by nvcc, or on the CPU.

On the CPU, `translate` rewrites what C++ does not have, launches and shared memory, and the host's compiler gets
`on_cpu/cuda_runtime.h` in the place of CUDA's header. What that header declares is compiled once and kept
(`on_cpu/runtime.cpp`). The program runs in a process of its own and writes what it did wrong as findings, which
`findings` puts into words.
"""

import ctypes
import json
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from warpbus.cuda import driver
from warpbus.cuda.compile_findings import misqualified, rejected
from warpbus.cuda.cpu import find_compiler
from warpbus.cuda.findings import Finding
from warpbus.cuda.host_compiler import compiler_version, kept_object
from warpbus.cuda.ptx.assembly import HEADER, translate_ptx
from warpbus.errors import DataError, DeviceError

HEADERS = Path(__file__).parent / "on_cpu"
_RUNTIME = HEADERS / "runtime.cpp"
_RUNTIME_FLAGS = ("-std=c++20", "-O2", "-w", "-fno-pie")
_CHECKED = ("-fsanitize=thread", "-fno-threadsafe-statics", "-fno-tree-sra")
_GXX_WITH_VOLATILE = 11

_WRAPPED = tuple(f"-Wl,--wrap={name}" for name in ("printf", "puts", "putchar"))

_SKIPPED = re.compile(r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\'', re.DOTALL)
_ALIGNED = r"(?:__align__|alignas)\s*\((?:[^()]|\([^()]*\))*\)\s*"
_SHARED = re.compile(
    rf"(?P<before>(?:\b(?:extern|static|const|volatile)\s+|{_ALIGNED})*)\b__shared__\s+(?P<after>(?:{_ALIGNED})*)"
    rf"(?P<type>(?:(?:const|volatile|unsigned|signed|long|short|struct)\s+|{_ALIGNED})*[\w:]+(?:<[^<>;{{}}]*>)?)"
    r"\s+(?P<arrays>\w[^;={}()]*);"
)
_ALIGNMENT = re.compile(r"(?:__align__|alignas)\s*\(((?:[^()]|\([^()]*\))*)\)")
_NOT_OF_A_TYPE = re.compile(rf"\b(?:extern|static|const)\b|{_ALIGNED}")
_DYNAMIC = re.compile(r"(\w+)\s*\[\s*\]\s*((?:\[[^\[\]]+\]\s*)*)")
_DECLARED = re.compile(r"\s*(\w+)\s*((?:\[[^\[\]]+\]\s*)*)")
_OF_A_KERNEL = re.compile(
    r"\b(?P<function>cudaLaunchKernel|cudaLaunchCooperativeKernel|cudaFuncSetAttribute)\s*\(\s*"
    r"(?:\(\s*(?:const\s+)?void\s*(?:const\s*)?\*\s*\)|(?:reinterpret|static)_cast\s*<[^<>]*>)?\s*"
    r"(?P<kernel>\(?\s*&?\s*(?P<name>[\w:]+)\s*(?:<[^<>;{}()]*>)?\s*\)?)\s*,"
)
_WHILE = re.compile(r"\bwhile\s*\(")
_NO_BODY = re.compile(r"\s*(?:;|\{\s*\})")
_LAUNCH_EX = re.compile(
    r"\bcudaLaunchKernelEx\s*\(\s*(?P<config>[^,()]+)\s*,\s*(?P<kernel>&?\s*(?P<name>[\w:]+)\s*(?:<[^<>;{}()]*>)?)\s*(?=[,)])"
)
_CLUSTER = re.compile(
    r"\b__cluster_dims__\s*\((?P<size>(?:[^()]|\([^()]*\))*)\)"
    r"(?=(?:[^(){};]|__launch_bounds__\s*\((?:[^()]|\([^()]*\))*\))*?\b(?P<kernel>(?!__launch_bounds__)\w+)\s*\()"
)
_KERNEL = re.compile(r"[\w:]+\s*(?:<[^<>;{}()]*>)?\s*$")


@dataclass(frozen=True)
class ProgramRun:
    """The output of a program and how it ended.

    Attributes:
        errors: its output on stderr.
        code: the exit status, negative for a signal.
        findings: the findings of the runtime and of the test of an exercise: mistakes, and the memory traffic.
    """

    output: str
    errors: str
    code: int
    findings: tuple[Finding, ...] = ()

    @property
    def mistake(self) -> Finding | None:
        """The error of the program that ended it, if one was found."""
        return next((each for each in self.findings if each["kind"] not in ("traffic", "timing")), None)


def has_gpu() -> bool:
    """Whether this machine has a GPU that its driver finds, and nvcc."""
    return _driver_finds_gpu() and _nvcc() is not None


def _driver_finds_gpu() -> bool:
    try:
        loaded, count = driver.library(), ctypes.c_int()
    except DeviceError:
        return False
    return loaded.cuInit(0) == 0 and loaded.cuDeviceGetCount(ctypes.byref(count)) == 0 and count.value > 0


def _architecture() -> str:
    """The option of nvcc for the first GPU that was found: on a Hopper with what is its own, such as wgmma."""
    capability = [driver.attribute(which, 0) for which in (driver.CAPABILITY_MAJOR, driver.CAPABILITY_MINOR)]
    return "-arch=sm_90a" if capability == [9, 0] else "-arch=native"


def _nvcc() -> str | None:
    return shutil.which("nvcc") or shutil.which("/usr/local/cuda/bin/nvcc")


def run_in_orders(
    source: Path,
    arguments: Sequence[str] = (),
    *,
    orders: Sequence[str] = ("forward", "reverse"),
    appended: str = "",
    include: Path | None = None,
    checks: bool = False,
    limit: int | None = None,
) -> list[ProgramRun]:
    """Compile a program for the CPU and run it once per order of threads, up to the first run with a finding.

    Args:
        source: a `.cu` file; its includes are looked up beside it.
        arguments: of its `main`.
        orders: "forward" or "reverse": the order in which the threads of a block run.
        appended: more of the program, behind the file.
        include: a directory with more headers.
        checks: whether each access to memory is checked (`on_cpu/checks.h`).
        limit: seconds of CPU time after which a program that has not ended is stopped, with a finding.

    Returns:
        the runs. If the compiler rejects the program, the mistake of the only one says so, and nothing ran.

    Raises:
        DataError: the file cannot be read, or a launch in it is not complete.
        DeviceError: there is no C++ compiler.
    """
    compiler = find_compiler()
    text = _text(source)
    name = str(source).replace("\\", "\\\\").replace('"', '\\"')
    pieces = [f'#line 1 "{name}"', translate(text)]
    if appended:
        pieces += ['#line 1 "test"', translate(appended)]
    needed = [HEADER] if any("warpbus::ptx::" in piece for piece in pieces) else []
    pieces = ['#include "cuda_runtime.h"', *needed, *pieces]
    # The language is that of `run_on_gpu`. Findings need lines and inlined calls (-g1); all that a debugger reads takes
    # twice as long. An access to address 0 has to happen, so that it is explained: it must not be optimized away.
    flags = ["-std=c++17", "-O1", "-g1", "-w", "-fno-delete-null-pointer-checks"]
    # Large frames are probed, so that they do not reach past the guard of their stack.
    flags += ["-fstack-clash-protection", f"-I{HEADERS}", f"-I{source.parent}"]
    flags += [f"-I{include}"] if include else []
    with tempfile.TemporaryDirectory() as place:
        translated, program = Path(place, f"{source.stem}.cpp"), Path(place, source.stem)
        translated.write_text("\n".join(pieces) + "\n", encoding="utf-8")
        mistake = _build(compiler, flags, translated, program, source, checks)
        mistake = mistake or misqualified(_plain(f"{text}\n{appended}"))
        if mistake:
            return [ProgramRun("", "", 1, (mistake,))]
        runs = []
        for order in orders:
            variables = {"WARPBUS_ORDER": order} | ({"WARPBUS_LIMIT": str(limit)} if limit else {})
            runs.append(_run(program, arguments, variables, source))
            if runs[-1].mistake:
                break
        return runs


def _tells_volatile(compiler: tuple[str, ...]) -> bool:
    """Whether the compiler is g++ 11 or later, which calls other functions before accesses to volatile variables."""
    found = re.match(r"(?!.*clang)\S+ .*\s(\d+)\.\d+\.\d+", compiler_version(compiler).partition("\n")[0])
    return found is not None and int(found[1]) >= _GXX_WITH_VOLATILE


def _text(source: Path) -> str:
    try:
        return source.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise DataError(f"{source}: there is no such file: give a .cu file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{source}: cannot be read ({error}): give a .cu file") from None


def _build(
    compiler: tuple[str, ...], flags: list[str], text: Path, program: Path, source: Path, checks: bool
) -> Finding | None:
    """Compile a program and link it with the runtime.

    Args:
        checks: whether the program calls `on_cpu/checks.h` before each access: the functions of a sanitizer, but ours.
    """
    own = text.with_suffix(".o")
    instrumented: tuple[str, ...] = _CHECKED if checks else ()
    if checks and _tells_volatile(compiler):
        instrumented += ("--param=tsan-distinguish-volatile=1",)  # a loop that waits for a volatile value
    mistake = _compile([*compiler, *flags, *instrumented, "-fno-pie", "-c", str(text), "-o", str(own)], source)
    if mistake:
        return mistake
    defined = ("-DWARPBUS_CHECKS",) if checks else ()
    with kept_object(_RUNTIME, HEADERS, (*_RUNTIME_FLAGS, *defined)) as runtime:
        # The runtime comes first: its global variables are there before those of the program are initialized.
        return _compile([*compiler, "-no-pie", *_WRAPPED, str(runtime), str(own), "-o", str(program)], source)


def run_on_gpu(
    source: Path, arguments: Sequence[str] = (), *, appended: str = "", include: Path | None = None
) -> ProgramRun:
    """Compile a program with nvcc for the GPU of this machine and run it.

        Args:
            source, arguments, appended, include: see `run_in_orders`.

        Raises:
            DataError: see `run_in_orders`.
    DeviceError: there is no GPU, or no nvcc.
    """
    if not _driver_finds_gpu():
        raise DeviceError("no GPU was found on this machine: give --device cpu, or see warpbus doctor")
    compiler = _nvcc()
    if compiler is None:
        raise DeviceError(
            "a program with a main needs nvcc, which was not found: install the CUDA toolkit, or give --device cpu"
        )
    if not source.is_file():
        raise DataError(f"{source}: no such file: give a .cu file")
    with tempfile.TemporaryDirectory() as place:
        program, whole = Path(place, source.stem), source
        if appended:
            whole = Path(place, "exercise.cu")
            whole.write_text(f'#line 1 "{source.name}"\n{_text(source)}\n#line 1 "test"\n{appended}', encoding="utf-8")
        flags = ["-std=c++17", "-O2", _architecture(), f"-I{source.parent}", *([f"-I{include}"] if include else [])]
        mistake = _compile([compiler, *flags, str(whole), "-o", str(program)], source)
        return ProgramRun("", "", 1, (mistake,)) if mistake else _run(program, arguments, {}, source)


def _plain(text: str) -> str:
    """A program with blanks in the place of comments and strings."""
    return _SKIPPED.sub(lambda found: re.sub(r"[^\n]", " ", found[0]), text)


def translate(text: str) -> str:
    """CUDA C++ as C++: `kernel<<<grid, block>>>(arguments)` becomes a call, and line numbers stay.

    Raises:
        DataError: a launch is not complete.
    """
    plain = _plain(text)
    edits: list[tuple[int, int, str]] = []
    for found in _SHARED.finditer(plain):
        element = _spaced(_NOT_OF_A_TYPE.sub(" ", f"{found['before']} {found['type']}"))
        if "extern" in found["before"]:
            if dynamic := _DYNAMIC.fullmatch(found["arrays"]):
                name, rows = dynamic[1], _spaced(dynamic[2])
                array = f'reinterpret_cast<{element} (*){rows}>(warpbus::dynamic_array<{element}>("{name}"))'
                edits.append((*found.span(), f"{element} (*{name}){rows} = {array};" + "\n" * found[0].count("\n")))
            continue
        arrays = [_DECLARED.fullmatch(each) for each in found["arrays"].split(",")]
        if all(arrays):  # other declarations stay: threads.h makes them static, without checks
            alignment = _ALIGNMENT.search(f"{found['before']} {found['after']} {found['type']}")
            shared = " ".join(_shared(element, each[1], each[2], alignment) for each in arrays if each)
            edits.append((*found.span(), shared + "\n" * found[0].count("\n")))
    for found in _OF_A_KERNEL.finditer(plain):
        call = f'warpbus::{found["function"]}("{found["name"]}", {found["kernel"]},'
        edits.append((*found.span(), call + "\n" * found[0].count("\n")))
    for found in _LAUNCH_EX.finditer(plain):
        call = f'warpbus::cudaLaunchKernelEx("{found["name"]}", {_spaced(found["config"])}, {_spaced(found["kernel"])}'
        edits.append((*found.span(), call + "\n" * found[0].count("\n")))
    clusters = list(_CLUSTER.finditer(plain))
    edits += [(*found.span(), "\n" * found[0].count("\n")) for found in clusters]
    edits += translate_ptx(text, plain)
    edits += _waiting_loops(plain)
    start = plain.find("<<<")
    while start >= 0:
        line = plain.count("\n", 0, start) + 1
        kernel, middle = _KERNEL.search(plain, 0, start), plain.find(">>>", start)
        opened = plain.find("(", middle)
        if kernel is None or middle < 0 or plain[middle + 3 : opened].strip() or opened < 0:
            raise DataError(f"line {line}: expected a launch such as kernel<<<grid, block>>>(arguments)")
        closed = _closing(plain, opened, line)
        name = text[kernel.start() : start].strip()
        # A launch into a stream happens later, so it takes its arguments by value.
        taken = "=" if _commas(plain[start + 3 : middle]) == 3 else "&"
        launch = f'warpbus::Launch("{name}", {text[start + 3 : middle]})'
        call = f"{launch}([{taken}] {{ {name}{text[opened : closed + 1]}; }})"
        edits.append((kernel.start(), closed + 1, call))
        start = plain.find("<<<", closed)
    for begin, end, new in sorted(edits, reverse=True):
        text = text[:begin] + new + text[end:]
    # Behind the program, where its constants are known.
    return text + "".join(
        f"\nstatic const bool warpbus_cluster_{found['kernel']} = "
        f'warpbus::set_cluster("{found["kernel"]}", dim3({_spaced(found["size"])}));'
        for found in clusters
    )


def _spaced(text: str) -> str:
    """A text on one line."""
    return " ".join(text.split())


def _shared(element: str, name: str, extents: str, alignment: re.Match[str] | None) -> str:
    """An array of shared memory, on one line."""
    kind = f"warpbus::Type<{_spaced(element + extents)}>"
    kind += f", static_cast<size_t>({_spaced(alignment[1])})" if alignment else ""
    return f'static warpbus::Shared<{kind}> warpbus_{name}("{name}"); auto &{name} = warpbus_{name}.declared();'


def _waiting_loops(plain: str) -> Iterator[tuple[int, int, str]]:
    """What makes of the conditions of loops without a body calls that let other threads run."""
    for found in _WHILE.finditer(plain):
        depth, end = 1, found.end()
        while end < len(plain) and depth:
            depth += {"(": 1, ")": -1}.get(plain[end], 0)
            end += 1
        before = plain[: found.start()].rstrip()
        if _NO_BODY.match(plain, end) and not (before.endswith("}") and _ends_do(before)):
            yield found.end(), found.end(), "warpbus::spun(static_cast<bool>("
            yield end - 1, end - 1, "), __LINE__)"


def _ends_do(before: str) -> bool:
    """Whether the block that a text ends with is the body of a `do`."""
    depth = 0
    for position in range(len(before) - 1, -1, -1):
        depth += {"}": 1, "{": -1}.get(before[position], 0)
        if depth == 0:
            return bool(re.search(r"\bdo\s*$", before[:position]))
    return False


def _commas(text: str) -> int:
    """How many commas are outside of all brackets."""
    depth = found = 0
    for letter in text:
        depth += (letter in "([{") - (letter in ")]}")
        found += letter == "," and depth == 0
    return found


def _closing(text: str, opened: int, line: int) -> int:
    """The position of the parenthesis that closes the one at `opened`."""
    depth = 0
    for position in range(opened, len(text)):
        depth += {"(": 1, ")": -1}.get(text[position], 0)
        if depth == 0:
            return position
    raise DataError(f"line {line}: the parenthesis of a launch is not closed")


def _compile(command: list[str], source: Path) -> Finding | None:
    """Run a compiler; what it rejects is a finding."""
    english = os.environ | {"LC_ALL": "C"}  # `compile_findings` reads the messages
    found = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False, env=english)
    return rejected(found.stderr, source, _plain(_text(source))) if found.returncode else None


def _run(program: Path, arguments: Sequence[str], environment: dict[str, str], source: Path) -> ProgramRun:
    found_in = program.parent / "findings"
    words, variables = [str(program), *arguments], os.environ | environment | {"WARPBUS_FINDINGS": str(found_in)}
    found_in.unlink(missing_ok=True)
    found = subprocess.run(words, capture_output=True, text=True, errors="replace", env=variables)
    lines = found_in.read_text(encoding="utf-8", errors="replace").splitlines() if found_in.exists() else []
    findings = tuple(_with_lines(program, source, [json.loads(line) for line in lines]))
    return ProgramRun(found.stdout, found.stderr, found.returncode, findings)


def _with_lines(program: Path, source: Path, findings: list[Finding]) -> list[Finding]:
    """Give findings the lines of the source that their addresses in the program belong to, if addr2line is there."""
    addresses = sorted({each[key] for each in findings for key in ("pc", "its_pc") if key in each})
    tool = shutil.which("addr2line")
    if not addresses or tool is None:
        return findings
    command = [tool, "-a", "-i", "-e", str(program), *map(hex, addresses)]
    found = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    lines: dict[int, int] = {}
    address = 0
    for text in found.splitlines():
        if text.startswith("0x"):
            address = int(text, 16)
            continue
        file, _, number = text.partition(" ")[0].rpartition(":")
        if Path(file).name == source.name and number.isdigit():
            lines.setdefault(address, int(number))
    for each in findings:
        for key, line in (("pc", "line"), ("its_pc", "its_line")):
            if each.get(key) in lines:
                each[line] = lines[each[key]]
    return findings
