"""Registers and operands of PTX as expressions of C++."""

import re
from collections.abc import Collection

TYPES = {
    "f16": "__half",
    "f16x2": "__half2",
    "bf16": "__nv_bfloat16",
    "bf16x2": "__nv_bfloat162",
    "f32": "float",
    "f64": "double",
} | {f"{kind}{bits}": f"{'int' if kind == 's' else 'uint'}{bits}_t" for kind in "bus" for bits in (8, 16, 32, 64)}

_DECLARED = (
    {"pred": "bool", "f16": "uint16_t", "f16x2": "uint32_t", "bf16": "uint16_t", "bf16x2": "uint32_t"}
    | {f"{kind}{bits}": f"uint{max(16, bits)}_t" for kind in "bus" for bits in (8, 16, 32, 64)}
    | {"f32": "float", "f64": "double"}
)


_SPECIAL = {
    "laneid": "warpbus::lane()",
    "warpid": "(warpbus::current->number / warpbus::kWarp)",
    "smid": "0u",
    "nsmid": "1u",
    "clock": "static_cast<uint32_t>(clock64())",
    "clock_hi": "static_cast<uint32_t>(clock64() >> 32)",
    "clock64": "static_cast<uint64_t>(clock64())",
    "globaltimer": "static_cast<uint64_t>(clock64())",
    "cluster_ctarank": "warpbus::cluster_place().rank",
    "cluster_nctarank": "warpbus::cluster_place().count",
    "lanemask_eq": "(1u << warpbus::lane())",
    "lanemask_lt": "((1u << warpbus::lane()) - 1)",
    "lanemask_le": "(~0u >> (31 - warpbus::lane()))",
    "lanemask_gt": "~(~0u >> (31 - warpbus::lane()))",
    "lanemask_ge": "(~0u << warpbus::lane())",
    **{
        f"{name}.{axis}": f"{variable}.{axis}"
        for name, variable in (
            ("tid", "threadIdx"),
            ("ntid", "blockDim"),
            ("ctaid", "blockIdx"),
            ("nctaid", "gridDim"),
            ("cluster_ctaid", "warpbus::cluster_place().block"),
            ("cluster_nctaid", "warpbus::cluster_place().size"),
            ("clusterid", "warpbus::cluster_place().cluster"),
            ("nclusterid", "warpbus::cluster_place().clusters"),
        )
        for axis in "xyz"
    },
}


class UnknownInstructionError(Exception):
    """The CPU does not have an instruction, or an operand of it."""


class PtxRegisters:
    """The registers that an `asm` statement can use: its operands, and those that it declares.

    Args:
        operands: their number; operand N is the variable warpbus_N of C++.
        referenced: those that are read and written in place: operand N is the reference warpbus_to_N.
    """

    def __init__(self, operands: int, referenced: Collection[int] = ()) -> None:
        self._operands = operands
        self._referenced = referenced
        self._declared: set[str] = set()
        self.labels: set[str] = set()

    def declare(self, directive: str) -> str:
        """A `.reg` directive as a declaration of C++."""
        found = re.fullmatch(r"\.reg\s+\.(\w+)\s+(.*)", directive, re.DOTALL)
        if found is None or found[1] not in _DECLARED:
            raise UnknownInstructionError
        names: list[str] = []
        for name in re.split(r"\s*,\s*", found[2].strip()):
            many = re.fullmatch(r"(%?[\w$]+)<(\d+)>", name)
            names += [f"{many[1]}{index}" for index in range(min(int(many[2]), 1000))] if many else [name]
        self._declared.update(names)
        variables = [self.name(name) for name in names]
        # Not initialized where they are declared: a branch may jump over a declaration.
        return f"{_DECLARED[found[1]]} {', '.join(variables)}; {' = '.join(variables)} = 0;"

    def name(self, register: str) -> str:
        """The variable of a declared register."""
        if register not in self._declared:
            raise UnknownInstructionError
        return "warpbus_" + re.sub(r"[%$]", "_", register) + "_"

    def label(self, name: str) -> str:
        """The label of C++ for a label of PTX."""
        found = "warpbus_label_" + re.sub(r"\W", "_", name)
        self.labels.add(found)
        return found

    def value(self, operand: str) -> str:
        """An operand as an expression: a register, a constant, or a special register."""
        if number := re.fullmatch(r"%(\d+)", operand):
            if int(number[1]) >= self._operands or int(number[1]) in self._referenced:
                raise UnknownInstructionError
            return f"warpbus_{number[1]}"
        if operand in self._declared:
            return self.name(operand)
        if operand.startswith("%") and operand[1:] in _SPECIAL:
            return _SPECIAL[operand[1:]]
        if re.fullmatch(r"-?(?:0[xX][0-9a-fA-F]+|\d+)U?", operand):
            return f"{operand.rstrip('U')}ll"
        if bits := re.fullmatch(r"0[fF]([0-9a-fA-F]{8})", operand):
            return f"warpbus::same_bits<float>(0x{bits[1]}u)"
        if bits := re.fullmatch(r"0[dD]([0-9a-fA-F]{16})", operand):
            return f"warpbus::same_bits<double>(0x{bits[1]}ull)"
        if re.fullmatch(r"-?\d+\.\d*", operand):
            return operand
        raise UnknownInstructionError

    def in_place(self, operand: str) -> str:
        """The variable of the program that an operand belongs to."""
        number = int(operand.removeprefix("%"))
        if number not in self._referenced:
            raise UnknownInstructionError
        return f"warpbus_to_{number}"

    def read(self, operand: str, cpp_type: str) -> str:
        """The value of an operand in a C++ type of the same bits."""
        return f"warpbus::ptx::as<{cpp_type}>({self.value(operand)})"

    def write(self, operand: str, value: str) -> str:
        """An assignment to a register; `_` takes no value."""
        return f"(void)({value});" if operand == "_" else f"warpbus::ptx::set({self.value(operand)}, {value});"

    def predicate(self, operand: str) -> str:
        """A predicate, or its negation `!p`."""
        return f"!{self.name(operand[1:].strip())}" if operand.startswith("!") else self.name(operand)

    def address(self, operand: str) -> str:
        """The address `[register + offset]` as a number."""
        found = re.fullmatch(r"\[\s*(%?[\w$]+)\s*(?:\+\s*(-?\s*\w+|%\d+)\s*)?\]", operand)
        if found is None:
            raise UnknownInstructionError
        offset = f" + {self.value(found[2].replace(' ', ''))}" if found[2] else ""
        return self.read(found[1], "uint64_t") + offset
