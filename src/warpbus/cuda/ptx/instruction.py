"""An instruction of PTX with its modifiers and operands."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from warpbus.cuda.ptx.registers import TYPES, PtxRegisters, UnknownInstructionError

# Modifiers that do not change what an instruction computes here.
_IGNORED = {"ftz", "approx", "full", "noftz", "sync", "aligned", "uni", "to"}
SPACES = {"global", "shared", "shared::cta", "shared::cluster", "local", "const", "param", "generic"}
CACHING = {"ca", "cg", "cs", "lu", "cv", "wb", "wt", "nc", "weak", "cta", "gpu", "sys", "cluster", "L2::64B"}
ATOMIC = {"volatile", "relaxed", "acquire", "release", "acq_rel", "mmio"}


@dataclass(frozen=True)
class PtxInstruction:
    """`ld.global.v4.f32 {...}, [%4]`: the name is "ld", the others are modifiers."""

    name: str
    modifiers: Sequence[str]
    operands: Sequence[str]
    registers: PtxRegisters

    def read(self, index: int, cpp_type: str) -> str:
        """An operand in a C++ type of the same bits."""
        return self.registers.read(self.operands[index], cpp_type)

    def read_all(self, first: int, end: int | None, cpp_type: str) -> list[str]:
        """Operands `first` to `end` - 1, each as by `read`."""
        return [self.registers.read(each, cpp_type) for each in self.operands[first:end]]

    def name_of(self, index: int) -> str:
        """The variable of an operand that is a declared register."""
        return self.registers.name(self.operands[index])

    def write(self, index: int, value: str) -> str:
        """An assignment to an operand."""
        return self.registers.write(self.operands[index], value)

    def operand_type(self, known: set[str]) -> str:
        """The C++ type of the operands, where all other modifiers are known."""
        *others, last = self.modifiers
        if set(others) - known - _IGNORED or last not in TYPES:
            raise UnknownInstructionError
        return TYPES[last]

    def memory_type(self) -> tuple[str, int]:
        """The C++ type and the number of elements of a load or a store."""
        *others, last = self.modifiers
        count = next((int(each[1:]) for each in others if each in ("v2", "v4", "v8")), 1)
        others = [each for each in others if not re.match(r"L[12]::", each)]
        if set(others) - SPACES - CACHING - ATOMIC - {"v2", "v4", "v8"} or last not in TYPES:
            raise UnknownInstructionError
        return TYPES[last], count


Handlers: TypeAlias = Mapping[str, Callable[[PtxInstruction], str]]
"""What makes C++ of an instruction, by its name.

They raise UnknownInstructionError, IndexError, KeyError or ValueError for what the CPU does not have.
"""


def part_type(cpp_type: str, count: int) -> str:
    """The type of the parts of a register."""
    bits = int(re.sub(r"\D", "", cpp_type)) // count
    if not cpp_type.startswith(("uint", "int")) or bits not in (8, 16, 32):
        raise UnknownInstructionError
    return f"uint{bits}_t"


def vector(operand: str) -> list[str] | None:
    """The registers of a vector `{a, b}`; None: it is none."""
    found = re.fullmatch(r"\{(.*)\}", operand, re.DOTALL)
    return [each.strip() for each in found[1].split(",")] if found else None
