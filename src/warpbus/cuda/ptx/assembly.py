"""Inline PTX for the CPU: `asm` statements of CUDA C++ become calls of the functions in `on_cpu/ptx.h`.

Operands have the constraints of CUDA (h, r, l, f, d, n); statements with others are of the host, and stay.
"""

import re
from dataclasses import dataclass

from warpbus.cuda.ptx.statements import ptx_statements, refusal, split
from warpbus.cuda.ptx.wgmma import NAME

HEADER = '#include "ptx.h"'

_STATEMENT = re.compile(r"\b(?:asm|__asm__|__asm)\b\s*(?:(?:volatile|__volatile__)\b\s*)?\(")
_STRING = re.compile(r'"((?:\\.|[^"\\])*)"')
_IGNORED = re.compile(r'(?P<kept>"(?:\\.|[^"\\])*")|//[^\n]*|/\*.*?\*/|\\\n', re.DOTALL)
_OPERAND = re.compile(r'\s*"(?P<constraint>[^"]*)"\s*\((?P<value>.*)\)\s*', re.DOTALL)
_ESCAPES = {"n": "\n", "t": "\t"}

_REGISTERS = {"h": "uint16_t", "r": "uint32_t", "l": "uint64_t", "f": "float", "d": "double"}


def translate_ptx(text: str, plain: str) -> list[tuple[int, int, str]]:
    """What replaces the `asm` statements of a program: (begin, end, C++), with as many lines.

    Args:
        text: the program.
        plain: the same with blanks in the place of comments and strings.
    """
    edits = []
    for found in _STATEMENT.finditer(plain):
        end = _closing(plain, found.end() - 1)
        if end is None:
            continue
        statement = text[found.start() : end]
        made = _translate_statement(text[found.end() : end - 1])
        if made is not None:
            newline = "\\\n" if "\\\n" in statement else "\n"
            edits.append((found.start(), end, made + newline * statement.count("\n")))
    return edits


def _closing(plain: str, opened: int) -> int | None:
    depth = 0
    for position in range(opened, len(plain)):
        depth += {"(": 1, ")": -1}.get(plain[position], 0)
        if depth == 0:
            return position + 1
    return None


def _translate_statement(text: str) -> str | None:
    """The statement between the parentheses of `asm` as C++, on one line; None: it is none of a GPU."""
    text = _IGNORED.sub(lambda found: found["kept"] or " ", text)  # comments, and the ends of a macro's lines
    template, *sections = split(text, _without_strings(text), ":")
    outputs, inputs = ([_AsmOperand.of(each) for each in _listed(section)] for section in [*sections, "", ""][:2])
    operands = [*outputs, *inputs]
    if any(each is None for each in operands):
        return None
    if _STRING.sub("", template).strip():
        return refusal("asm, whose text a macro puts together")
    ptx = "".join(_STRING.findall(template))
    ptx = re.sub(r"\\(.)", lambda found: _ESCAPES.get(found[1], found[1]), ptx)
    if operands and not ptx.strip():  # it keeps the compiler from moving accesses to registers, which are none here
        return "do { } while (0)"
    if ";" not in ptx:  # every instruction of PTX ends with one
        return None
    # Accumulators of an asynchronous product stay the variables of the program, which change when it is complete.
    referenced = {i for i, each in enumerate(outputs) if each and each.constraint[0] == "+"} if NAME in ptx else set()
    lines = [
        f"auto &warpbus_to_{index} = {each.value};" if index in referenced else each.begin(index)
        for index, each in enumerate(operands)
        if each
    ]
    lines += ptx_statements(ptx, len(operands), referenced)
    lines += [each.end(index) for index, each in enumerate(outputs) if each and index not in referenced]
    return f"do {{ {' '.join(filter(None, lines))} }} while (0)"


def _listed(section: str) -> list[str]:
    return split(section, _without_strings(section), ",") if section.strip() else []


def _without_strings(text: str) -> str:
    return _STRING.sub(lambda found: " " * len(found[0]), text)


@dataclass(frozen=True)
class _AsmOperand:
    """An operand of an `asm` statement: how it is used, its register, and the expression of the program."""

    constraint: str
    value: str

    @classmethod
    def of(cls, text: str) -> "_AsmOperand | None":
        found = _OPERAND.fullmatch(text)
        if found is None or not re.fullmatch(r"[=+]?&?[hrlfdni]", found["constraint"]):
            return None
        return cls(found["constraint"].replace("&", ""), " ".join(found["value"].split()))

    def begin(self, index: int) -> str:
        """The declaration of its register."""
        cpp_type = _REGISTERS.get(self.constraint[-1])
        if cpp_type is None:
            return f"constexpr long long warpbus_{index} = {self.value};"
        if self.constraint[0] not in "=+":
            return f"{cpp_type} warpbus_{index} = warpbus::ptx::load_operand<{cpp_type}>({self.value});"
        start = f"warpbus::ptx::load_operand<{cpp_type}>(warpbus_to_{index})" if self.constraint[0] == "+" else "0"
        return f"auto &warpbus_to_{index} = {self.value}; {cpp_type} warpbus_{index} = {start};"

    def end(self, index: int) -> str:
        return f"warpbus::ptx::store_operand(warpbus_to_{index}, warpbus_{index});"
