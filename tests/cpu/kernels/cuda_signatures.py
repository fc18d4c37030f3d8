"""The signatures of kernels and the fields of structs as the text of a `.cu` file has them."""

import re

_KERNEL = re.compile(
    r'extern "C" __global__ void\s+(?:__launch_bounds__\((?:[^()]|\([^()]*\))*\)\s*)?(?P<name>\w+)\s*'
    r"\((?P<parameters>[^()]*)\)"
)
_BY_VALUE = re.compile(r"const (?P<type>\w+)")


def kernels(source: str) -> dict[str, list[tuple[str, str]]]:
    """Of each kernel of a file its parameters, (name, C type) in order; the types as `Parameters` writes them."""
    return {
        match["name"]: [_parameter(each) for each in match["parameters"].split(",")]
        for match in _KERNEL.finditer(_code(source))
    }


def count(source: str) -> int:
    """How many kernels a file has, by their `__global__`."""
    return len(re.findall(r"\b__global__\b", _code(source)))


def fields(source: str, struct: str) -> list[tuple[str, str]]:
    """(name, C type) of each field of a struct of a file, in order."""
    body = re.search(rf"\bstruct {struct} {{(.*?)}};", _code(source), re.DOTALL)
    assert body is not None, f"no struct {struct}"
    found = []
    for declaration in filter(None, (each.strip() for each in body[1].split(";"))):
        first, *others = (each.strip() for each in declaration.split(","))
        name, kind = _parameter(first)
        found += [(name, kind), *((other, kind) for other in others)]
    return found


def _code(source: str) -> str:
    return re.sub(r"//[^\n]*|/\*[\s\S]*?\*/", "", source)


def _parameter(text: str) -> tuple[str, str]:
    plain = re.sub(r"\b__(restrict|grid_constant)__\b|\bptx::", "", text)
    kind, name = re.fullmatch(r"(.*?[\s*])(\w+)", " ".join(plain.split()).strip()).groups()
    kind = kind.replace(" *", "*").strip()
    by_value = _BY_VALUE.fullmatch(kind)
    return name, kind if by_value is None else by_value["type"]
