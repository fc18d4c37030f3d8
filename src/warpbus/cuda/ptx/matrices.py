"""Tensor cores: products of a warp, and the loads and stores of their matrices."""

import re

from warpbus.cuda.ptx.instruction import SPACES, Handlers, PtxInstruction, vector
from warpbus.cuda.ptx.registers import UnknownInstructionError

# The elements of A and B of mma, and its sums, by the names of their types.
_ELEMENTS = {
    "f16": "__half",
    "bf16": "__nv_bfloat16",
    "tf32": "warpbus::ptx::Tf32",
    "f64": "double",
    "e4m3": "warpbus::ptx::E4m3",
    "e5m2": "warpbus::ptx::E5m2",
    "s8": "int8_t",
    "u8": "uint8_t",
    "s4": "warpbus::ptx::S4",
    "u4": "warpbus::ptx::U4",
}

_SUMS = {"f32": "float", "s32": "int32_t", "f64": "double"}  # and f16, of which a register has two
# Of each type of A: the shapes (M, K), and the types of B and of the sums that go with it.
_PRODUCTS = {
    "f16": ({(16, 8), (16, 16)}, {"f16"}, {"f16", "f32"}),
    "bf16": ({(16, 8), (16, 16)}, {"bf16"}, {"f32"}),
    "tf32": ({(16, 4), (16, 8)}, {"tf32"}, {"f32"}),
    **{name: ({(16, 16), (16, 32)}, {"e4m3", "e5m2"}, {"f16", "f32"}) for name in ("e4m3", "e5m2")},
    **{name: ({(8, 16), (16, 16), (16, 32)}, {"s8", "u8"}, {"s32"}) for name in ("s8", "u8")},
    **{name: ({(8, 32), (16, 32), (16, 64)}, {"s4", "u4"}, {"s32"}) for name in ("s4", "u4")},
    "f64": ({(8, 4)}, {"f64"}, {"f64"}),
}
_SHAPE = re.compile(r"m(\d+)n8k(\d+)")


def _ldmatrix(of: PtxInstruction) -> str:
    parts = _matrices(of, of.operands[0])
    registers = ", ".join(of.registers.value(each) for each in parts)
    row, transposed = of.registers.address(of.operands[1]), str("trans" in of.modifiers).lower()
    loaded = f"const auto warpbus_row = warpbus::ptx::load_row<{len(parts)}>({row});"
    return f'{{ {loaded} warpbus::ptx::ldmatrix<{transposed}>(warpbus_row, "ldmatrix", __LINE__, {registers}); }}'


def _stmatrix(of: PtxInstruction) -> str:
    parts = _matrices(of, of.operands[1])
    registers = ", ".join(of.registers.value(each) for each in parts)
    row, transposed = of.registers.address(of.operands[0]), str("trans" in of.modifiers).lower()
    stored = f'warpbus::ptx::stmatrix<{transposed}>("stmatrix", __LINE__, {registers})'
    return f"warpbus::ptx::store_row<{len(parts)}>({row}, {stored});"


def _matrices(of: PtxInstruction, operand: str) -> list[str]:
    count = {"x1": 1, "x2": 2, "x4": 4}[next(each for each in of.modifiers if each in ("x1", "x2", "x4"))]
    parts = vector(operand) or [operand]
    known = {"sync", "aligned", "m8n8", "trans", "b16", "x1", "x2", "x4"} | SPACES
    if len(parts) != count or not {"m8n8", "b16"} <= set(of.modifiers) <= known:
        raise UnknownInstructionError
    return parts


def _mma(of: PtxInstruction) -> str:
    others = [each for each in of.modifiers if each not in ("sync", "aligned", "satfinite")]
    shape = _SHAPE.fullmatch(others[0])
    if shape is None or others[1:3] != ["row", "col"] or len(others) != 7:
        raise UnknownInstructionError
    to, a, b, total = others[3:]
    register = "uint64_t" if a == "f64" else "uint32_t"
    shapes, types_of_b, types_of_sums = _PRODUCTS[a]
    if (int(shape[1]), int(shape[2])) not in shapes or b not in types_of_b or to not in types_of_sums or to != total:
        raise UnknownInstructionError
    outputs, of_a, of_b, of_c = (vector(each) or [each] for each in of.operands)
    declared = [_array(of, f"const {register}", name, parts, register) for name, parts in (("a", of_a), ("b", of_b))]
    if to == "f16":
        values = [f"warpbus::ptx::unpack<uint16_t>({of.registers.value(each)}, {i})" for each in of_c for i in (0, 1)]
        declared.append(
            f"__half warpbus_c[] = {{{', '.join(f'warpbus::ptx::as<__half>({each})' for each in values)}}};"
        )
        halves = [f"warpbus::ptx::as<uint16_t>(warpbus_c[{i}])" for i in range(len(values))]
        sums = [f"warpbus::ptx::pack<uint32_t>({', '.join(halves[i : i + 2])})" for i in range(0, len(halves), 2)]
    else:
        declared.append(_array(of, _SUMS[to], "c", of_c, _SUMS[to]))
        sums = [f"warpbus_c[{i}]" for i in range(len(of_c))]
    template = f"{shape[1]}, {shape[2]}, {_ELEMENTS[a]}, {_ELEMENTS[b]}"
    limit = str("satfinite" in of.modifiers).lower()
    call = f'warpbus::ptx::mma<{template}>(warpbus_a, warpbus_b, warpbus_c, {limit}, "mma", __LINE__);'
    given = [of.registers.write(each, value) for each, value in zip(outputs, sums, strict=True)]
    return f"{{ {' '.join([*declared, call, *given])} }}"


def _array(of: PtxInstruction, cpp_type: str, name: str, parts: list[str], register: str) -> str:
    """The declaration of the registers of a matrix."""
    return f"{cpp_type} warpbus_{name}[] = {{{', '.join(of.registers.read(each, register) for each in parts)}}};"


HANDLERS: Handlers = {
    "ldmatrix": _ldmatrix,
    "stmatrix": _stmatrix,
    "mma": _mma,
}
