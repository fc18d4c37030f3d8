"""Inline PTX on the CPU: arithmetic and bits against Python, tensor cores against whole matrix products."""

import math
import struct
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from cuda_program_runs import run_checked

from warpbus.cuda.programs import translate


@pytest.fixture
def run(tmp_path):
    return lambda text: run_checked(tmp_path, text)


def single(value: float) -> str:
    """A float of 32 bits as a constant of PTX."""
    return f"0f{struct.unpack('<I', struct.pack('<f', value))[0]:08X}"


def half(value: float) -> int:
    """The bits of a float16."""
    return int.from_bytes(struct.pack("<e", value), "little")


def brain(value: float) -> int:
    """The bits of a bfloat16."""
    return torch.tensor(value, dtype=torch.bfloat16).view(torch.int16).item() & 0xFFFF


def pair(low: int, high: int) -> int:
    return high << 16 | low


# The type of x, the statement, and what x is then.
CASES: list[tuple[str, str, object]] = [
    ("unsigned", '"add.u32 %0, %1, %2;" : "=r"(x) : "r"(4000000000u), "r"(600000000u)', 305032704),
    ("int", '"sub.s32 %0, %1, 7;" : "=r"(x) : "r"(-2147483647)', 2147483642),
    ("int", '"add.s32 %0, %0, %1;" : "+r"(x) : "r"(5)', 5),
    ("unsigned short", '"cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(x) : "f"(1.5f), "f"(-1000.0f)', 0x3CFE),
    ("unsigned short", '"cvt.rn.satfinite.relu.e5m2x2.f32 %0, %1, %2;" : "=h"(x) : "f"(1.5f), "f"(-1000.0f)', 0x3E00),
    ("unsigned short", f'"cvt.rn.satfinite.e4m3x2.f16x2 %0, %1;" : "=h"(x) : "r"({half(0.3)} << 16)', 0x2A00),
    ("unsigned", '"cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(x) : "h"((unsigned short)0x2A7F)', pair(0x7FFF, half(0.3125))),
    ("long long", '"mul.wide.s32 %0, %1, %2;" : "=l"(x) : "r"(-100000), "r"(100000)', -10000000000),
    ("int", '"mul.lo.s32 %0, %1, %2;" : "=r"(x) : "r"(100000), "r"(100000)', 1410065408),
    ("unsigned", '"mul.hi.u32 %0, %1, %2;" : "=r"(x) : "r"(4000000000u), "r"(3)', 2),
    ("long long", '"mul.hi.s64 %0, %1, %2;" : "=l"(x) : "l"(-(1ll << 62)), "l"(6ll)', -2),
    ("long long", '"mad.wide.u32 %0, %1, %2, %3;" : "=l"(x) : "r"(3000000000u), "r"(2), "l"(1ll)', 6000000001),
    ("int", '"mad.lo.s32 %0, %1, %2, %3;" : "=r"(x) : "r"(3), "r"(-4), "r"(5)', -7),
    ("int", '"div.s32 %0, %1, %2;" : "=r"(x) : "r"(-7), "r"(2)', -3),
    ("int", '"rem.s32 %0, %1, %2;" : "=r"(x) : "r"(-7), "r"(2)', -1),
    ("int", '"min.s32 %0, %1, %2;" : "=r"(x) : "r"(-7), "r"(2)', -7),
    ("unsigned", '"min.u32 %0, %1, %2;" : "=r"(x) : "r"(-7), "r"(2)', 2),
    ("int", '"abs.s32 %0, %1;" : "=r"(x) : "r"(-7)', 7),
    ("float", '"add.f32 %0, %1, %2;" : "=f"(x) : "f"(1.5f), "f"(2.25f)', 3.75),
    ("float", '"add.ftz.sat.f32 %0, %1, %2;" : "=f"(x) : "f"(1.5f), "f"(2.25f)', 1.0),
    ("float", f'"mul.f32 %0, %1, {single(0.5)};" : "=f"(x) : "f"(-3.0f)', -1.5),
    ("float", '"fma.rn.f32 %0, %1, %2, %3;" : "=f"(x) : "f"(3.0f), "f"(2.0f), "f"(0.5f)', 6.5),
    ("double", '"fma.rn.f64 %0, %1, %2, %3;" : "=d"(x) : "d"(3.0), "d"(2.0), "d"(0.5)', 6.5),
    ("float", '"max.f32 %0, %1, %2;" : "=f"(x) : "f"(nanf("")), "f"(2.0f)', 2.0),
    ("float", '"ex2.approx.ftz.f32 %0, %1;" : "=f"(x) : "f"(-3.0f)', 0.125),
    ("float", '"rcp.approx.f32 %0, %1;" : "=f"(x) : "f"(4.0f)', 0.25),
    ("float", '"rsqrt.approx.f32 %0, %1;" : "=f"(x) : "f"(4.0f)', 0.5),
    ("float", '"tanh.approx.f32 %0, %1;" : "=f"(x) : "f"(0.5f)', math.tanh(0.5)),
    ("float", '"lg2.approx.f32 %0, %1;" : "=f"(x) : "f"(0.125f)', -3.0),
    ("unsigned", f'"add.f16x2 %0, %1, %2;" : "=r"(x) : "r"({pair(half(1), half(2))}), "r"({pair(half(0.5), half(-4))})',
     pair(half(1.5), half(-2))),
    ("unsigned", f'"fma.rn.f16x2 %0, %1, %1, %1;" : "=r"(x) : "r"({pair(half(3), half(-2))})', pair(half(12), half(2))),
    ("unsigned", f'"max.bf16x2 %0, %1, %2;" : "=r"(x) : "r"({pair(brain(3), brain(-2))}), '
     f'"r"({pair(brain(1), brain(7))})', pair(brain(3), brain(7))),
    ("unsigned short", f'"mul.f16 %0, %1, %2;" : "=h"(x) : "h"((unsigned short){half(3)}), '
     f'"h"((unsigned short){half(0.1)})', half(3 * 0.0999755859375)),
    ("unsigned", '"and.b32 %0, %1, 0xff00;" : "=r"(x) : "r"(0x12345678)', 0x5600),
    ("unsigned", '"xor.b32 %0, %1, %2;" : "=r"(x) : "r"(0x12345678), "r"(0x0f0f0f0f)', 0x1D3B5977),
    ("unsigned", '"not.b32 %0, %1;" : "=r"(x) : "r"(0x12345678)', 0xEDCBA987),
    ("unsigned", '"shl.b32 %0, %1, %2;" : "=r"(x) : "r"(3), "r"(31)', 0x80000000),
    ("unsigned", '"shl.b32 %0, %1, %2;" : "=r"(x) : "r"(3), "r"(32)', 0),
    ("unsigned", '"shr.u32 %0, %1, 33;" : "=r"(x) : "r"(0x80000000)', 0),
    ("unsigned", '"shr.u32 %0, %1, 31;" : "=r"(x) : "r"(0x80000000)', 1),
    ("int", '"shr.s32 %0, %1, 40;" : "=r"(x) : "r"(-5)', -1),
    ("unsigned", '"lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(x) : "r"(0x12345678), "r"(0x00ff00ff), "r"(0x64006400)',
     0x12345678 & 0x00FF00FF | 0x64006400),
    ("unsigned", '"prmt.b32 %0, %1, %2, 0x5410;" : "=r"(x) : "r"(0x33221100), "r"(0x77665544)', 0x55441100),
    ("unsigned", '"prmt.b32 %0, %1, %2, 0xb9b3;" : "=r"(x) : "r"(0x80221100), "r"(0x77665544)', 0xFF00FF80),
    ("unsigned", '"bfe.u32 %0, %1, 4, 8;" : "=r"(x) : "r"(0x12345678)', 0x67),
    ("int", '"bfe.s32 %0, %1, 28, 4;" : "=r"(x) : "r"(0xF2345678)', -1),
    ("unsigned", '"bfi.b32 %0, %1, %2, 8, 4;" : "=r"(x) : "r"(0xab), "r"(0)', 0xB00),
    ("unsigned", '"popc.b32 %0, %1;" : "=r"(x) : "r"(0xF0F0)', 8),
    ("unsigned", '"clz.b32 %0, %1;" : "=r"(x) : "r"(0xF0F0)', 16),
    ("unsigned", '"brev.b32 %0, %1;" : "=r"(x) : "r"(1)', 0x80000000),
    ("unsigned", '"bfind.u32 %0, %1;" : "=r"(x) : "r"(0xF0F0)', 15),
    ("int", '"dp4a.s32.s32 %0, %1, %2, %3;" : "=r"(x) : "r"(0x01ff0203), "r"(0x01020304), "r"(10)', 27),
    ("int", '"cvt.rni.s32.f32 %0, %1;" : "=r"(x) : "f"(2.5f)', 2),
    ("int", '"cvt.rzi.s32.f32 %0, %1;" : "=r"(x) : "f"(-2.75f)', -2),
    ("int", '"cvt.rpi.s32.f32 %0, %1;" : "=r"(x) : "f"(1e20f)', 2147483647),
    ("unsigned", '"cvt.rmi.u32.f32 %0, %1;" : "=r"(x) : "f"(-3.5f)', 0),
    ("float", '"cvt.rn.f32.s32 %0, %1;" : "=f"(x) : "r"(-3)', -3.0),
    ("float", '"cvt.rmi.f32.f32 %0, %1;" : "=f"(x) : "f"(-3.5f)', -4.0),
    ("int", '"cvt.s32.s8 %0, %1;" : "=r"(x) : "r"(0x1ff)', -1),
    ("int", '"cvt.sat.s8.s32 %0, %1;" : "=r"(x) : "r"(-1000)', -128),
    ("unsigned", '"cvt.u32.u64 %0, %1;" : "=r"(x) : "l"(0x1234567890ll)', 0x34567890),
    ("unsigned", '"cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(x) : "f"(1.5f), "f"(-2.0f)', pair(half(-2), half(1.5))),
    ("unsigned", '"cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(x) : "f"(1.5f), "f"(-2.0f)', pair(brain(-2), brain(1.5))),
    ("float", f'"cvt.f32.f16 %0, %1;" : "=f"(x) : "h"((unsigned short){half(0.1)})', 0.0999755859375),
    ("float", '"cvt.rna.tf32.f32 %0, %1;" : "=r"(*(unsigned *)&x) : "f"(1.00048828125f)', 1.0009765625),
    ("unsigned", '"mov.b32 %0, {%1, %2};" : "=r"(x) : "h"((unsigned short)5), "h"((unsigned short)7)', 7 << 16 | 5),
    ("unsigned", '"{ .reg .b16 low, high; mov.b32 {low, high}, %1; mov.b32 %0, {high, low}; }" : "=r"(x)'
     ' : "r"(7 << 16 | 5)', 5 << 16 | 7),
    ("long long", '"mov.b64 %0, {%1, %2};" : "=l"(x) : "r"(5), "r"(7)', 7 << 32 | 5),
    ("int", '"{ .reg .pred p; setp.lt.s32 p, %1, %2; selp.b32 %0, 1, 2, p; }" : "=r"(x) : "r"(-1), "r"(0)', 1),
    ("int", '"{ .reg .pred p; setp.lt.u32 p, %1, %2; selp.b32 %0, 1, 2, p; }" : "=r"(x) : "r"(-1), "r"(0)', 2),
    ("int", '"{ .reg .pred p, q; setp.ne.f32 p|q, %1, %1; @q mov.b32 %0, 3; @!q mov.b32 %0, 4; }" : "=r"(x)'
     ' : "f"(1.0f)', 3),
    ("int", '"{ .reg .pred p; setp.neu.f32 p, %1, %1;\\n\\t@p mov.b32 %0, 3; }" : "=r"(x) : "f"(nanf(""))', 3),
    ("int", '"{ .reg .b32 %%t<3>; mov.u32 %%t1, 6; add.s32 %0, %%t1, %1; } // twice\\n" : "=r"(x) : "n"(3 * 4)', 18),
    ("unsigned", '"mov.u32 %0, %%ntid.x;" : "=r"(x)', 1),
    ("unsigned", '"mov.u32 %0, %%lanemask_le;" : "=r"(x)', 1),
    ("int", '"st.shared.v2.s32 [%1 + 8], {%2, %3}; ld.shared.s32 %0, [%1 + 12];" : "=r"(x)'
     ' : "r"((unsigned)__cvta_generic_to_shared(room)), "r"(4), "r"(-9)', -9),
    ("float", '"{ .reg .u64 at; cvta.to.shared.u64 at, %1; st.shared.f32 [at], %2; ld.f32 %0, [%1]; }" : "=f"(x)'
     ' : "l"(room), "f"(2.5f)', 2.5),
    ("int", '"ld.shared.s8 %0, [%1];" : "=r"(x) : "l"((room[0] = 0x80, room))', -128),
    ("int", '"atom.shared.add.u32 %0, [%1], 4; red.shared.max.s32 [%1], 9;" : "=r"(x) : "l"((room[0] = 3, room))', 3),
    ("int", '"atom.cas.b32 %0, [%1], 9, 1;" : "=r"(x) : "l"(room)', 9),
    ("int", '"ld.acquire.gpu.s32 %0, [%1];" : "=r"(x) : "l"(room)', 1),
]  # fmt: skip


def test_instructions(run) -> None:
    text = "__global__ void k() {\n    __shared__ int room[8];\n"
    for kind, statement, expected in CASES:
        form = "%.9g" if isinstance(expected, float) else "%lld"
        value = "(double)x" if isinstance(expected, float) else "(long long)x"
        text += f'    {{ {kind} x = 0; asm volatile({statement}); printf("{form}\\n", {value}); }}\n'
    found = run(text + "}\nint main() { k<<<1, 1>>>(); cudaDeviceSynchronize(); }\n").splitlines()
    assert len(found) == len(CASES)
    for line, (kind, statement, expected) in zip(found, CASES, strict=True):
        value = int(line) if isinstance(expected, int) else float(line)
        assert value == pytest.approx(expected, rel=1e-6, abs=0), (kind, statement)


WARP = """
__global__ void k(int *x) {
    int lane, sum, other, up, all;
    asm("mov.u32 %0, %%laneid;" : "=r"(lane));
    asm volatile("redux.sync.add.s32 %0, %1, 0xffffffff;" : "=r"(sum) : "r"(lane));
    asm volatile("shfl.sync.bfly.b32 %0, %1, 0x1, 0x1f, 0xffffffff;" : "=r"(other) : "r"(lane));
    asm volatile("shfl.sync.up.b32 %0, %1, 0x2, 0x0, 0xffffffff;" : "=r"(up) : "r"(lane));
    asm volatile("{ .reg .pred p; setp.gt.s32 p, %1, 29; vote.sync.ballot.b32 %0, p, 0xffffffff; }"
                 : "=r"(all)
                 : "r"(lane));
    x[threadIdx.x] = sum + other * 1000 + up * 100000;
    asm volatile("bar.sync 0;" ::: "memory");
    if (threadIdx.x == 0) x[32] = all;
}
int main() {
    int *x, y[33]; cudaMalloc(&x, 132); k<<<1, 32>>>(x); cudaMemcpy(y, x, 132, cudaMemcpyDeviceToHost);
    printf("%d %d %d %u", y[0], y[1], y[9], y[32]);
}
"""


def test_a_warp(run) -> None:
    assert run(WARP) == f"{496 + 1000} {496 + 100000} {496 + 8000 + 700000} {0xC0000000}"


@dataclass(frozen=True)
class Layout:
    """Where `mma` has the elements of its matrices, as the PTX ISA describes it, for lane 4 g + t and element i."""

    shape: tuple[int, int]  # M, K
    types: tuple[str, str, str]  # of A, B, and the sums
    per_register: int
    a: Callable[[int, int, int], tuple[int, int]]
    b: Callable[[int, int, int], tuple[int, int]]


def halves_of_16(g: int, t: int, i: int) -> tuple[int, int]:
    return (g if i < 2 or 4 <= i < 6 else g + 8), t * 2 + (i & 1) + (0 if i < 4 else 8)


HALF_16 = (halves_of_16, lambda g, t, i: (t * 2 + (i & 1) + (0 if i < 2 else 8), g))
HALF_8 = (lambda g, t, i: (g if i < 2 else g + 8, t * 2 + (i & 1)), lambda g, t, i: (t * 2 + i, g))
BYTES_32 = (
    lambda g, t, i: (g if i < 4 or 8 <= i < 12 else g + 8, t * 4 + (i & 3) + (0 if i < 8 else 16)),
    lambda g, t, i: (t * 4 + (i & 3) + (0 if i < 4 else 16), g),
)
NIBBLES_64 = (
    lambda g, t, i: (g if i < 8 or 16 <= i < 24 else g + 8, t * 8 + (i & 7) + (0 if i < 16 else 32)),
    lambda g, t, i: (t * 8 + (i & 7) + (0 if i < 8 else 32), g),
)
LAYOUTS = {
    "f16": Layout((16, 16), ("f16", "f16", "f32"), 2, *HALF_16),
    "f16 sums of f16": Layout((16, 16), ("f16", "f16", "f16"), 2, *HALF_16),
    "bf16": Layout((16, 16), ("bf16", "bf16", "f32"), 2, *HALF_16),
    "f16 k8": Layout((16, 8), ("f16", "f16", "f32"), 2, *HALF_8),
    "tf32": Layout(
        (16, 8), ("tf32", "tf32", "f32"), 1,
        lambda g, t, i: (g if i in (0, 2) else g + 8, t if i < 2 else t + 4),
        lambda g, t, i: (t if i == 0 else t + 4, g),
    ),
    "s8": Layout((16, 32), ("s8", "s8", "s32"), 4, *BYTES_32),
    "u8 and s8": Layout((16, 32), ("u8", "s8", "s32"), 4, *BYTES_32),
    "e4m3": Layout((16, 32), ("e4m3", "e4m3", "f32"), 4, *BYTES_32),
    "e5m2 and e4m3": Layout((16, 32), ("e5m2", "e4m3", "f32"), 4, *BYTES_32),
    "e4m3 sums of f16": Layout((16, 32), ("e4m3", "e5m2", "f16"), 4, *BYTES_32),
    "s8 k16": Layout(
        (16, 16), ("s8", "s8", "s32"), 4,
        lambda g, t, i: (g if i < 4 else g + 8, t * 4 + (i & 3)), lambda g, t, i: (t * 4 + i, g),
    ),
    "s8 m8": Layout((8, 16), ("s8", "s8", "s32"), 4, lambda g, t, i: (g, t * 4 + i), lambda g, t, i: (t * 4 + i, g)),
    "s4": Layout((16, 64), ("s4", "s4", "s32"), 8, *NIBBLES_64),
    "u4": Layout((16, 64), ("u4", "u4", "s32"), 8, *NIBBLES_64),
    "bf16 k8": Layout((16, 8), ("bf16", "bf16", "f32"), 2, *HALF_8),
    "tf32 k4": Layout(
        (16, 4), ("tf32", "tf32", "f32"), 1, lambda g, t, i: (g if i == 0 else g + 8, t), lambda g, t, i: (t, g)
    ),
    "s4 and u4, k32": Layout(
        (16, 32), ("s4", "u4", "s32"), 8,
        lambda g, t, i: (g if i < 8 else g + 8, t * 8 + (i & 7)), lambda g, t, i: (t * 8 + i, g),
    ),
    "s4 m8": Layout((8, 32), ("s4", "s4", "s32"), 8, lambda g, t, i: (g, t * 8 + i), lambda g, t, i: (t * 8 + i, g)),
    "f64": Layout((8, 4), ("f64", "f64", "f64"), 1, lambda g, t, i: (g, t), lambda g, t, i: (t, g)),
}  # fmt: skip

LIMITS = {"s8": (-128, 128), "u8": (0, 256), "s4": (-8, 8), "u4": (0, 16)}
DTYPES = {
    "f16": torch.float16,
    "bf16": torch.bfloat16,
    "e4m3": torch.float8_e4m3fn,
    "e5m2": torch.float8_e5m2,
}


def drawn(kind: str, *shape: int) -> torch.Tensor:
    if kind in LIMITS:
        return torch.randint(*LIMITS[kind], shape).double()
    if kind == "tf32":
        return torch.randint(-1000, 1000, shape).double() / 64  # 10 digits at most
    return torch.randn(shape, dtype=torch.float64).to(DTYPES.get(kind, torch.float64)).double()


def packed(kind: str, values: list[float]) -> int:
    """A register."""
    if kind in ("f64", "tf32"):
        return int.from_bytes(struct.pack("<d" if kind == "f64" else "<f", values[0]), "little")
    bits = 32 // len(values)
    codes = [code(kind, x, bits) for x in values]
    return sum(each << bits * index for index, each in enumerate(codes))


def code(kind: str, value: float, bits: int) -> int:
    """The bits of an element."""
    if kind in ("e4m3", "e5m2"):
        return torch.tensor(value, dtype=DTYPES[kind]).view(torch.uint8).item()
    return half(value) if kind == "f16" else brain(value) if kind == "bf16" else int(value) % 2**bits


def registers(
    layout: Layout, kind: str, matrix: torch.Tensor, place: Callable[[int, int, int], tuple[int, int]]
) -> str:
    """The registers of all lanes as an array of C++."""
    per_lane = matrix.numel() // 32
    lanes = []
    for lane in range(32):
        values = [matrix[place(lane // 4, lane % 4, i)].item() for i in range(per_lane)]
        size = layout.per_register
        lanes.append(", ".join(f"{packed(kind, values[at : at + size])}u" for at in range(0, per_lane, size)))
    return ", ".join(f"{{{each}}}" for each in lanes).replace("u", "ull" if kind == "f64" else "u")


@pytest.mark.parametrize("name", LAYOUTS)
def test_tensor_cores(name: str, run) -> None:
    layout = LAYOUTS[name]
    (rows, depth), (kind_a, kind_b, sums) = layout.shape, layout.types
    a, b, c = drawn(kind_a, rows, depth), drawn(kind_b, depth, 8), drawn("s8", rows, 8)
    wide = kind_a == "f64"
    letter, word = ("d", "double") if wide else ("r", "unsigned")
    count_a, count_b = (x.numel() // 32 // layout.per_register for x in (a, b))
    letter_c, word_c = {"f32": ("f", "float"), "s32": ("r", "int"), "f64": ("d", "double"), "f16": ("r", "unsigned")}[
        sums
    ]
    count_c = rows // 4 // (2 if sums == "f16" else 1)
    slots = iter(range(100))

    def vector(count: int) -> str:
        return "{" + ", ".join(f"%{next(slots)}" for _ in range(count)) + "}"

    opcode = f"mma.sync.aligned.m{rows}n8k{depth}.row.col.{sums}.{kind_a}.{kind_b}.{sums}"
    places = [(lane // 4 + 8 * (i // 2), lane % 4 * 2 + i % 2) for lane in range(32) for i in range(rows // 4)]
    values = [c[place].item() for place in places]
    if sums == "f16":
        values = [pair(half(low), half(high)) for low, high in zip(values[::2], values[1::2], strict=True)]
    starts = ", ".join(f"({word_c}){value}" for value in values)
    of_a = ", ".join(f'"{letter}"(A[lane][{i}])' for i in range(count_a))
    of_b = ", ".join(f'"{letter}"(B[lane][{i}])' for i in range(count_b))
    of_c = ", ".join(f'"+{letter_c}"(c[{i}])' for i in range(count_c))
    # The sums are read and written: operands 0 to n - 1, then A and B.
    sums_vector = vector(count_c)
    statement = f'asm volatile("{opcode} {sums_vector}, {vector(count_a)}, {vector(count_b)}, {sums_vector};\\n"'
    statement += f" : {of_c} : {of_a}, {of_b});"
    bits = "unsigned long long" if wide else word
    bits_a, bits_b = registers(layout, kind_a, a, layout.a), registers(layout, kind_b, b, layout.b)
    text = f"""
__constant__ {bits} a_bits[32][{count_a}] = {{{bits_a}}}, b_bits[32][{count_b}] = {{{bits_b}}};
__constant__ {word_c} starts[] = {{{starts}}};
__global__ void k({word_c} *out) {{
    const int lane = threadIdx.x;
    const auto A = reinterpret_cast<const {word}(*)[{count_a}]>(a_bits);
    const auto B = reinterpret_cast<const {word}(*)[{count_b}]>(b_bits);
    {word_c} c[{count_c}];
    for (int i = 0; i < {count_c}; ++i) c[i] = starts[lane * {count_c} + i];
    {statement}
    for (int i = 0; i < {count_c}; ++i) out[lane * {count_c} + i] = c[i];
}}
int main() {{
    static {word_c} host[{32 * count_c}], *out; cudaMalloc(&out, sizeof host); k<<<1, 32>>>(out);
    cudaMemcpy(host, out, sizeof host, cudaMemcpyDeviceToHost);
    for (auto each : host) printf("%.17g\\n", (double)each);
}}
"""
    found = [float(line) for line in run(text).splitlines()]
    if sums == "f16":
        found = [x for each in found for x in struct.unpack("<2e", int(each).to_bytes(4, "little"))]
    expected = a @ b + c
    rounding = {"f32": 1e-5, "f16": 2e-3, "f64": 1e-14, "s32": 0}[sums]
    scale = (a.abs() @ b.abs() + c.abs()).max().item()
    for value, place in zip(found, places, strict=True):
        assert abs(value - expected[place].item()) <= rounding * scale


LDMATRIX = """
__global__ void k(const unsigned short *in, unsigned *out) {
    __shared__ __align__(16) unsigned short tile[32][8], back[32][8];
    for (int i = 0; i < 8; ++i) tile[threadIdx.x][i] = in[threadIdx.x * 8 + i];
    __syncthreads();
    unsigned x[4], at = (unsigned)__cvta_generic_to_shared(tile[threadIdx.x]);
    asm volatile("ldmatrix.sync.aligned.m8n8.x4TRANSPOSED.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3]) : "r"(at));
    for (int i = 0; i < 4; ++i) out[threadIdx.x * 4 + i] = x[i];
    at = (unsigned)__cvta_generic_to_shared(back[threadIdx.x]);
    asm volatile("stmatrix.sync.aligned.m8n8.x4TRANSPOSED.shared.b16 [%0], {%1, %2, %3, %4};"
                 :: "r"(at), "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3]) : "memory");
    __syncthreads();
    for (int i = 0; i < 8; ++i)
        if (back[31 - threadIdx.x][i] != tile[31 - threadIdx.x][i]) out[threadIdx.x] = 99;
}
int main() {
    unsigned short host[256], *in; unsigned y[128], *out;
    for (int i = 0; i < 256; ++i) host[i] = i;
    cudaMalloc(&in, 512); cudaMalloc(&out, 512); cudaMemcpy(in, host, 512, cudaMemcpyHostToDevice);
    k<<<1, 32>>>(in, out); cudaMemcpy(y, out, 512, cudaMemcpyDeviceToHost);
    for (unsigned each : y) printf("%u %u\\n", each & 65535, each >> 16);
}
"""


@pytest.mark.parametrize("transposed", [False, True])
def test_ldmatrix_and_stmatrix(transposed: bool, run) -> None:
    found = iter(run(LDMATRIX.replace("TRANSPOSED", ".trans" if transposed else "")).splitlines())
    for lane in range(32):
        for matrix in range(4):
            first, second = (
                matrix * 64 + (column * 8 + row if transposed else row * 8 + column)
                for row, column in ((lane // 4, lane % 4 * 2), (lane // 4, lane % 4 * 2 + 1))
            )
            assert next(found) == f"{first} {second}"


COPIES = """
#define COPY(to, from, bytes, taken) \\
    asm volatile("cp.async.ca.shared.global.L2::128B [%0], [%1], %2, %3;" \\
                 :: "r"((unsigned)__cvta_generic_to_shared(to)), "l"(from), "n"(bytes), "r"(taken))
__global__ void k(const int *in, int *out) {
    __shared__ int a[32], b[32];
    COPY(&a[threadIdx.x], in + threadIdx.x, 4, threadIdx.x < 30 ? 4 : 0);
    asm volatile("cp.async.commit_group;");
    COPY(&b[threadIdx.x], in + 31 - threadIdx.x, 4, 4);
    asm volatile("cp.async.commit_group;\\n" ::);
    asm volatile("cp.async.wait_group %0;" :: "n"(PENDING));
    __syncthreads();
    out[threadIdx.x] = a[31 - threadIdx.x] + b[31 - threadIdx.x] * 100;
}
int main() {
    int host[32], *in, *out; for (int i = 0; i < 32; ++i) host[i] = i + 1;
    cudaMalloc(&in, 128); cudaMalloc(&out, 128); cudaMemcpy(in, host, 128, cudaMemcpyHostToDevice);
    k<<<1, 32>>>(in, out); cudaMemcpy(host, out, 128, cudaMemcpyDeviceToHost);
    printf("%d %d %d", host[0], host[2], host[31]);
}
"""


def test_asynchronous_copies(run) -> None:
    assert run(COPIES.replace("PENDING", "0")) == "100 330 3201"
    assert "reads b[31]" in run(COPIES.replace("PENDING", "1"))  # its group is still under way


def program(statement: str) -> str:
    main = "int main() { int *x; cudaMalloc(&x, 4); k<<<1, 1>>>(x); }\n"
    return f"__global__ void k(int *x) {{\n    {statement}\n}}\n{main}"


@pytest.mark.parametrize(
    ("statement", "instruction"),
    [
        ('asm volatile("st.async.shared::cluster.b32 [%0], 1;" ::"l"(x));', "st.async.shared::cluster.b32"),
        ('asm volatile("add.rz.f32 %0, %0, %0;" : "+f"(*(float *)x));', "add.rz.f32"),
        *(
            (f'asm volatile("mma.sync.aligned.{each} {{}}, {{}}, {{}}, {{}};");', f"mma.sync.aligned.{each}")
            for each in (
                "m16n8k32.row.col.f32.f16.f16.f32",
                "m16n8k16.row.col.f32.f16.bf16.f32",
                "m16n8k16.row.col.f16.bf16.bf16.f16",
                "m16n8k16.col.col.f32.f16.f16.f32",
            )
        ),
        ('asm volatile("{ .reg .pred p; setp.eq.s32 p, 1, 1; @p brx.idx p, DONE; }");', "brx.idx"),
        ('asm volatile("mov.u32 %0, %%nothing;" : "=r"(*x));', "mov.u32"),
        ('asm volatile("mov.u32 %7, 3;" : "=r"(*x));', "mov.u32"),
        ('#define T "u32"\n    asm volatile("mov." T " %0, 3;" : "=r"(*x));', "asm, whose text a macro puts together"),
    ],
)
def test_an_unknown_instruction_is_refused_where_it_runs(statement: str, instruction: str, run) -> None:
    found = run(program(statement))
    assert found.startswith("kernel k, block (0, 0, 0), thread (0, 0, 0): the CPU does not have the PTX instruction ")
    assert f"{instruction} (line {6 if '#define' in statement else 5}): use" in found
    assert run(program(f"if (blockIdx.x) {{\n    {statement}\n    }}")) == ""


@pytest.mark.parametrize(
    ("statement", "said"),
    [
        ('asm volatile("mov.b32 %0, 3;" : "=r"(*(float *)x));', "does not fit its type"),
        ('asm volatile("add.f64 %0, %0, %0;" : "+f"(*(float *)x));', "another size"),
        (
            'asm volatile("mma.sync.aligned.m16n8k16.row.col.s32.s8.s8.s32 {%0, %0, %0, %0}, {%0, %0}, {%0, %0}, '
            '{%0, %0, %0, %0};" : "+r"(*x));',
            "mma: matrix B of this shape and type has another number of registers",
        ),
    ],
)
def test_operands_of_another_type(statement: str, said: str, run) -> None:
    assert said in run(program(statement))


def test_lines_stay_where_they_are(run) -> None:
    text = """
#define TWICE(to, from) asm("add.s32 %0, %1, %1;" \\
                            : "=r"(to)            \\
                            : "r"(from))
__global__ void k(int *x) {
    int y = 0;
    asm("add.s32 %0, %1, "  // the text of two lines: a comment (with a comma, and an open parenthesis
        "%2;"
        : "=r"(y)  // what comes out, first
        : "r"(7), "n"(0));
    TWICE(x[0], y);
    x[0] += __LINE__;
}
int main() {
    int *x, y; cudaMalloc(&x, 4); k<<<1, 1>>>(x);
    cudaMemcpy(&y, x, 4, cudaMemcpyDeviceToHost); printf("%d", y);
}
"""
    lines = (text.splitlines(), translate(text).splitlines())
    assert len(lines[0]) == len(lines[1])
    used = next(index for index, line in enumerate(lines[0]) if "x[0] += __LINE__" in line) + 1 + 3
    assert run(text) == str(2 * 7 + used)


def test_assembly_of_the_host_stays() -> None:
    for text in ('asm volatile("" ::: "memory");', 'asm("pause");', 'asm("rdtsc" : "=a"(low), "=d"(high));'):
        assert translate(text) == text
