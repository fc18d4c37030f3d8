"""Loads, stores, atomic operations and asynchronous copies."""

import re

from warpbus.cuda.ptx.bulk import copy_bulk, reduce_bulk
from warpbus.cuda.ptx.instruction import ATOMIC, CACHING, SPACES, Handlers, PtxInstruction, vector
from warpbus.cuda.ptx.registers import TYPES, UnknownInstructionError

_ATOMICS = {
    "add": "atomicAdd",
    "min": "atomicMin",
    "max": "atomicMax",
    "exch": "atomicExch",
    "cas": "atomicCAS",
    "and": "atomicAnd",
    "or": "atomicOr",
    "xor": "atomicXor",
    "inc": "atomicInc",
    "dec": "atomicDec",
}


def _load(of: PtxInstruction) -> str:
    cpp_type, count = of.memory_type()
    at = of.registers.address(of.operands[1])
    parts = vector(of.operands[0]) or [of.operands[0]]
    if len(parts) != count:
        raise UnknownInstructionError
    if ATOMIC & set(of.modifiers) and count == 1:
        return of.registers.write(parts[0], f"warpbus::ptx::load_atomic(warpbus::ptx::address<{cpp_type}>({at}))")
    loaded = (
        f"const auto warpbus_loaded = *warpbus::ptx::address<const warpbus::ptx::Vector<{cpp_type}, {count}>>({at});"
    )
    given = " ".join(of.registers.write(part, f"warpbus_loaded.x[{index}]") for index, part in enumerate(parts))
    return f"{{ {loaded} {given} }}"


def _store(of: PtxInstruction) -> str:
    cpp_type, count = of.memory_type()
    at = of.registers.address(of.operands[0])
    parts = vector(of.operands[1]) or [of.operands[1]]
    if len(parts) != count:
        raise UnknownInstructionError
    values = ", ".join(of.registers.read(each, cpp_type) for each in parts)
    if ATOMIC & set(of.modifiers) and count == 1:
        fence = _fence(of) if "release" in of.modifiers else ""
        return f"{fence}warpbus::ptx::store_atomic(warpbus::ptx::address<{cpp_type}>({at}), {values});"
    stored = f"warpbus::ptx::Vector<{cpp_type}, {count}>"
    return f"*warpbus::ptx::address<{stored}>({at}) = {stored}{{{{{values}}}}};"


def _fence(of: PtxInstruction) -> str:
    return "__threadfence_block(); " if "cta" in of.modifiers else "__threadfence(); "


def _atomic(of: PtxInstruction) -> str:
    others = [each for each in of.modifiers if each not in SPACES | ATOMIC | CACHING | {"noftz"}]
    operation, cpp_type = others[0], TYPES[others[1]]
    first = 1 if of.name == "atom" else 0
    if len(others) != 2:
        raise UnknownInstructionError
    values = ", ".join(of.registers.read(each, cpp_type) for each in of.operands[first + 1 :])
    at = of.registers.address(of.operands[first])
    fence = _fence(of) if {"release", "acq_rel"} & set(of.modifiers) else ""
    call = f"{_ATOMICS[operation]}(warpbus::ptx::address<{cpp_type}>({at}), {values})"
    return fence + (of.write(0, call) if first else f"{call};")


def _map_address(of: PtxInstruction) -> str:
    *spaces, ptx_type = of.modifiers
    if set(spaces) - {"shared::cluster"} or ptx_type not in ("u32", "u64"):
        raise UnknownInstructionError
    address = of.read(1, "uint64_t")
    if of.name == "getctarank":
        return of.write(0, f"warpbus::rank_of_address({address})")
    mapped = f"warpbus::map_shared({address}, {of.read(2, 'uint32_t')}, __LINE__)"
    return of.write(0, f"static_cast<{TYPES[ptx_type]}>({mapped})")


def _copy_async(of: PtxInstruction) -> str:
    if of.modifiers[:2] == ["async", "bulk"]:
        return copy_bulk(of)
    if of.modifiers[:3] == ["reduce", "async", "bulk"]:
        return reduce_bulk(of)
    if of.modifiers[:1] != ["async"]:
        raise UnknownInstructionError
    match of.modifiers[1:]:
        case ["commit_group"]:
            return "__pipeline_commit();"
        case ["wait_group"]:
            return f"__pipeline_wait_prior({of.registers.value(of.operands[0])});"
        case ["wait_all"]:
            return "warpbus::ptx::wait_for_all_copies();"
        case ["mbarrier", "arrive", *others] if set(others) <= {"noinc", "shared", "shared::cta", "b64"}:
            at, counted = of.registers.address(of.operands[0]), str("noinc" in others).lower()
            return f"warpbus::ptx::mbarrier_arrive_after_copies({at}, {counted}, __LINE__);"
        case ["ca" | "cg", "shared" | "shared::cta", "global", *hints] if all(
            re.match(r"L2::\d+B", each) for each in hints
        ):
            size = of.registers.value(of.operands[2])
            taken = of.read(3, "int32_t") if len(of.operands) > 3 else size
            addresses = ", ".join(map(of.registers.address, of.operands[:2]))
            return f"warpbus::ptx::copy_async({addresses}, {size}, {taken});"
    raise UnknownInstructionError


HANDLERS: Handlers = {
    **dict.fromkeys(("prefetch", "prefetchu", "discard", "applypriority"), lambda _: ";"),
    **dict.fromkeys(("atom", "red"), _atomic),
    "cvta": lambda of: of.write(0, of.read(1, "uint64_t")),
    **dict.fromkeys(("mapa", "getctarank"), _map_address),
    "ld": _load,
    "st": _store,
    "cp": _copy_async,
    "createpolicy": lambda of: of.write(0, "uint64_t{0}"),  # caches are not simulated
}
