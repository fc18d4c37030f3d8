"""Which parameters a kernel loads by the read-only path (`ld.global.nc`), found in its PTX without a GPU."""

import re
from collections import defaultdict

from cuda.bindings import nvrtc

from warpbus.cuda import jit
from warpbus.cuda.kernel import Unit

_ENTRY = re.compile(r"\.visible \.entry (\w+)\(")
_INSTRUCTION = re.compile(r"(?:@!?%\w+\s+)?([a-z][\w.:]*)\s+(.*)", re.DOTALL)
_REGISTER = re.compile(r"%rd\d+")
_PARAMETER = re.compile(r"(%rd\d+), \[\w+_param_(\d+)\]")
_ADDRESS = re.compile(r"\[(%rd\d+)")


def representatives(units: list[Unit]) -> list[Unit]:
    """The first and the last unit of each source: they differ in every macro that chooses another path."""
    of_source = defaultdict(list)
    for unit in units:
        of_source[unit.source].append(unit)
    return [unit for found in of_source.values() for unit in dict.fromkeys((found[0], found[-1]))]


def sample(units: list[Unit]) -> list[Unit]:
    """The representatives, and others until every value of every macro is among the units of a source.

    Sizes in bytes follow from the other macros.
    """
    chosen = representatives(units)

    def values(unit: Unit) -> set[tuple[object, str, str]]:
        return {(unit.source, name, text) for name, text in unit.macros if not name.endswith("_BYTES")}

    missing = {each for unit in units for each in values(unit)} - {each for unit in chosen for each in values(unit)}
    while missing:
        best = max(units, key=lambda unit: len(missing & values(unit)))  # the first of equals
        missing -= values(best)
        chosen.append(best)
    return chosen


def compile_ptx(unit: Unit, arch: str) -> str:
    """The PTX of a unit for an architecture such as "sm_90a"."""
    status, program = nvrtc.nvrtcCreateProgram(unit.source.read_bytes(), unit.source.name.encode(), 0, None, None)
    assert not status
    options = [f"--gpu-architecture={arch.replace('sm', 'compute')}", "--std=c++17"]
    options += [f"-D{name}={text}" for name, text in unit.macros]
    options += [f"-I{folder}" for folder in (unit.root, *jit._headers())]
    (status,) = nvrtc.nvrtcCompileProgram(program, len(options), [option.encode() for option in options])
    assert not status, (unit.label, status)
    _, size = nvrtc.nvrtcGetPTXSize(program)
    text = b" " * size
    nvrtc.nvrtcGetPTX(program, text)
    nvrtc.nvrtcDestroyProgram(program)
    return text.decode()


def kernels_of(ptx: str) -> dict[str, str]:
    """The text of each kernel by its name."""
    parts = re.split(r"(?=\.visible \.entry )", ptx)[1:]
    return {_ENTRY.match(part)[1]: part for part in parts}


def read_only_parameters(kernel: str) -> set[int | None]:
    """The numbers of the parameters from which the addresses of the read-only loads are computed.

    Every 64-bit register holds the parameters of all registers that it is ever computed from. None stands for an
    address that comes from no parameter: from memory, for instance.

    Args:
        kernel: its PTX.
    """
    instructions = [
        (found[1], found[2])
        for statement in re.split(r"[;\n]", kernel)
        if (found := _INSTRUCTION.match(statement.strip(" \t{}")))
    ]
    sources: dict[str, set[int]] = defaultdict(set)
    for operation, operands in instructions:
        if operation.startswith("ld.param") and (found := _PARAMETER.match(operands)):
            sources[found[1]].add(int(found[2]))
    computed = [
        _REGISTER.findall(operands)
        for operation, operands in instructions
        if not operation.startswith(("ld.", "st.", "atom.", "red.", "setp."))
    ]
    changed = True
    while changed:
        changed = False
        for target, *others in filter(None, computed):
            found = set().union(*(sources[other] for other in others))
            changed = changed or not found <= sources[target]
            sources[target] |= found
    parameters: set[int | None] = set()
    for operation, operands in instructions:
        if operation.startswith("ld.global") and ".nc" in operation:
            address = _ADDRESS.search(operands)
            parameters |= (address and sources[address[1]]) or {None}
    return parameters
