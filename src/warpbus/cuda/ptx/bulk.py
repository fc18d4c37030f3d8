"""Bulk copies: cp.async.bulk and cp.reduce.async.bulk, with their groups and prefetches."""

from collections.abc import Sequence

from warpbus.cuda.ptx.instruction import PtxInstruction
from warpbus.cuda.ptx.registers import TYPES, UnknownInstructionError

_OPERATIONS = {"add": "Sum", "min": "Least", "max": "Most", "and": "BitAnd", "or": "BitOr", "xor": "BitXor"}
_HINT = "L2::cache_hint"


def copy_bulk(of: PtxInstruction) -> str:
    """An instruction whose name begins with cp.async.bulk."""
    modifiers = [each for each in of.modifiers[2:] if each != _HINT]
    match modifiers:
        case ["commit_group"]:
            return "warpbus::ptx::bulk_commit();"
        case ["wait_group", *rest] if rest in ([], ["read"]):
            return f"warpbus::ptx::bulk_wait({of.read(0, 'uint32_t')}, {str(rest == ['read']).lower()});"
        case ["prefetch", "L2", "global"]:
            return f"warpbus::ptx::bulk_prefetch({of.registers.address(of.operands[0])}, {of.read(1, 'uint32_t')}, __LINE__);"
        case ["shared::cluster" | "shared::cta", "global", "mbarrier::complete_tx::bytes"]:
            to, start, bar = (of.registers.address(of.operands[index]) for index in (0, 1, 3))
            return f"warpbus::ptx::bulk_load({to}, {start}, {of.read(2, 'uint32_t')}, {bar}, __LINE__);"
        case ["global", "shared::cta", "bulk_group"]:
            return _store(of, "warpbus::ptx::replace")
    raise UnknownInstructionError


def reduce_bulk(of: PtxInstruction) -> str:
    """An instruction whose name begins with cp.reduce.async.bulk."""
    modifiers = [each for each in of.modifiers[1:] if each not in (_HINT, "noftz")]
    match modifiers:
        case ["async", "bulk", "global", "shared::cta", "bulk_group", operation, ptx_type]:
            return _store(of, join([operation, ptx_type]))
    raise UnknownInstructionError


def join(modifiers: Sequence[str]) -> str:
    """The function that joins the elements of a reduction."""
    operation, ptx_type = modifiers
    return f"warpbus::ptx::reduce_elements<{TYPES[ptx_type]}, warpbus::ptx::{_OPERATIONS[operation]}>"


def _store(of: PtxInstruction, function: str) -> str:
    to, start = (of.registers.address(each) for each in of.operands[:2])
    return f"warpbus::ptx::bulk_store({to}, {start}, {of.read(2, 'uint32_t')}, {function}, __LINE__);"
