"""wgmma: asynchronous products of a warpgroup."""

import re

from warpbus.cuda.ptx.instruction import Handlers, PtxInstruction, vector
from warpbus.cuda.ptx.registers import UnknownInstructionError

NAME = "wgmma.mma_async"

_SHAPE = re.compile(r"m64n(\d+)k(\d+)")
# Of each type of A: the depth, the types of B, and the sums that go with it.
_PRODUCTS = {
    "f16": (16, {"f16"}, {"f16", "f32"}),
    "bf16": (16, {"bf16"}, {"f32"}),
    "tf32": (8, {"tf32"}, {"f32"}),
    **{name: (32, {"e4m3", "e5m2"}, {"f16", "f32"}) for name in ("e4m3", "e5m2")},
    **{name: (32, {"s8", "u8"}, {"s32"}) for name in ("s8", "u8")},
}


def _product(of: PtxInstruction) -> str:
    shape, *limited, sums, a, b = of.modifiers[3:]
    found = _SHAPE.fullmatch(shape)
    depth, types_of_b, types_of_sums = _PRODUCTS[a]
    if found is None or int(found[2]) != depth or b not in types_of_b or sums not in types_of_sums:
        raise UnknownInstructionError
    columns, registers = int(found[1]), vector(of.operands[0]) or []
    if columns % 8 or not 8 <= columns <= 256 or (sums == "s32" and columns > 32 and columns % 16):
        raise UnknownInstructionError
    if limited not in ([], ["satfinite"]) or len(registers) != columns // (4 if sums == "f16" else 2):
        raise UnknownInstructionError
    of_a = vector(of.operands[1])
    scale, *others = of.operands[3:]
    signs, majors = _immediates(of, a, others, has_descriptor=of_a is None)
    fields = {
        "columns": str(columns),
        "type_a": f"warpbus::WgmmaType::{a}",
        "type_b": f"warpbus::WgmmaType::{b}",
        "sums": f"warpbus::WgmmaSums::{sums}",
        "a_in_registers": str(of_a is not None).lower(),
        # A predicate, or a constant.
        "accumulates": f"{of.registers.value(scale)} != 0" if scale[0] in "%01" else of.registers.predicate(scale),
        "mn_major_a": majors[0],
        "mn_major_b": majors[1],
        "limited": str(bool(limited)).lower(),
        "sign_a": signs[0],
        "sign_b": signs[1],
        "descriptor_a": of.read(1, "uint64_t") if of_a is None else "0",
        "descriptor_b": of.read(2, "uint64_t"),
        "a": f"{{{', '.join(of.registers.read(each, 'uint32_t') for each in of_a or [])}}}",
    }
    if of_a is not None and len(of_a) != len("abcd"):
        raise UnknownInstructionError
    places = ", ".join(f"&{of.registers.in_place(each)}" for each in registers)
    declared = f"void *const warpbus_sums[] = {{{places}}};"
    product = f"const warpbus::Wgmma warpbus_product = {{{', '.join(fields.values())}}};"
    return f"{{ {declared} {product} warpbus::ptx::wgmma(warpbus_product, warpbus_sums, {len(registers)}, __LINE__); }}"


def _immediates(
    of: PtxInstruction, a: str, operands: list[str], *, has_descriptor: bool
) -> tuple[list[str], list[str]]:
    """The signs of A and B (1 or -1), and whether they are MN-major."""
    values = [of.registers.value(each) for each in operands]
    if a in ("s8", "u8"):
        expected, signs, majors = 0, ["1", "1"], ["false", "false"]
    else:
        signs = [f"static_cast<int>({each})" for each in values[:2]]
        majors = [f"{each} != 0" for each in values[2:]]
        expected = 2
        if a in ("f16", "bf16"):
            expected += 1 + has_descriptor
            majors = majors if has_descriptor else ["false", *majors]
        else:
            majors = ["false", "false"]
    if len(values) != expected:
        raise UnknownInstructionError
    return signs, majors


def _wgmma(of: PtxInstruction) -> str:
    if list(of.modifiers[1:3]) != ["sync", "aligned"]:
        raise UnknownInstructionError
    match of.modifiers[0]:
        case "fence":
            return "warpbus::ptx::wgmma_fence();"
        case "commit_group":
            return "warpbus::ptx::wgmma_commit();"
        case "wait_group":
            return f"warpbus::ptx::wgmma_wait({of.read(0, 'uint32_t')}, __LINE__);"
        case "mma_async":
            return _product(of)
    raise UnknownInstructionError


HANDLERS: Handlers = {"wgmma": _wgmma}
