"""Findings before a CUDA program runs: what a compiler rejects, and functions without the qualifier that they need."""

import re
from dataclasses import dataclass
from pathlib import Path

from warpbus.cuda.findings import Finding

_ERROR = re.compile(
    r"^(?P<file>[^\n]+?)(?:\((?P<line_nvcc>\d+)\)|:(?P<line>\d+)(?::\d+)?): (?:fatal )?error: *(?P<said>[^\n]*)",
    re.MULTILINE,
)
_ASSEMBLY = re.compile(r"\b(?:asm|__asm__)\b")
_GUESS = re.compile(r"; did you mean [^?]*\?")

# The meaning of messages of g++, clang++ and nvcc, by the names of sentences in `findings`.
_HINTS = (
    ("hint_print", r"'(?:cout|cerr|endl)'"),
    ("hint_header", r"is not a member of 'std'|no (?:member|template) named '[^']*' in namespace 'std'"),
    (
        "hint_incomplete",
        r"expected '?(?:;|,|\)|\]|primary-expression|initializer|expression|unqualified-id)|expected a",
    ),
    (
        "hint_cuda",
        r"(?:'|^)(?:cu[A-Z]|cuda|curand|cublas|cufft|__|atomic|surf|tex|wmma|nvcuda|thrust|half)\w*'?"
        r"(?: was not declared|' has not been declared|' does not name)|undeclared identifier '(?:cuda|__|atomic)",
    ),
    (
        "hint_library",
        r"\b(?:cooperative_groups/\w+|cuda_\w+|mma|nv\w+|cu[rbfsd]\w+|(?:thrust|cub|cuda|cutlass|cute)/[\w/]+)"
        r"(?:\.\w+)?: No such file",
    ),
    ("hint_cuda", r"is not a member of '(?:cg|cooperative_groups|nvcuda|cub|thrust)\b"),
    ("hint_unknown", r"was not declared|undeclared identifier|is undefined|has not been declared|does not name a type"),
    ("hint_no_rows", r"invalid types '[^']*' for array subscript|subscripted value is not|must have pointer-to-object"),
    ("hint_const", r"read-only|const-qualified|expression must be a modifiable lvalue"),
    ("hint_arguments", r"too (?:few|many) arguments|no matching function"),
    ("hint_pointer", r"invalid conversion|cannot convert|invalid operands|cannot initialize|incompatible"),
    ("hint_void", r"return-statement with a value|void function .* should not return"),
    ("hint_twice", r"redeclaration|redefinition|has already been declared|conflicting declaration"),
)

_DIRECTIVE = re.compile(r"^[ \t]*#[^\n]*$", re.MULTILINE)
_BRACE = re.compile(r"[{}]")
_OUTER = re.compile(r"^\s*(?:namespace\b[^{}]*|extern\s*)$")
_FUNCTION = re.compile(
    r"(?P<head>.*?)\b(?P<name>[A-Za-z_]\w*)\s*\((?:[^()]|\([^()]*\))*\)\s*(?:const|noexcept|\s)*$", re.DOTALL
)
_QUALIFIED = re.compile(
    r"\b__(device|global)__\b[^;{}()]*(?:__(?:launch_bounds|cluster_dims)__\s*\([^()]*\)[^;{}()]*)*\b(\w+)\s*\("
)
_LAUNCHED = re.compile(r"\b(\w+)\s*(?:<[^<>;{}()]*>)?\s*<<<")


def rejected(messages: str, source: Path, plain: str) -> Finding:
    """The first error of a compiler's messages.

    Args:
        messages: in English.
        source: the program.
        plain: its text without comments and strings.
    """
    if plain.count("{") != plain.count("}"):
        return {"kind": "braces", "opened": plain.count("{"), "closed": plain.count("}")}
    found = _ERROR.search(messages)
    if found is None and (assembly := _ASSEMBLY.search(plain)):
        return {"kind": "assembly", "line": _line(plain, assembly.start())}
    if found is None:
        lines = messages.splitlines() or ["no message"]
        return {"kind": "rejected", "said": next((line for line in lines if "error" in line), lines[0])}
    said = found["said"].strip()
    line = int(found["line_nvcc"] or found["line"])
    if found["file"] == "test":
        return {"kind": "signature", "said": _GUESS.sub("", said)}
    if Path(found["file"]).name == source.name:
        hint = next((name for name, pattern in _HINTS if re.search(pattern, said)), None)
        return {"kind": "rejected", "said": said, "line": line} | ({"hint": hint} if hint else {})
    return {"kind": "rejected", "said": f"{Path(found['file']).name}:{line}: {said}"}


@dataclass(frozen=True)
class _ProgramFunction:
    """A function outside of classes: its body is `plain[begin:end]`."""

    name: str
    begin: int
    end: int


def misqualified(plain: str) -> Finding | None:
    """A launched function that is no kernel, a kernel that is called without a launch, or a kernel's call of host code.

    The compiler of the host does not know the difference, nvcc rejects such programs.

    Args:
        plain: the text of a program without comments and strings.
    """
    qualified: dict[str, set[str]] = {"device": set(), "global": set()}
    for kind, name in _QUALIFIED.findall(plain):
        qualified[kind].add(name)
    kernels, on_device = qualified["global"], qualified["device"] | qualified["global"]
    functions = _functions(plain)
    defined = {each.name for each in functions}
    for launch in _LAUNCHED.finditer(plain):
        if launch[1] in defined - kernels:
            return {"kind": "not_global", "function": launch[1], "line": _line(plain, _place(functions, launch[1]))}
    for each in functions:
        for name in sorted(kernels & defined):
            if call := _call(name, plain, each):
                return {"kind": "not_launched", "function": name, "line": _line(plain, call)}
        if each.name in on_device:
            for name in sorted(defined - on_device):
                if call := _call(name, plain, each):
                    place = _line(plain, _place(functions, name))
                    return {"kind": "not_device", "function": name, "line": place, "its_line": _line(plain, call)}
    return None


def _functions(plain: str) -> list[_ProgramFunction]:
    """The functions of a program, without those of classes."""
    found: list[_ProgramFunction] = []
    outside = True  # of functions and classes
    waiting: list[tuple[bool, str, int]] = []  # per open brace: whether it was outside, and the function that it begins
    for brace in _BRACE.finditer(plain):
        if brace[0] == "{":
            start = max(plain.rfind(end, 0, brace.start()) for end in ";{}") + 1
            head = _DIRECTIVE.sub("", plain[start : brace.start()])
            function = _FUNCTION.fullmatch(head.strip()) if outside else None
            waiting.append((outside, function["name"] if function else "", brace.end()))
            outside = outside and bool(_OUTER.match(head))
        elif waiting:
            outside, name, begin = waiting.pop()
            if name:
                found.append(_ProgramFunction(name, begin, brace.start()))
    return found


def _place(functions: list[_ProgramFunction], name: str) -> int:
    return next(each.begin for each in functions if each.name == name) - 1


def _call(name: str, plain: str, caller: _ProgramFunction) -> int | None:
    """Where a function calls another one by its name, not as a member or with a launch."""
    pattern = re.compile(rf"(?<![.>:\w])\s*\b{re.escape(name)}\s*(?:<[^<>;{{}}()]*>)?\s*\(")
    found = pattern.search(plain, caller.begin, caller.end)
    return found.end() - 1 if found else None


def _line(plain: str, position: int) -> int:
    return plain.count("\n", 0, position) + 1
