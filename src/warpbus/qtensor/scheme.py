"""Quantization schemes and their one spelling: `w4a16-g128`, `w4a16-g32-asym`, `w8a16`, `w8a8-int8`, `w4a16-nvfp4`.

w<bits>a16     weights of 2, 3, 4, 5, 6 or 8 bits, activations in 16 bits (or 32 on the CPU)
-g<size>       one scale for each group of 32, 64 or 128 columns; without it, one for each row ("per channel")
-asym          with a zero point for each group; without it, symmetric

Words that other programs use are read too: int4 is w4a16-g128, fp8 is w8a8-fp8. No scheme is written that way.

w8a8-<type>    weights and activations are both int8, or both fp8 (e4m3): symmetric, with a scale for each row of the
               weights and one for each token, which is found when the token comes by ("dynamic")

w4a16-nvfp4    weights are 4-bit floating-point numbers (e2m1) with an e4m3 scale for each group of 16 columns
w4a16-mxfp4    the same with a power of two for each group of 32

w2a16-trellis  weights of 2 or 3 bits are paths through a trellis (`qtensor.trellis`), with a scale for each row, over
w3a16-trellis  rotated columns
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch

from warpbus.errors import SchemeError

WEIGHT_BITS = (2, 3, 4, 5, 6, 8)
GROUP_SIZES = (32, 64, 128)
ACTIVATIONS = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
"""The types to which activations may be rounded, and the dtype that they and the weights then have."""

ELEMENTS = {"nvfp4": 16, "mxfp4": 32}
"""The formats of 4-bit floating-point numbers, and their group sizes."""

TRELLIS = "trellis"
TRELLIS_BITS = (2, 3)

_ALIASES = {"int4": "w4a16-g128", "fp8": "w8a8-fp8"}

_PATTERN = re.compile(
    r"w4a16-(?P<element>nvfp4|mxfp4)|w(?P<path>[1-9]\d{0,3})a16-trellis|"
    r"w(?P<bits>[1-9]\d{0,3})a16(?:-g(?P<group>[1-9]\d{0,3}))?(?P<asym>-asym)?|w8a8-(?P<activations>int8|fp8)",
    re.ASCII,
)


@dataclass(frozen=True)
class Scheme:
    """How the weights of a linear layer are quantized.

    A weight is stored as an unsigned code of `bits` bits and read as `(code - zero) * scale`.
    `group_size` columns share a scale; `None` means that a whole row does. A symmetric scheme
    fixes `zero` at the middle code.

    `activations` is "int8" or "fp8" where the layer's inputs are rounded too; the weights are then values of that
    type, read as `value * scale`. An int8 value is its code minus the middle code; fp8 has no codes.

    `element` is "nvfp4" or "mxfp4" where the 4 bits are a floating-point number (`qtensor.fp4`), read as
    `number * scale`; kernels do not compute with it, so files in it are dequantized when they are loaded. It is
    "trellis" where the bits are those of a path through a trellis: GPUs have kernels for those.
    """

    bits: int
    group_size: int | None
    symmetric: bool = True
    activations: str | None = None
    element: str | None = None

    def __post_init__(self) -> None:
        if self.element == TRELLIS:
            if self.bits not in TRELLIS_BITS:
                raise SchemeError(f"a trellis of {self.bits} bits is not supported: use w3a16-trellis or w2a16-trellis")
            if (self.group_size, self.symmetric, self.activations) != (None, True, None):
                raise SchemeError("a trellis has one scale per row and no zero points: use w3a16-trellis")
            return
        if self.element is not None:
            expected = (4, ELEMENTS.get(self.element), True, None)
            if (self.bits, self.group_size, self.symmetric, self.activations) != expected:
                raise SchemeError(f"weights of {self.element} are not supported in this form: use w4a16-nvfp4")
            return
        if self.bits not in WEIGHT_BITS:
            raise SchemeError(f"weights of {self.bits} bits are not supported: choose from {_listed(WEIGHT_BITS)}")
        if self.group_size is not None and self.group_size not in GROUP_SIZES:
            raise SchemeError(
                f"groups of {self.group_size} are not supported: choose from {_listed(GROUP_SIZES)}, "
                "or leave -g out for one scale per row"
            )
        if self.activations is None:
            return
        if self.activations not in ACTIVATIONS:
            raise SchemeError(f"activations in {self.activations} are not supported: choose from int8, fp8")
        if (self.bits, self.group_size, self.symmetric) != (8, None, True):
            raise SchemeError(
                f"activations in {self.activations} go with symmetric weights of 8 bits and one scale per row: "
                f"use w8a8-{self.activations}"
            )

    @classmethod
    def parse(cls, text: str) -> "Scheme":
        """Read a scheme's name, for instance `w4a16-g128`, or an alias.

        Raises:
            SchemeError: if `text` is not a scheme's name, or names one that does not exist.
        """
        if text == "int8":
            raise SchemeError("scheme 'int8': give w8a16 for weights of 8 bits, or w8a8-int8 for activations too")
        match = _PATTERN.fullmatch(_ALIASES.get(text, text))
        if match is None:
            raise SchemeError(
                f"unknown scheme {text!r}: expected w<bits>a16[-g<group>][-asym], for instance w4a16-g128, "
                f"with bits from {_listed(WEIGHT_BITS)} and groups from {_listed(GROUP_SIZES)}; "
                "or int4 (w4a16-g128), w8a8-int8, w8a8-fp8, w4a16-nvfp4, w4a16-mxfp4, w3a16-trellis or w2a16-trellis"
            )
        if match["path"]:
            return cls(int(match["path"]), None, element=TRELLIS)
        if match["element"]:
            return cls(4, ELEMENTS[match["element"]], element=match["element"])
        if match["activations"]:
            return cls(8, None, activations=match["activations"])
        group = match["group"]
        return cls(int(match["bits"]), None if group is None else int(group), match["asym"] is None)

    def __str__(self) -> str:
        if self.activations is not None:
            return f"w8a8-{self.activations}"
        if self.element is not None:
            return f"w{self.bits}a16-{self.element}"
        group = "" if self.group_size is None else f"-g{self.group_size}"
        return f"w{self.bits}a16{group}{'' if self.symmetric else '-asym'}"

    @property
    def dtype(self) -> torch.dtype:
        """Of a `QTensor`'s `qweight`: int32, words of packed codes; int8 or float8_e4m3fn, one element a weight."""
        return torch.int32 if self.activations is None else ACTIVATIONS[self.activations]

    @property
    def has_codes(self) -> bool:
        """Whether weights are integers: all schemes but those of floating-point numbers."""
        return self.activations != "fp8" and self.element is None

    @property
    def max_code(self) -> int:
        """The largest code: 15 for 4 bits. SchemeError if the scheme has no codes."""
        self._require_codes()
        return 2**self.bits - 1

    @property
    def middle_code(self) -> int:
        """The code that means zero in a symmetric scheme: 8 for 4 bits. SchemeError if the scheme has no codes."""
        self._require_codes()
        return int(2 ** (self.bits - 1))

    def groups(self, in_features: int, name: str = "matrix") -> int:
        """The number of groups in a row of `in_features` columns.

        Raises:
            SchemeError: if the group size does not divide `in_features`; the message names `name`.
        """
        if self.group_size is None:
            return 1
        if in_features % self.group_size:
            if self.element is not None:
                raise SchemeError(
                    f"{name}: {in_features} columns cannot be cut into groups of {self.group_size} (scheme {self}): "
                    "use w4a16"
                )
            fitting = [size for size in GROUP_SIZES if in_features % size == 0]
            instead = f"use groups of {_listed(fitting)}" if fitting else "leave -g out for one scale per row"
            raise SchemeError(
                f"{name}: {in_features} columns cannot be cut into groups of {self.group_size} "
                f"(scheme {self}): {instead}"
            )
        return in_features // self.group_size

    def fitting(self, in_features: int) -> "Scheme":
        """The same scheme with the largest group size, up to its own, that divides `in_features`.

        It is the scheme itself if no group size does; see `groups`.
        """
        if self.element is not None:
            return self
        sizes = [size for size in GROUP_SIZES if size <= (self.group_size or 0) and in_features % size == 0]
        return replace(self, group_size=max(sizes)) if sizes else self

    def bits_per_weight(self, in_features: int, scale_bits: int = 16) -> float:
        """The average number of bits stored for a weight, scales and zero points included."""
        group = self.group_size or in_features
        if self.element in ELEMENTS:
            return self.bits + 8 / group
        return self.bits + (scale_bits + (0 if self.symmetric else self.bits)) / group

    @property
    def is_trellis(self) -> bool:
        """Whether the weights are paths through a trellis."""
        return self.element == TRELLIS

    def _require_codes(self) -> None:
        if not self.has_codes:
            raise SchemeError(
                f"{self}: its weights are floating-point values, not integer codes: use w8a8-int8 or w4a16"
            )


def _listed(values: tuple[int, ...] | list[int]) -> str:
    return ", ".join(map(str, values))


_REGULAR = "re:"  # begins a name that is a regular expression
_LONGEST = 4096  # characters of a pattern
_MOST_CHOICES = 8  # repetitions, options and groups of a pattern

# Python's `re` tries all ways that a pattern may fit, and a pattern may come out of a file: repeated groups are
# refused, and so are many choices.
_NO_SYNTAX = re.compile(r"\\.|\[[^\]]*\]", re.DOTALL)
_CHOICE = re.compile(r"[*+?{(]")
_REPEATED_GROUP = re.compile(r"\)[*+{]")


@dataclass(frozen=True)
class Schemes:
    """The schemes of a model's matrices.

    Attributes:
        default: of the matrices that no exception fits; None: they are not quantized.
        exceptions: by the matrix' name in the checkpoint without `.weight`, `model.layers.3.mlp.down_proj`; or by
            `re:` and a regular expression that the name has to begin with (end it with `$` to mean the whole name).
            The first that fits holds.

    Raises:
        SchemeError: if a pattern is no regular expression, or one that may take forever.
    """

    default: Scheme | None
    exceptions: Mapping[str, Scheme | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in self.exceptions:
            if name.startswith(_REGULAR):
                _check_pattern(name.removeprefix(_REGULAR))

    def of(self, name: str) -> Scheme | None:
        """The scheme of a matrix, or None if it is not quantized."""
        for exception, scheme in self.exceptions.items():
            if exception == name:
                return scheme
            if exception.startswith(_REGULAR) and re.match(exception.removeprefix(_REGULAR), name):
                return scheme
        return self.default

    def distinct(self) -> tuple[Scheme, ...]:
        """The schemes that there are, each once, that of most matrices (the default) first."""
        return tuple(dict.fromkeys(each for each in (self.default, *self.exceptions.values()) if each is not None))

    def __str__(self) -> str:
        return " + ".join(map(str, self.distinct())) or "not quantized"

    def to_json(self) -> dict[str, object]:
        """The same in JSON's types."""
        exceptions = {name: None if scheme is None else str(scheme) for name, scheme in self.exceptions.items()}
        return {"default": None if self.default is None else str(self.default), "exceptions": exceptions}

    @classmethod
    def from_json(cls, value: object) -> "Schemes":
        """Undo `to_json`.

        Raises:
            SchemeError: if `value` is not what `to_json` gives.
        """
        if not isinstance(value, dict) or not isinstance(value.get("exceptions"), dict):
            raise SchemeError(f"schemes are {value!a:.80}: expected an object with default and exceptions")
        exceptions = {str(name): _read(text) for name, text in value["exceptions"].items()}
        return cls(_read(value.get("default")), exceptions)


def _read(text: object) -> Scheme | None:
    if text is None:
        return None
    if not isinstance(text, str):
        raise SchemeError(f"scheme {text!a:.80}: expected a name such as w4a16-g128, or null")
    return Scheme.parse(text)


def _check_pattern(pattern: str) -> None:
    shown = f"pattern {pattern!a:.80}"
    if len(pattern) > _LONGEST:
        raise SchemeError(f"{shown}: it has {len(pattern)} characters, expected {_LONGEST} at most")
    syntax = _NO_SYNTAX.sub("x", pattern)
    if _REPEATED_GROUP.search(syntax) or len(_CHOICE.findall(syntax)) > _MOST_CHOICES:
        raise SchemeError(
            f"{shown}: expected no repeated group and at most {_MOST_CHOICES} of * + ? {{ (: name the matrices instead"
        )
    try:
        re.compile(pattern)
    except (re.error, OverflowError) as error:
        raise SchemeError(f"{shown}: it is no regular expression: {error}") from error
