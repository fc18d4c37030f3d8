"""Bulk copies: cp.async.bulk and cp.reduce.async.bulk, with their groups and prefetches."""

import re

from warpbus.cuda.ptx.instruction import PtxInstruction
from warpbus.cuda.ptx.registers import TYPES, UnknownInstructionError

_OPERATIONS = {"add": "Sum", "min": "Least", "max": "Most", "and": "BitAnd", "or": "BitOr", "xor": "BitXor"}
_HINT = "L2::cache_hint"
_BOX = re.compile(r"\[\s*([^,{]+?)\s*,\s*\{(.*)\}\s*\]", re.DOTALL)


def copy_bulk(of: PtxInstruction) -> str:
    """An instruction whose name begins with cp.async.bulk."""
    modifiers = [each for each in of.modifiers[2:] if each not in (_HINT, "tile")]
    match modifiers:
        case ["commit_group"]:
            return "warpbus::ptx::bulk_commit();"
        case ["wait_group", *rest] if rest in ([], ["read"]):
            return f"warpbus::ptx::bulk_wait({of.read(0, 'uint32_t')}, {str(rest == ['read']).lower()});"
        case ["prefetch", "L2", "global"]:
            start, size = of.registers.address(of.operands[0]), of.read(1, "uint32_t")
            return f"warpbus::ptx::bulk_prefetch({start}, {size}, __LINE__);"
        case ["shared::cluster" | "shared::cta", "global", "mbarrier::complete_tx::bytes"]:
            to, start, bar = (of.registers.address(of.operands[index]) for index in (0, 1, 3))
            return f"warpbus::ptx::bulk_load({to}, {start}, {of.read(2, 'uint32_t')}, {bar}, __LINE__);"
        case ["global", "shared::cta", "bulk_group"]:
            return _store(of, "warpbus::ptx::replace")
        case ["tensor", axes, "shared::cluster" | "shared::cta", "global", "mbarrier::complete_tx::bytes", *multicast]:
            if multicast not in ([], ["multicast::cluster"]):
                raise UnknownInstructionError
            to, bar = (of.registers.address(of.operands[index]) for index in (0, 2))
            blocks = of.read(3, "uint16_t") if multicast else "0"
            declared, box = _box(of, axes, 1)
            return f"{{ {declared} warpbus::ptx::tensor_load({to}, {box}, {bar}, {blocks}, __LINE__); }}"
        case ["tensor", axes, "global", "shared::cta", "bulk_group"]:
            return _store_tensor(of, axes, "none")
        case ["prefetch", "tensor", axes, "L2", "global"]:
            declared, box = _box(of, axes, 0)
            tensor, _, rank = box.split(", ")
            return f"{{ {declared} warpbus::ptx::tensor_prefetch({tensor}, {rank}, __LINE__); }}"
    raise UnknownInstructionError


def _store_tensor(of: PtxInstruction, axes: str, operation: str) -> str:
    declared, box = _box(of, axes, 0)
    start, reduction = of.registers.address(of.operands[1]), f"warpbus::ptx::Reduction::{operation}"
    return f"{{ {declared} warpbus::ptx::tensor_store({box}, {start}, {reduction}, __LINE__); }}"


def _box(of: PtxInstruction, axes: str, index: int) -> tuple[str, str]:
    """The operand `[map, {x, y}]`: the declaration of its coordinates, and the arguments: map, coordinates, number."""
    found = _BOX.fullmatch(of.operands[index])
    if found is None or not re.fullmatch(r"[1-5]d", axes):
        raise UnknownInstructionError
    coordinates = [of.registers.read(each.strip(), "int32_t") for each in found[2].split(",")]
    if len(coordinates) != int(axes[0]):
        raise UnknownInstructionError
    declared = f"const warpbus::TilePlace warpbus_box = {{{{{', '.join(coordinates)}}}}};"
    return declared, f"{of.registers.address(f'[{found[1]}]')}, warpbus_box, {len(coordinates)}"


def reduce_bulk(of: PtxInstruction) -> str:
    """An instruction whose name begins with cp.reduce.async.bulk."""
    modifiers = [each for each in of.modifiers[1:] if each not in (_HINT, "noftz")]
    match modifiers:
        case ["async", "bulk", "global", "shared::cta", "bulk_group", operation, ptx_type]:
            return _store(of, _join(operation, ptx_type))
        case ["async", "bulk", "tensor", axes, "global", "shared::cta", "add" | "min" | "max" as operation, *rest]:
            if rest in (["bulk_group"], ["tile", "bulk_group"]):
                return _store_tensor(of, axes, operation)
    raise UnknownInstructionError


def _join(operation: str, ptx_type: str) -> str:
    """The function that joins the elements of a reduction."""
    return f"warpbus::ptx::reduce_elements<{TYPES[ptx_type]}, warpbus::ptx::{_OPERATIONS[operation]}>"


def _store(of: PtxInstruction, function: str) -> str:
    to, start = (of.registers.address(each) for each in of.operands[:2])
    return f"warpbus::ptx::bulk_store({to}, {start}, {of.read(2, 'uint32_t')}, {function}, __LINE__);"
