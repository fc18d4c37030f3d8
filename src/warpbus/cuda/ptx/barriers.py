"""Barriers: of a block, of a part of it, and mbarriers in shared memory; fences, and waiting."""

from warpbus.cuda.ptx.instruction import Handlers, PtxInstruction
from warpbus.cuda.ptx.registers import UnknownInstructionError

_SCOPES = {"cta", "cluster", "gpu", "sys"}
_SHARED = {"shared", "shared::cta", "shared::cluster"}


def _fence(of: PtxInstruction) -> str:
    match of.modifiers:
        case ["mbarrier_init", "release", "cluster"]:
            return "__threadfence_block();"
        case ["proxy", "async", *spaces] if set(spaces) <= {"global", "shared::cta", "shared::cluster"}:
            return "warpbus::ptx::fence_proxy_async();"
    if {"proxy", "mbarrier_init"} & set(of.modifiers):
        raise UnknownInstructionError
    return "__threadfence_block();" if "cta" in of.modifiers else "__threadfence();"


def _barrier(of: PtxInstruction) -> str:
    if of.modifiers[:1] == ["warp"]:
        return f"__syncwarp({of.read(0, 'uint32_t')}, __LINE__);"
    if of.modifiers[:1] == ["cluster"]:
        return _cluster_barrier(of)
    operation = next((each for each in of.modifiers if each not in ("cta", "aligned")), "")
    if operation == "sync" and of.operands == ["0"]:
        return "__syncthreads(__LINE__);"
    if set(of.modifiers) - {"cta", "aligned", "sync", "arrive"} or len(of.operands) < (1 if operation == "sync" else 2):
        raise UnknownInstructionError
    number, count = of.read(0, "uint32_t"), of.read(1, "uint32_t") if len(of.operands) > 1 else "0"
    waits = str(operation == "sync").lower()
    return f'warpbus::ptx::named_barrier({number}, {count}, {waits}, "{of.name}.{operation}", __LINE__);'


def _cluster_barrier(of: PtxInstruction) -> str:
    match [each for each in of.modifiers[1:] if each != "aligned"]:
        case ["arrive", *semantics] if set(semantics) <= {"release", "relaxed"}:
            return "warpbus::arrive_cluster(__LINE__);"
        case ["wait", *semantics] if set(semantics) <= {"acquire"}:
            return "warpbus::wait_cluster(__LINE__);"
    raise UnknownInstructionError


def _mbarrier(of: PtxInstruction) -> str:
    operation, *modifiers = of.modifiers
    if operation == "pending_count":
        return of.write(0, f"warpbus::ptx::mbarrier_pending({of.read(1, 'uint64_t')})")
    semantics = {"release", "acquire", "relaxed"} | _SCOPES
    others = [each for each in modifiers if each not in semantics | _SHARED | {"b64", "expect_tx", "parity"}]
    if others and others != ["noComplete"]:
        raise UnknownInstructionError
    if operation in ("arrive", "arrive_drop"):
        return _arrive(of, operation, modifiers)
    if operation in ("test_wait", "try_wait"):
        at, awaited = of.registers.address(of.operands[1]), of.operands[2]
        if "parity" in modifiers:
            function, value = "mbarrier_wait_parity", of.registers.read(awaited, "uint32_t")
        else:
            function, value = "mbarrier_wait_state", of.registers.read(awaited, "uint64_t")
        blocks = str(operation == "try_wait").lower()
        call = f'warpbus::ptx::{function}({at}, {value}, {blocks}, "mbarrier.{operation}", __LINE__)'
        return f"{of.name_of(0)} = {call};"
    at = of.registers.address(of.operands[0])
    match operation:
        case "init":
            return f"warpbus::ptx::mbarrier_init({at}, {of.read(1, 'uint32_t')}, __LINE__);"
        case "inval":
            return f"warpbus::ptx::mbarrier_invalidate({at}, __LINE__);"
        case "expect_tx" | "complete_tx":
            function = "mbarrier_" + operation.removesuffix("_tx")
            return f"warpbus::ptx::{function}({at}, {of.read(1, 'uint32_t')}, __LINE__);"
    raise UnknownInstructionError


def _arrive(of: PtxInstruction, operation: str, modifiers: list[str]) -> str:
    has_state = not of.operands[0].startswith("[")
    first = 1 if has_state else 0
    at, drop = of.registers.address(of.operands[first]), str(operation == "arrive_drop").lower()
    if "expect_tx" in modifiers:
        size = of.read(first + 1, "uint32_t")
        call = f'warpbus::ptx::mbarrier_arrive_expect({at}, {size}, {drop}, "mbarrier.{operation}", __LINE__)'
    else:
        count = of.read(first + 1, "uint32_t") if len(of.operands) > first + 1 else "1"
        completes = str("noComplete" not in modifiers).lower()
        call = f'warpbus::ptx::mbarrier_arrive({at}, {count}, {drop}, {completes}, "mbarrier.{operation}", __LINE__)'
    return of.write(0, call) if has_state else f"{call};"


def _nanosleep(of: PtxInstruction) -> str:
    return f"__nanosleep({of.read(0, 'uint32_t')}, __LINE__);"


def _set_registers(of: PtxInstruction) -> str:
    if of.modifiers[1:] != ["sync", "aligned", "u32"]:
        raise UnknownInstructionError
    return f"warpbus::ptx::set_max_registers({of.read(0, 'uint32_t')}, __LINE__);"


def _dependent_grids(of: PtxInstruction) -> str:
    """Kernels of a stream run one after the other here."""
    if of.modifiers not in (["wait"], ["launch_dependents"]):
        raise UnknownInstructionError
    return ";"


HANDLERS: Handlers = {
    **dict.fromkeys(("membar", "fence"), _fence),
    **dict.fromkeys(("bar", "barrier"), _barrier),
    "mbarrier": _mbarrier,
    "nanosleep": _nanosleep,
    "setmaxnreg": _set_registers,
    "griddepcontrol": _dependent_grids,
}
