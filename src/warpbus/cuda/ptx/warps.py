"""What the lanes of a warp do together: shuffles, votes and the election of a leader; branches, and the end."""

from warpbus.cuda.ptx.instruction import Handlers, PtxInstruction
from warpbus.cuda.ptx.registers import TYPES, UnknownInstructionError

_SHUFFLES = {"idx": "__shfl_sync", "up": "__shfl_up_sync", "down": "__shfl_down_sync", "bfly": "__shfl_xor_sync"}


def _shuffle(of: PtxInstruction) -> str:
    _, mode, _ = of.modifiers
    to, *predicate = (each.strip() for each in of.operands[0].split("|"))
    clamp = {"up": "0x0"}.get(mode, "0x1f")
    if predicate or of.registers.value(of.operands[3]).removesuffix("ll") not in (clamp, str(int(clamp, 16))):
        raise UnknownInstructionError  # groups of less than a warp
    x, lane, mask = of.read(1, "uint32_t"), *(of.registers.read(of.operands[i], "uint32_t") for i in (2, 4))
    return of.registers.write(to, f"{_SHUFFLES[mode]}({mask}, {x}, static_cast<int>({lane}), 32, __LINE__)")


def _vote(of: PtxInstruction) -> str:
    predicate, mask = of.registers.predicate(of.operands[1]), of.read(2, "uint32_t")
    match of.modifiers:
        case ["sync", "ballot", "b32"]:
            return of.write(0, f"__ballot_sync({mask}, {predicate}, __LINE__)")
        case ["sync", "all" | "any" as mode, "pred"]:
            return f"{of.name_of(0)} = __{mode}_sync({mask}, {predicate}, __LINE__) != 0;"
    raise UnknownInstructionError


def _redux(of: PtxInstruction) -> str:
    _, operation, ptx_type = of.modifiers
    if operation not in ("add", "min", "max", "and", "or", "xor"):
        raise UnknownInstructionError
    x, mask = of.read(1, TYPES[ptx_type]), of.read(2, "uint32_t")
    return of.write(0, f"__reduce_{operation}_sync({mask}, {x}, __LINE__)")


def _elect(of: PtxInstruction) -> str:
    leader, predicate = (each.strip() for each in of.operands[0].split("|"))
    if of.modifiers != ["sync"]:
        raise UnknownInstructionError
    chosen = f"const unsigned warpbus_leader = warpbus::ptx::elect({of.read(1, 'uint32_t')}, __LINE__);"
    given = of.registers.write(leader, "warpbus_leader")
    return f"{{ {chosen} {given} {of.registers.name(predicate)} = warpbus_leader == warpbus::lane(); }}"


def _branch(of: PtxInstruction) -> str:
    if set(of.modifiers) - {"uni"}:
        raise UnknownInstructionError
    return f"goto {of.registers.label(of.operands[0])};"


HANDLERS: Handlers = {
    "shfl": _shuffle,
    "vote": _vote,
    "redux": _redux,
    "elect": _elect,
    "bra": _branch,
    "trap": lambda _: "abort();",
}
