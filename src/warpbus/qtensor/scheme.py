"""Quantization schemes and their one spelling: `w4a16-g128`, `w4a16-g32-asym`, `w8a16`.

w<bits>a16     weights of 2, 3, 4 or 8 bits, activations in 16 bits (or 32 on the CPU)
-g<size>       one scale for each group of 32, 64 or 128 columns; without it, one for each row ("per channel")
-asym          with a zero point for each group; without it, symmetric
"""

import re
from dataclasses import dataclass

from warpbus.errors import SchemeError

WEIGHT_BITS = (2, 3, 4, 8)
GROUP_SIZES = (32, 64, 128)

_PATTERN = re.compile(r"w(?P<bits>[1-9]\d{0,3})a16(?:-g(?P<group>[1-9]\d{0,3}))?(?P<asym>-asym)?", re.ASCII)


@dataclass(frozen=True)
class Scheme:
    """How the weights of a linear layer are quantized.

    A weight is stored as an unsigned code of `bits` bits and read as `(code - zero) * scale`.
    `group_size` columns share a scale; `None` means that a whole row does. A symmetric scheme
    fixes `zero` at the middle code.
    """

    bits: int
    group_size: int | None
    symmetric: bool = True

    def __post_init__(self) -> None:
        if self.bits not in WEIGHT_BITS:
            raise SchemeError(f"weights of {self.bits} bits are not supported: choose from {_listed(WEIGHT_BITS)}")
        if self.group_size is not None and self.group_size not in GROUP_SIZES:
            raise SchemeError(
                f"groups of {self.group_size} are not supported: choose from {_listed(GROUP_SIZES)}, "
                "or leave -g out for one scale a row"
            )

    @classmethod
    def parse(cls, text: str) -> "Scheme":
        """Read a scheme's name, for instance `w4a16-g128`.

        Raises:
            SchemeError: if `text` is not a scheme's name, or names one that does not exist.
        """
        match = _PATTERN.fullmatch(text)
        if match is None:
            raise SchemeError(
                f"unknown scheme {text!r}: expected w<bits>a16[-g<group>][-asym], for instance w4a16-g128, "
                f"with bits from {_listed(WEIGHT_BITS)} and groups from {_listed(GROUP_SIZES)}"
            )
        group = match["group"]
        return cls(int(match["bits"]), None if group is None else int(group), match["asym"] is None)

    def __str__(self) -> str:
        group = "" if self.group_size is None else f"-g{self.group_size}"
        return f"w{self.bits}a16{group}{'' if self.symmetric else '-asym'}"

    @property
    def max_code(self) -> int:
        """The largest code: 15 for 4 bits."""
        return 2**self.bits - 1

    @property
    def middle_code(self) -> int:
        """The code that means zero in a symmetric scheme: 8 for 4 bits."""
        return int(2 ** (self.bits - 1))

    def groups(self, in_features: int, name: str = "matrix") -> int:
        """The number of groups in a row of `in_features` columns.

        Raises:
            SchemeError: if the group size does not divide `in_features`; the message names `name`.
        """
        if self.group_size is None:
            return 1
        if in_features % self.group_size:
            fitting = [size for size in GROUP_SIZES if in_features % size == 0]
            instead = f"use groups of {_listed(fitting)}" if fitting else "leave -g out for one scale a row"
            raise SchemeError(
                f"{name}: {in_features} columns cannot be cut into groups of {self.group_size} "
                f"(scheme {self}): {instead}"
            )
        return in_features // self.group_size

    def bits_per_weight(self, in_features: int, scale_bits: int = 16) -> float:
        """The average number of bits stored for a weight, scales and zero points included."""
        group = self.group_size or in_features
        return self.bits + (scale_bits + (0 if self.symmetric else self.bits)) / group


def _listed(values: tuple[int, ...] | list[int]) -> str:
    return ", ".join(map(str, values))
