"""Instructions of PTX as calls of the functions in `on_cpu/ptx.h`.

An instruction that the CPU does not have is an error only where a thread executes it: programs have macros that they do
not use, and paths for other GPUs. Source: PTX ISA, version 9.0.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

_TYPES = {
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
    "lanemask_eq": "(1u << warpbus::lane())",
    "lanemask_lt": "((1u << warpbus::lane()) - 1)",
    "lanemask_le": "(~0u >> (31 - warpbus::lane()))",
    "lanemask_gt": "~(~0u >> (31 - warpbus::lane()))",
    "lanemask_ge": "(~0u << warpbus::lane())",
    **{
        f"{name}.{axis}": f"{variable}.{axis}"
        for name, variable in (("tid", "threadIdx"), ("ntid", "blockDim"), ("ctaid", "blockIdx"), ("nctaid", "gridDim"))
        for axis in "xyz"
    },
}

# Modifiers that do not change what an instruction computes here.
_IGNORED = {"ftz", "approx", "full", "noftz", "sync", "aligned", "uni", "to"}
_SPACES = {"global", "shared", "shared::cta", "local", "const", "param", "generic"}
_CACHING = {"ca", "cg", "cs", "lu", "cv", "wb", "wt", "nc", "weak", "cta", "gpu", "sys", "cluster", "L2::64B"}
_ATOMIC = {"volatile", "relaxed", "acquire", "release", "acq_rel", "mmio"}

_COMPARISONS = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
_COMPARISONS |= {"lo": "<", "ls": "<=", "hi": ">", "hs": ">="}
_UNARY = {
    "neg": "neg",
    "abs": "magnitude",
    "ex2": "ex2",
    "lg2": "lg2",
    "rcp": "rcp",
    "sqrt": "root",
    "rsqrt": "reciprocal_root",
    "sin": "sine",
    "cos": "cosine",
    "tanh": "hyperbolic_tangent",
    "popc": "count_ones",
    "clz": "leading_zeros",
    "brev": "reversed",
    "bfind": "highest_bit",
}
_BINARY = {"add": "add", "sub": "sub", "div": "div", "rem": "rem", "min": "least", "max": "most"}
_BITWISE = {"and": "&", "or": "|", "xor": "^"}
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
_NO_OPERATION = {"prefetch", "prefetchu", "discard", "applypriority", "griddepcontrol", "nanosleep", "setmaxnreg"}
_SHUFFLES = {"idx": "__shfl_sync", "up": "__shfl_up_sync", "down": "__shfl_down_sync", "bfly": "__shfl_xor_sync"}

# Elements of the matrices of mma, by the type's name; and the types of its products.
_ELEMENTS = {
    "f16": "__half",
    "bf16": "__nv_bfloat16",
    "tf32": "warpbus::ptx::Tf32",
    "f64": "double",
    "s8": "int8_t",
    "u8": "uint8_t",
    "s4": "warpbus::ptx::S4",
    "u4": "warpbus::ptx::U4",
}
_SHAPE = re.compile(r"m(\d+)n8k(\d+)")


class _UnknownError(Exception):
    """The CPU does not have an instruction."""


def ptx_statements(ptx: str, operands: int) -> list[str]:
    """The text of an `asm` statement as statements of C++, where operand N of the statement is the variable warpbus_N.

    Args:
        ptx: without escapes of C++, in which %% stands for a %.
        operands: their number.
    """
    return _Body(ptx, operands).statements


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


class _Body:
    """See `ptx_statements`.

    Attributes:
        statements: of C++.
    """

    def __init__(self, ptx: str, operands: int) -> None:
        self.statements: list[str] = []
        self._operands = operands
        self._declared: set[str] = set()
        text = re.sub(r"//[^\n]*|/\*.*?\*/", " ", ptx, flags=re.DOTALL).replace("%%", "%")
        for piece in _pieces(text):
            if piece in "{}":
                self.statements.append(piece)
            else:
                self.statements.append(self._statement(piece))

    def _statement(self, piece: str) -> str:
        try:
            if piece.startswith(".reg"):
                return self._declaration(piece)
            found = re.fullmatch(r"(?:@(!?)\s*(%?[\w$]+)\s+)?([a-z][\w.:]*)\s*(.*)", piece, re.DOTALL)
            if found is None:
                raise _UnknownError
            negated, guard, opcode, rest = found.groups()
            made = self._instruction(opcode, [each.strip() for each in split(rest, rest, ",")] if rest.strip() else [])
            return f"if ({'!' if negated else ''}{self._name(guard)}) {{ {made} }}" if guard else made
        except _UnknownError:
            return refusal(re.sub(r"^@\S+\s+", "", piece).split()[0]) + ";"

    def _declaration(self, piece: str) -> str:
        found = re.fullmatch(r"\.reg\s+\.(\w+)\s+(.*)", piece, re.DOTALL)
        if found is None or found[1] not in _DECLARED:
            raise _UnknownError
        names: list[str] = []
        for name in re.split(r"\s*,\s*", found[2].strip()):
            many = re.fullmatch(r"(%?[\w$]+)<(\d+)>", name)
            names += [f"{many[1]}{index}" for index in range(min(int(many[2]), 1000))] if many else [name]
        self._declared.update(names)
        return f"{_DECLARED[found[1]]} {', '.join(f'{self._name(name)} = 0' for name in names)};"

    def _name(self, register: str) -> str:
        if register not in self._declared:
            raise _UnknownError
        return "warpbus_" + re.sub(r"[%$]", "_", register) + "_"

    def _value(self, operand: str) -> str:
        """An operand as an expression: a register, a constant, or a special register."""
        if number := re.fullmatch(r"%(\d+)", operand):
            if int(number[1]) >= self._operands:
                raise _UnknownError
            return f"warpbus_{number[1]}"
        if operand in self._declared:
            return self._name(operand)
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
        raise _UnknownError

    def _as(self, operand: str, kind: str) -> str:
        return f"warpbus::ptx::as<{kind}>({self._value(operand)})"

    def _set(self, operand: str, value: str) -> str:
        return f"(void)({value});" if operand == "_" else f"warpbus::ptx::set({self._value(operand)}, {value});"

    def _predicate(self, operand: str) -> str:
        return f"!{self._name(operand[1:].strip())}" if operand.startswith("!") else self._name(operand)

    def _parts(self, operand: str) -> list[str] | None:
        """The registers of a vector; None: it is none."""
        found = re.fullmatch(r"\{(.*)\}", operand, re.DOTALL)
        return [each.strip() for each in found[1].split(",")] if found else None

    def _address(self, operand: str) -> str:
        found = re.fullmatch(r"\[\s*(%?[\w$]+)\s*(?:\+\s*(-?\s*\w+|%\d+)\s*)?\]", operand)
        if found is None:
            raise _UnknownError
        offset = self._value(found[2].replace(" ", "")) if found[2] else "0"
        return f"{self._as(found[1], 'uint64_t')}, {offset}"

    def _instruction(self, opcode: str, operands: list[str]) -> str:
        name, *modifiers = opcode.replace("::", "\0").split(".")
        modifiers = [each.replace("\0", "::") for each in modifiers]
        name = name.replace("\0", "::")
        made = self._handlers().get(name)
        if made is None:
            raise _UnknownError
        try:
            return made(_Instruction(opcode, name, modifiers, operands))
        except (IndexError, ValueError, KeyError):
            raise _UnknownError from None

    def _handlers(self) -> dict[str, "Callable[[_Instruction], str]"]:
        return {
            **dict.fromkeys(_UNARY, self._unary),
            **dict.fromkeys(_BINARY, self._binary),
            **dict.fromkeys(_BITWISE, self._bitwise),
            **dict.fromkeys(_NO_OPERATION, lambda _: ";"),
            **dict.fromkeys(("membar", "fence"), self._fence),
            **dict.fromkeys(("bar", "barrier"), self._barrier),
            **dict.fromkeys(("mul", "mad"), self._multiply),
            **dict.fromkeys(("shl", "shr"), self._shift),
            **dict.fromkeys(("atom", "red"), self._atomic),
            "mov": self._move,
            "cvta": lambda of: self._set(of.operands[0], self._as(of.operands[1], "uint64_t")),
            "cvt": self._convert,
            "ld": self._load,
            "st": self._store,
            "cp": self._copy_async,
            "ldmatrix": self._ldmatrix,
            "stmatrix": self._stmatrix,
            "mma": self._mma,
            "fma": self._fma,
            "not": self._not,
            "lop3": lambda of: self._call("lop3", of, "uint32_t", 4),
            "prmt": self._prmt,
            "bfe": self._bfe,
            "bfi": self._bfi,
            "dp4a": self._dp4a,
            "setp": self._setp,
            "selp": self._selp,
            "shfl": self._shuffle,
            "vote": self._vote,
            "redux": self._redux,
            "trap": lambda _: "abort();",
        }

    def _call(self, function: str, of: "_Instruction", kind: str, count: int, template: str = "") -> str:
        arguments = ", ".join(self._as(each, kind) for each in of.operands[1 : count + 1])
        return self._set(of.operands[0], f"warpbus::ptx::{function}{template}({arguments})")

    def _unary(self, of: "_Instruction") -> str:
        kind = of.kind({"rn"})
        function = _UNARY[of.name]
        return self._set(of.operands[0], f"warpbus::ptx::{function}({self._as(of.operands[1], kind)})")

    def _binary(self, of: "_Instruction") -> str:
        kind = of.kind({"rn", "sat"})
        a, b = (self._as(each, kind) for each in of.operands[1:3])
        result = f"warpbus::ptx::{_BINARY[of.name]}({a}, {b})"
        return self._set(of.operands[0], self._saturated(result, of))

    @staticmethod
    def _saturated(result: str, of: "_Instruction") -> str:
        if "sat" not in of.modifiers:
            return result
        if of.modifiers[-1] not in ("f16", "f32", "f64"):
            raise _UnknownError
        return f"warpbus::ptx::saturated({result})"

    def _bitwise(self, of: "_Instruction") -> str:
        if of.modifiers == ["pred"]:
            a, b = (self._predicate(each) for each in of.operands[1:3])
            return f"{self._name(of.operands[0])} = {a} {_BITWISE[of.name]} {b};"
        kind = of.kind(set())
        a, b = (self._as(each, kind) for each in of.operands[1:3])
        return self._set(of.operands[0], f"static_cast<{kind}>({a} {_BITWISE[of.name]} {b})")

    def _not(self, of: "_Instruction") -> str:
        if of.modifiers == ["pred"]:
            return f"{self._name(of.operands[0])} = !{self._name(of.operands[1])};"
        kind = of.kind(set())
        return self._set(of.operands[0], f"static_cast<{kind}>(~{self._as(of.operands[1], kind)})")

    def _multiply(self, of: "_Instruction") -> str:
        kind = of.kind({"lo", "hi", "wide", "rn", "sat"})
        a, b = (self._as(each, kind) for each in of.operands[1:3])
        if of.name == "mad" and kind in ("float", "double"):
            return self._fma(of)
        function = "mul_wide" if "wide" in of.modifiers else "mul_hi" if "hi" in of.modifiers else "mul"
        result = f"warpbus::ptx::{function}({a}, {b})"
        if of.name == "mad":
            wide = f"warpbus::ptx::Wide<{kind}>" if "wide" in of.modifiers else kind
            result = f"warpbus::ptx::add<{wide}>({result}, {self._as(of.operands[3], wide)})"
        return self._set(of.operands[0], self._saturated(result, of))

    def _fma(self, of: "_Instruction") -> str:
        kind = of.kind({"rn", "sat"})
        arguments = ", ".join(self._as(each, kind) for each in of.operands[1:4])
        return self._set(of.operands[0], self._saturated(f"warpbus::ptx::fma({arguments})", of))

    def _shift(self, of: "_Instruction") -> str:
        kind, function = of.kind(set()), "shift_left" if of.name == "shl" else "shift_right"
        x, by = self._as(of.operands[1], kind), self._as(of.operands[2], "uint32_t")
        return self._set(of.operands[0], f"warpbus::ptx::{function}({x}, {by})")

    def _prmt(self, of: "_Instruction") -> str:
        of.kind(set())  # the modes f4e, b4e, ... are unknown
        return self._call("prmt", of, "uint32_t", 3)

    def _bfe(self, of: "_Instruction") -> str:
        x, start, count = (
            self._as(of.operands[1], of.kind(set())),
            *(self._as(each, "uint32_t") for each in of.operands[2:4]),
        )
        return self._set(of.operands[0], f"warpbus::ptx::extract({x}, {start}, {count})")

    def _bfi(self, of: "_Instruction") -> str:
        kind = of.kind(set())
        a, b = (self._as(each, kind) for each in of.operands[1:3])
        start, count = (self._as(each, "uint32_t") for each in of.operands[3:5])
        return self._set(of.operands[0], f"warpbus::ptx::insert({a}, {b}, {start}, {count})")

    def _dp4a(self, of: "_Instruction") -> str:
        a, b = ({"s32": "int8_t", "u32": "uint8_t"}[each] for each in of.modifiers)
        x, y, total = (
            self._as(each, kind)
            for each, kind in zip(of.operands[1:], ("uint32_t", "uint32_t", "int32_t"), strict=True)
        )
        return self._set(of.operands[0], f"warpbus::ptx::dot4<{a}, {b}>({x}, {y}, {total})")

    def _setp(self, of: "_Instruction") -> str:
        comparison, *others = of.modifiers
        kind = _Instruction(of.opcode, of.name, others, of.operands).kind(set())
        a, b = (self._as(each, kind) for each in of.operands[1:3])
        unordered = comparison.endswith("u") and comparison[:-1] in _COMPARISONS
        operation = _COMPARISONS[comparison[:-1] if unordered else comparison]
        ordered = f"({a} == {a} && {b} == {b})"
        result = f"!{ordered} || {a} {operation} {b}" if unordered else f"{a} {operation} {b}"
        if operation == "!=" and not unordered:
            result = f"{ordered} && {result}"
        names = [self._name(each.strip()) for each in of.operands[0].split("|") if each.strip() != "_"]
        return f"{names[0]} = {result};" + "".join(f" {each} = !{names[0]};" for each in names[1:])

    def _selp(self, of: "_Instruction") -> str:
        kind = of.kind(set())
        a, b = (self._as(each, kind) for each in of.operands[1:3])
        return self._set(of.operands[0], f"({self._predicate(of.operands[3])} ? {a} : {b})")

    def _move(self, of: "_Instruction") -> str:
        to, source = of.operands
        if of.modifiers == ["pred"]:
            return f"{self._name(to)} = {self._name(source)};"
        kind = of.kind(set())
        if parts := self._parts(source):
            return self._set(
                to, f"warpbus::ptx::join<{kind}>({', '.join(map(self._part_of(kind, len(parts)), parts))})"
            )
        if parts := self._parts(to):
            half = _halves(kind, len(parts))
            pieces = (f"warpbus::ptx::part<{half}>({self._as(source, kind)}, {i})" for i in range(len(parts)))
            return " ".join(self._set(part, piece) for part, piece in zip(parts, pieces, strict=True))
        return self._set(to, self._as(source, kind))

    def _part_of(self, kind: str, count: int) -> Callable[[str], str]:
        half = _halves(kind, count)
        return lambda part: self._as(part, half)

    def _convert(self, of: "_Instruction") -> str:
        *modifiers, to, source = of.modifiers
        rounding = next((each for each in modifiers if each not in ("ftz", "sat")), "rn")
        if "satfinite" in modifiers or "relu" in modifiers:
            raise _UnknownError
        if to == "tf32" and source == "f32" and rounding in ("rna", "rn"):
            return self._set(
                of.operands[0], f"warpbus::ptx::tf32({self._as(of.operands[1], 'float')}, {int(rounding == 'rna')})"
            )
        if to in ("f16x2", "bf16x2") and source == "f32" and rounding == "rn":
            high, low = (self._as(each, "float") for each in of.operands[1:3])
            return self._set(of.operands[0], f"{_TYPES[to]}{{{low}, {high}}}")
        into, value = _TYPES[to], self._as(of.operands[1], _TYPES[source])
        floats = [each.startswith(("f", "bf")) for each in (to, source)]
        if not any(floats):
            result = (
                f"warpbus::ptx::limited<{into}>({value})" if "sat" in modifiers else f"static_cast<{into}>({value})"
            )
            return self._set(of.operands[0], result)
        integers = {"rni": "Nearest", "rzi": "ToZero", "rmi": "Down", "rpi": "Up", "rn": "Nearest"}
        if all(floats) and rounding != "rn":
            functions = {"rni": "nearbyint", "rzi": "trunc", "rmi": "floor", "rpi": "ceil"}
            return self._set(
                of.operands[0], f"warpbus::ptx::rounded_to_integer<{into}>({value}, {functions[rounding]})"
            )
        if not floats[0] and rounding == "rn":
            raise _UnknownError  # a number becomes an integer by one of the others
        result = f"warpbus::ptx::convert<{into}, warpbus::ptx::{integers[rounding]}>({value})"
        return self._set(
            of.operands[0], f"warpbus::ptx::saturated({result})" if "sat" in modifiers and floats[0] else result
        )

    def _load(self, of: "_Instruction") -> str:
        kind, vector = of.memory_kind()
        at = self._address(of.operands[1])
        parts = self._parts(of.operands[0]) or [of.operands[0]]
        if len(parts) != vector:
            raise _UnknownError
        if _ATOMIC & set(of.modifiers) and vector == 1:
            return self._set(parts[0], f"warpbus::ptx::load_atomic(warpbus::ptx::address<{kind}>({at}))")
        loaded = (
            f"const auto warpbus_loaded = *warpbus::ptx::address<const warpbus::ptx::Vector<{kind}, {vector}>>({at});"
        )
        given = " ".join(self._set(part, f"warpbus_loaded.x[{index}]") for index, part in enumerate(parts))
        return f"{{ {loaded} {given} }}"

    def _store(self, of: "_Instruction") -> str:
        kind, vector = of.memory_kind()
        at = self._address(of.operands[0])
        parts = self._parts(of.operands[1]) or [of.operands[1]]
        if len(parts) != vector:
            raise _UnknownError
        values = ", ".join(self._as(each, kind) for each in parts)
        if _ATOMIC & set(of.modifiers) and vector == 1:
            return f"warpbus::ptx::store_atomic(warpbus::ptx::address<{kind}>({at}), {values});"
        stored = f"warpbus::ptx::Vector<{kind}, {vector}>"
        return f"*warpbus::ptx::address<{stored}>({at}) = {stored}{{{{{values}}}}};"

    def _atomic(self, of: "_Instruction") -> str:
        others = [each for each in of.modifiers if each not in _SPACES | _ATOMIC | _CACHING | {"noftz"}]
        operation, kind = others[0], _TYPES[others[1]]
        first = 1 if of.name == "atom" else 0
        if len(others) != 2:
            raise _UnknownError
        values = ", ".join(self._as(each, kind) for each in of.operands[first + 1 :])
        call = f"{_ATOMICS[operation]}(warpbus::ptx::address<{kind}>({self._address(of.operands[first])}), {values})"
        return self._set(of.operands[0], call) if first else f"{call};"

    def _copy_async(self, of: "_Instruction") -> str:
        if of.modifiers[:1] != ["async"]:
            raise _UnknownError
        match of.modifiers[1:]:
            case ["commit_group"]:
                return "__pipeline_commit();"
            case ["wait_group"]:
                return f"__pipeline_wait_prior({self._value(of.operands[0])});"
            case ["wait_all"]:
                return "warpbus::ptx::wait_for_all_copies();"
            case ["ca" | "cg", "shared" | "shared::cta", "global", *hints] if all(
                re.match(r"L2::\d+B", each) for each in hints
            ):
                size = self._value(of.operands[2])
                taken = self._as(of.operands[3], "int32_t") if len(of.operands) > 3 else size
                addresses = ", ".join(f"{self._whole_address(each)}" for each in of.operands[:2])
                return f"warpbus::ptx::copy_async({addresses}, {size}, {taken});"
        raise _UnknownError

    def _whole_address(self, operand: str) -> str:
        base, offset = self._address(operand).rsplit(", ", 1)
        return f"{base} + {offset}"

    def _ldmatrix(self, of: "_Instruction") -> str:
        parts = self._matrices(of, of.operands[0])
        registers = ", ".join(self._value(each) for each in parts)
        row, transposed = self._whole_address(of.operands[1]), str("trans" in of.modifiers).lower()
        return f'warpbus::ptx::ldmatrix<{transposed}>({row}, "ldmatrix", __LINE__, {registers});'

    def _stmatrix(self, of: "_Instruction") -> str:
        parts = self._matrices(of, of.operands[1])
        registers = ", ".join(self._value(each) for each in parts)
        row, transposed = self._whole_address(of.operands[0]), str("trans" in of.modifiers).lower()
        return f'warpbus::ptx::stmatrix<{transposed}>({row}, "stmatrix", __LINE__, {registers});'

    def _matrices(self, of: "_Instruction", operand: str) -> list[str]:
        count = {"x1": 1, "x2": 2, "x4": 4}[next(each for each in of.modifiers if each in ("x1", "x2", "x4"))]
        parts = self._parts(operand) or [operand]
        known = {"sync", "aligned", "m8n8", "trans", "b16", "x1", "x2", "x4"} | _SPACES
        if len(parts) != count or not {"m8n8", "b16"} <= set(of.modifiers) <= known:
            raise _UnknownError
        return parts

    def _mma(self, of: "_Instruction") -> str:
        others = [each for each in of.modifiers if each not in ("sync", "aligned", "satfinite")]
        shape = _SHAPE.fullmatch(others[0])
        if shape is None or others[1:3] != ["row", "col"] or len(others) != 7:
            raise _UnknownError
        to, a, b, total = others[3:]
        register = "uint64_t" if a == "f64" else "uint32_t"
        d, *matrices = ([each.strip() for each in self._parts(each) or [each]] for each in of.operands)
        sums = {"f32": "float", "s32": "int32_t", "f64": "double", "f16": "__half"}
        if to != total or {a, b} - set(_ELEMENTS):
            raise _UnknownError
        pairs = to == "f16"  # two elements of C per register
        declared = []
        for name, parts in zip("ab", matrices, strict=False):
            declared.append(
                f"const {register} warpbus_{name}[] = {{{', '.join(self._as(each, register) for each in parts)}}};"
            )
        c = []
        for each in matrices[2]:
            value = self._value(each)
            if pairs:
                c += [f"warpbus::ptx::as<__half>(warpbus::ptx::part<uint16_t>({value}, {i}))" for i in (0, 1)]
            else:
                c.append(self._as(each, sums[to]))
        declared.append(f"{sums[to]} warpbus_c[] = {{{', '.join(c)}}};")
        kinds = f"{shape[1]}, {shape[2]}, {_ELEMENTS[a]}, {_ELEMENTS[b]}"
        limit = str("satfinite" in of.modifiers).lower()
        call = f'warpbus::ptx::mma<{kinds}>(warpbus_a, warpbus_b, warpbus_c, {limit}, "mma", __LINE__);'
        given = []
        for index, each in enumerate(d):
            result = f"warpbus_c[{index}]"
            if pairs:
                result = ", ".join(f"warpbus::ptx::as<uint16_t>(warpbus_c[{2 * index + i}])" for i in (0, 1))
                result = f"warpbus::ptx::join<uint32_t>({result})"
            given.append(self._set(each, result))
        return f"{{ {' '.join([*declared, call, *given])} }}"

    def _fence(self, of: "_Instruction") -> str:
        if {"proxy", "mbarrier_init"} & set(of.modifiers):
            raise _UnknownError
        return "__threadfence_block();" if "cta" in of.modifiers else "__threadfence();"

    def _barrier(self, of: "_Instruction") -> str:
        if of.modifiers[:1] == ["warp"]:
            return f"__syncwarp({self._as(of.operands[0], 'uint32_t')}, __LINE__);"
        if [each for each in of.modifiers if each not in ("cta", "aligned")] != ["sync"] or len(of.operands) != 1:
            raise _UnknownError  # of a part of the block
        return "__syncthreads(__LINE__);"

    def _shuffle(self, of: "_Instruction") -> str:
        _, mode, _ = of.modifiers
        to, *predicate = (each.strip() for each in of.operands[0].split("|"))
        clamp = {"up": "0x0"}.get(mode, "0x1f")
        if predicate or self._value(of.operands[3]).removesuffix("ll") not in (clamp, str(int(clamp, 16))):
            raise _UnknownError  # groups of less than a warp
        x, lane, mask = self._as(of.operands[1], "uint32_t"), *(self._as(of.operands[i], "uint32_t") for i in (2, 4))
        return self._set(to, f"{_SHUFFLES[mode]}({mask}, {x}, static_cast<int>({lane}), 32, __LINE__)")

    def _vote(self, of: "_Instruction") -> str:
        predicate, mask = self._predicate(of.operands[1]), self._as(of.operands[2], "uint32_t")
        match of.modifiers:
            case ["sync", "ballot", "b32"]:
                return self._set(of.operands[0], f"__ballot_sync({mask}, {predicate}, __LINE__)")
            case ["sync", "all" | "any" as mode, "pred"]:
                return f"{self._name(of.operands[0])} = __{mode}_sync({mask}, {predicate}, __LINE__) != 0;"
        raise _UnknownError

    def _redux(self, of: "_Instruction") -> str:
        _, operation, kind = of.modifiers
        if operation not in ("add", "min", "max", "and", "or", "xor"):
            raise _UnknownError
        x, mask = self._as(of.operands[1], _TYPES[kind]), self._as(of.operands[2], "uint32_t")
        return self._set(of.operands[0], f"__reduce_{operation}_sync({mask}, {x}, __LINE__)")


@dataclass(frozen=True)
class _Instruction:
    """`ld.global.v4.f32 {...}, [%4]`: the opcode is "ld.global.v4.f32", the name "ld"."""

    opcode: str
    name: str
    modifiers: Sequence[str]
    operands: Sequence[str]

    def kind(self, known: set[str]) -> str:
        """The C++ type of the operands, where all other modifiers are known."""
        *others, last = self.modifiers
        if set(others) - known - _IGNORED or last not in _TYPES:
            raise _UnknownError
        return _TYPES[last]

    def memory_kind(self) -> tuple[str, int]:
        """The C++ type and the number of elements of a load or a store."""
        *others, last = self.modifiers
        vector = next((int(each[1:]) for each in others if each in ("v2", "v4", "v8")), 1)
        others = [each for each in others if not re.match(r"L[12]::", each)]
        if set(others) - _SPACES - _CACHING - _ATOMIC - {"v2", "v4", "v8"} or last not in _TYPES:
            raise _UnknownError
        return _TYPES[last], vector


def _halves(kind: str, count: int) -> str:
    """The type of the parts of a register."""
    bits = int(re.sub(r"\D", "", kind)) // count
    if not kind.startswith(("uint", "int")) or bits not in (8, 16, 32):
        raise _UnknownError
    return f"uint{bits}_t"


def _pieces(text: str) -> Iterator[str]:
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
