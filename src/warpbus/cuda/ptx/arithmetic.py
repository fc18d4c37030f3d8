"""Arithmetic, comparisons and bits: the instructions of a single thread without memory."""

from dataclasses import replace

from warpbus.cuda.ptx.instruction import Handlers, PtxInstruction, part_type, vector
from warpbus.cuda.ptx.registers import TYPES, UnknownInstructionError

_COMPARISONS = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}

_COMPARISONS |= {"lo": "<", "ls": "<=", "hi": ">", "hs": ">="}

_UNARY = {
    "neg": "neg",
    "abs": "absolute",
    "ex2": "ex2",
    "lg2": "lg2",
    "rcp": "rcp",
    "sqrt": "square_root",
    "rsqrt": "reciprocal_root",
    "sin": "sine",
    "cos": "cosine",
    "tanh": "hyperbolic_tangent",
    "popc": "count_ones",
    "clz": "leading_zeros",
    "brev": "reversed",
    "bfind": "highest_bit",
}

_BINARY = {"add": "add", "sub": "sub", "div": "div", "rem": "rem", "min": "minimum", "max": "maximum"}

_BITWISE = {"and": "&", "or": "|", "xor": "^"}


def _unary(of: PtxInstruction) -> str:
    cpp_type = of.operand_type({"rn"})
    function = _UNARY[of.name]
    return of.write(0, f"warpbus::ptx::{function}({of.read(1, cpp_type)})")


def _binary(of: PtxInstruction) -> str:
    cpp_type = of.operand_type({"rn", "sat"})
    a, b = of.read_all(1, 3, cpp_type)
    result = f"warpbus::ptx::{_BINARY[of.name]}({a}, {b})"
    return of.write(0, _saturated(result, of))


def _saturated(result: str, of: PtxInstruction) -> str:
    if "sat" not in of.modifiers:
        return result
    if of.modifiers[-1] not in ("f16", "f32", "f64"):
        raise UnknownInstructionError
    return f"warpbus::ptx::saturated({result})"


def _bitwise(of: PtxInstruction) -> str:
    if of.modifiers == ["pred"]:
        a, b = (of.registers.predicate(each) for each in of.operands[1:3])
        return f"{of.name_of(0)} = {a} {_BITWISE[of.name]} {b};"
    cpp_type = of.operand_type(set())
    a, b = of.read_all(1, 3, cpp_type)
    return of.write(0, f"static_cast<{cpp_type}>({a} {_BITWISE[of.name]} {b})")


def _not(of: PtxInstruction) -> str:
    if of.modifiers == ["pred"]:
        return f"{of.name_of(0)} = !{of.name_of(1)};"
    cpp_type = of.operand_type(set())
    return of.write(0, f"static_cast<{cpp_type}>(~{of.read(1, cpp_type)})")


def _multiply(of: PtxInstruction) -> str:
    cpp_type = of.operand_type({"lo", "hi", "wide", "rn", "sat"})
    a, b = of.read_all(1, 3, cpp_type)
    if of.name == "mad" and cpp_type in ("float", "double"):
        return _fma(of)
    function = "mul_wide" if "wide" in of.modifiers else "mul_hi" if "hi" in of.modifiers else "mul"
    result = f"warpbus::ptx::{function}({a}, {b})"
    if of.name == "mad":
        wide = f"warpbus::ptx::Wide<{cpp_type}>" if "wide" in of.modifiers else cpp_type
        result = f"warpbus::ptx::add<{wide}>({result}, {of.read(3, wide)})"
    return of.write(0, _saturated(result, of))


def _fma(of: PtxInstruction) -> str:
    cpp_type = of.operand_type({"rn", "sat"})
    arguments = ", ".join(of.read_all(1, 4, cpp_type))
    return of.write(0, _saturated(f"warpbus::ptx::fma({arguments})", of))


def _shift(of: PtxInstruction) -> str:
    cpp_type, function = of.operand_type(set()), "shift_left" if of.name == "shl" else "shift_right"
    x, by = of.read(1, cpp_type), of.read(2, "uint32_t")
    return of.write(0, f"warpbus::ptx::{function}({x}, {by})")


def _call(function: str, of: PtxInstruction, cpp_type: str, count: int) -> str:
    arguments = ", ".join(of.read_all(1, count + 1, cpp_type))
    return of.write(0, f"warpbus::ptx::{function}({arguments})")


def _prmt(of: PtxInstruction) -> str:
    of.operand_type(set())  # the modes f4e, b4e, ... are unknown
    return _call("prmt", of, "uint32_t", 3)


def _bfe(of: PtxInstruction) -> str:
    x, (start, count) = of.read(1, of.operand_type(set())), of.read_all(2, 4, "uint32_t")
    return of.write(0, f"warpbus::ptx::extract_bits({x}, {start}, {count})")


def _bfi(of: PtxInstruction) -> str:
    cpp_type = of.operand_type(set())
    a, b = of.read_all(1, 3, cpp_type)
    start, count = of.read_all(3, 5, "uint32_t")
    return of.write(0, f"warpbus::ptx::insert_bits({a}, {b}, {start}, {count})")


def _dp4a(of: PtxInstruction) -> str:
    a, b = ({"s32": "int8_t", "u32": "uint8_t"}[each] for each in of.modifiers)
    (x, y), total = of.read_all(1, 3, "uint32_t"), of.read(3, "int32_t")
    return of.write(0, f"warpbus::ptx::dot4<{a}, {b}>({x}, {y}, {total})")


def _setp(of: PtxInstruction) -> str:
    comparison, *others = of.modifiers
    cpp_type = replace(of, modifiers=others).operand_type(set())
    a, b = of.read_all(1, 3, cpp_type)
    unordered = comparison.endswith("u") and comparison[:-1] in _COMPARISONS
    operation = _COMPARISONS[comparison[:-1] if unordered else comparison]
    ordered = f"({a} == {a} && {b} == {b})"
    result = f"!{ordered} || {a} {operation} {b}" if unordered else f"{a} {operation} {b}"
    if operation == "!=" and not unordered:
        result = f"{ordered} && {result}"
    names = [of.registers.name(each.strip()) for each in of.operands[0].split("|") if each.strip() != "_"]
    return f"{names[0]} = {result};" + "".join(f" {each} = !{names[0]};" for each in names[1:])


def _selp(of: PtxInstruction) -> str:
    cpp_type = of.operand_type(set())
    a, b = of.read_all(1, 3, cpp_type)
    return of.write(0, f"({of.registers.predicate(of.operands[3])} ? {a} : {b})")


def _move(of: PtxInstruction) -> str:
    to, source = of.operands
    if of.modifiers == ["pred"]:
        return f"{of.registers.name(to)} = {of.registers.name(source)};"
    cpp_type = of.operand_type(set())
    if parts := vector(source):
        smaller = part_type(cpp_type, len(parts))
        joined = ", ".join(of.registers.read(each, smaller) for each in parts)
        return of.registers.write(to, f"warpbus::ptx::pack<{cpp_type}>({joined})")
    if parts := vector(to):
        smaller = part_type(cpp_type, len(parts))
        pieces = (
            f"warpbus::ptx::unpack<{smaller}>({of.registers.read(source, cpp_type)}, {i})" for i in range(len(parts))
        )
        return " ".join(of.registers.write(part, piece) for part, piece in zip(parts, pieces, strict=True))
    return of.registers.write(to, of.registers.read(source, cpp_type))


_FP8_PAIRS = {"e4m3x2": "__NV_E4M3", "e5m2x2": "__NV_E5M2"}


def _convert_fp8(of: PtxInstruction, modifiers: list[str], to: str, source: str) -> str:
    relu = str("relu" in modifiers).lower()
    others = [each for each in modifiers if each != "relu"]
    if source == "f32" and others == ["rn", "satfinite"]:
        values = ", ".join(of.read_all(1, 3, "float"))  # the first one becomes the upper half
        return of.write(0, f"warpbus::ptx::to_fp8<{_FP8_PAIRS[to]}>({values}, {relu})")
    if source == "f16x2" and others == ["rn", "satfinite"]:
        return of.write(0, f"warpbus::ptx::to_fp8<{_FP8_PAIRS[to]}>({of.read(1, '__half2')}, {relu})")
    if to == "f16x2" and others == ["rn"]:
        return of.write(0, f"warpbus::ptx::from_fp8<{_FP8_PAIRS[source]}>({of.read(1, 'uint16_t')}, {relu})")
    raise UnknownInstructionError


def _convert(of: PtxInstruction) -> str:
    *modifiers, to, source = of.modifiers
    if {to, source} & set(_FP8_PAIRS):
        return _convert_fp8(of, modifiers, to, source)
    rounding = next((each for each in modifiers if each not in ("ftz", "sat")), "rn")
    if "satfinite" in modifiers or "relu" in modifiers:
        raise UnknownInstructionError
    if to == "tf32" and source == "f32" and rounding in ("rna", "rn"):
        return of.write(0, f"warpbus::ptx::tf32({of.read(1, 'float')}, {int(rounding == 'rna')})")
    if to in ("f16x2", "bf16x2") and source == "f32" and rounding == "rn":
        high, low = of.read_all(1, 3, "float")
        return of.write(0, f"{TYPES[to]}{{{low}, {high}}}")
    into, value = TYPES[to], of.read(1, TYPES[source])
    floats = [each.startswith(("f", "bf")) for each in (to, source)]
    if not any(floats):
        function = "warpbus::ptx::limited" if "sat" in modifiers else "static_cast"
        return of.write(0, f"{function}<{into}>({value})")
    integers = {"rni": "Nearest", "rzi": "ToZero", "rmi": "Down", "rpi": "Up", "rn": "Nearest"}
    if all(floats) and rounding != "rn":
        functions = {"rni": "nearbyint", "rzi": "trunc", "rmi": "floor", "rpi": "ceil"}
        return of.write(0, f"warpbus::ptx::rounded_to_integer<{into}>({value}, {functions[rounding]})")
    if not floats[0] and rounding == "rn":
        raise UnknownInstructionError  # a number becomes an integer by one of the others
    result = f"warpbus::ptx::convert<{into}, warpbus::ptx::{integers[rounding]}>({value})"
    return of.write(0, f"warpbus::ptx::saturated({result})" if "sat" in modifiers and floats[0] else result)


HANDLERS: Handlers = {
    **dict.fromkeys(_UNARY, _unary),
    **dict.fromkeys(_BINARY, _binary),
    **dict.fromkeys(_BITWISE, _bitwise),
    **dict.fromkeys(("mul", "mad"), _multiply),
    **dict.fromkeys(("shl", "shr"), _shift),
    "fma": _fma,
    "not": _not,
    "lop3": lambda of: _call("lop3", of, "uint32_t", 4),
    "prmt": _prmt,
    "bfe": _bfe,
    "bfi": _bfi,
    "dp4a": _dp4a,
    "setp": _setp,
    "selp": _selp,
    "mov": _move,
    "cvt": _convert,
}
