"""The text of an `asm` statement as statements of C++.

An instruction that the CPU does not have is an error only where a thread executes it: programs have macros that they do
not use, and paths for other GPUs. Source: PTX ISA, version 9.0.
"""

import re
from collections.abc import Collection, Iterator

from warpbus.cuda.ptx import arithmetic, barriers, matrices, memory, warps, wgmma
from warpbus.cuda.ptx.instruction import Handlers, PtxInstruction
from warpbus.cuda.ptx.registers import PtxRegisters, UnknownInstructionError

_HANDLERS: Handlers = {
    **arithmetic.HANDLERS,
    **memory.HANDLERS,
    **matrices.HANDLERS,
    **warps.HANDLERS,
    **barriers.HANDLERS,
    **wgmma.HANDLERS,
}
_LABEL = re.compile(r"([A-Za-z_$%][\w$]*)\s*:(?!:)\s*")


def ptx_statements(ptx: str, operands: int, referenced: Collection[int] = ()) -> list[str]:
    """Statements of C++, in which operand N of the `asm` statement is the variable warpbus_N.

    Args:
        ptx: without escapes of C++, in which %% stands for a %.
        operands: their number.
        referenced: see `PtxRegisters`.
    """
    registers = PtxRegisters(operands, referenced)
    text = re.sub(r"//[^\n]*|/\*.*?\*/", " ", ptx, flags=re.DOTALL).replace("%%", "%")
    text = text.replace("%=", "0")  # a number that makes labels different: here, each statement has its own
    made = [
        statement if statement in "{}" else _labelled(statement, registers) for statement in _split_statements(text)
    ]
    if not registers.labels:
        return made
    return ["{", f"__label__ {', '.join(sorted(registers.labels))};", *made, "}"]


def refusal(what: str) -> str:
    """A call that stops the program, naming an instruction that the CPU does not have."""
    return f'warpbus::refuse_instruction("{what}", __LINE__)'


def split(text: str, plain: str, by: str) -> list[str]:
    """The parts of a text between separators outside of brackets, comments and strings."""
    depth, begin, parts = 0, 0, []
    for position, letter in enumerate(plain):
        depth += (letter in "([{") - (letter in ")]}")
        if letter == by and depth == 0:
            parts.append(text[begin:position])
            begin = position + 1
    return [*parts, text[begin:]]


def _labelled(statement: str, registers: PtxRegisters) -> str:
    """A statement, and the labels before it."""
    labels = ""
    while found := _LABEL.match(statement):
        labels += f"{registers.label(found[1])}: ; "
        statement = statement[found.end() :]
    return labels + (_statement(statement, registers) if statement else "")


def _statement(statement: str, registers: PtxRegisters) -> str:
    try:
        if statement.startswith(".reg"):
            return registers.declare(statement)
        found = re.fullmatch(r"(?:@(!?)\s*(%?[\w$]+)\s+)?([a-z][\w.:]*)\s*(.*)", statement, re.DOTALL)
        if found is None:
            raise UnknownInstructionError
        negated, guard, opcode, rest = found.groups()
        name, *modifiers = opcode.split(".")
        operands = [each.strip() for each in split(rest, rest, ",")] if rest.strip() else []
        made = _HANDLERS[name](PtxInstruction(name, modifiers, operands, registers))
        return f"if ({'!' if negated else ''}{registers.name(guard)}) {{ {made} }}" if guard else made
    except (UnknownInstructionError, IndexError, KeyError, ValueError):
        return refusal(re.sub(r"^@\S+\s+", "", statement).split()[0]) + ";"


def _split_statements(text: str) -> Iterator[str]:
    """The statements of PTX, and the braces of its blocks."""
    position = 0
    while position < len(text):
        if text[position].isspace() or text[position] == ";":
            position += 1
        elif text[position] in "{}":
            yield text[position]
            position += 1
        else:
            end, depth = position, 0  # braces within a statement are those of vectors
            while end < len(text) and text[end] != ";" and (text[end] != "}" or depth):
                depth += (text[end] == "{") - (text[end] == "}")
                end += 1
            yield text[position:end].strip()
            position = end
