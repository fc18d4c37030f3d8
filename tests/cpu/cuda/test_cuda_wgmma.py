"""wgmma on the CPU against whole matrix products: types, swizzles, majors, registers; and mistakes."""

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from cuda_program_runs import run_checked

SIZES = {"f16": 2, "bf16": 2, "tf32": 4, "e4m3": 1, "e5m2": 1, "s8": 1, "u8": 1}
DTYPES = {"f16": torch.float16, "bf16": torch.bfloat16, "tf32": torch.float32, "e4m3": torch.float8_e4m3fn}
DTYPES |= {"e5m2": torch.float8_e5m2, "s8": torch.int8, "u8": torch.uint8}
MODES = {16: 0, 128: 1, 64: 2, 32: 3}


@dataclass(frozen=True)
class Case:
    """A product m64nNk(32 bytes): `swizzle_a` None has A in registers; `mn_a` and `mn_b` are MN-major."""

    type_a: str = "f16"
    type_b: str = "f16"
    sums: str = "f32"
    columns: int = 16
    swizzle_a: int | None = 128
    swizzle_b: int = 128
    mn_a: bool = False
    mn_b: bool = False
    accumulates: bool = True
    signs: tuple[int, int] = (1, 1)

    @property
    def depth(self) -> int:
        return 32 // SIZES[self.type_a]


@pytest.fixture
def run(tmp_path):
    return lambda text: run_checked(tmp_path, text)


def drawn(kind: str, *shape: int) -> torch.Tensor:
    if kind in ("s8", "u8"):
        return torch.randint(-128 if kind == "s8" else 0, 128 if kind == "s8" else 256, shape).to(DTYPES[kind])
    if kind == "tf32":
        return torch.randint(-1000, 1000, shape).float() / 64
    return torch.randint(-8, 9, shape).float().div(4).to(DTYPES[kind])


def place(swizzle: int, mn_major: bool) -> tuple[Callable[[int, int], int], int, int, int]:
    """The byte of row mn and byte k (MN-major: of k and element mn) in a tile; leading and stride offsets; the start.

    Of K-major tiles with long rows the second 32 bytes are used, of which the start is 32 bytes on.
    """

    def permuted(at: int) -> int:
        return at ^ (at >> 7 & (swizzle // 16 - 1)) << 4

    if mn_major and swizzle == 16:
        return (lambda mn, k: mn // 8 * 256 + k // 8 * 128 + k % 8 * 16 + mn % 8 * 2), 128, 256, 0
    if mn_major:
        width = swizzle // 2
        block = 16 * swizzle
        return (lambda mn, k: permuted(mn // width * block + k * swizzle + mn % width * 2)), block, 8 * swizzle, 0
    if swizzle == 16:
        return (lambda mn, k: mn // 8 * 256 + k // 16 * 128 + mn % 8 * 16 + k % 16), 128, 256, 0
    start = 32 if swizzle > 32 else 0
    return (lambda mn, k: permuted(mn * swizzle + start + k)), 16, 8 * swizzle, start


def image(matrix: torch.Tensor, swizzle: int, mn_major: bool) -> tuple[str, str]:
    """The bytes of a tile with a matrix [rows, depth], and the fields of its descriptor: all but the address."""
    at, leading, stride, start = place(swizzle, mn_major)
    raw = matrix.contiguous().view(torch.uint8).reshape(len(matrix), -1)
    size = matrix.element_size()
    found = bytearray(16384)
    for mn in range(raw.shape[0]):
        for k in range(raw.shape[1]):
            byte = at(mn, k // size) + k % size if mn_major else at(mn, k)
            found[byte] = int(raw[mn, k])
    descriptor = MODES[swizzle] << 62 | stride >> 4 << 32 | leading >> 4 << 16
    return ", ".join(
        map(str, found[: max(i for i, each in enumerate(found) if each) // 16 * 16 + 16])
    ), f"{descriptor:#x}ull, {start}"


PROGRAM = """
__device__ unsigned long long descriptor(const void *tile, unsigned long long fields, int start) {
    return fields | ((static_cast<unsigned>(__cvta_generic_to_shared(tile)) + start & 0x3FFFF) >> 4);
}
__constant__ unsigned char bytes_a[] = {BYTES_A}, bytes_b[] = {BYTES_B};
__constant__ unsigned of_a[64][8] = {REGISTERS_A};
__global__ void k(const WORD *in, WORD *out) {
    __shared__ __align__(1024) unsigned char a[16384], b[16384];
    for (int i = threadIdx.x; i < sizeof bytes_a; i += 128) a[i] = bytes_a[i];
    for (int i = threadIdx.x; i < sizeof bytes_b; i += 128) b[i] = bytes_b[i];
    asm volatile("fence.proxy.async;" ::: "memory");
    __syncthreads();
    WORD d[COUNT];
    unsigned left[4];
    const int lane = threadIdx.x % 32, row = threadIdx.x / 32 * 16 + lane / 4;
    for (int i = 0; i < 4; ++i) left[i] = of_a[row + i % 2 * 8][lane % 4 + i / 2 * 4];
    for (int i = 0; i < COUNT; ++i) d[i] = in[threadIdx.x * COUNT + i];
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
    asm volatile("{ .reg .pred p; setp.ne.b32 p, %OPERAND, 0; "
                 "wgmma.mma_async.sync.aligned.m64nCOLUMNSkDEPTH.SUMS.TYPE_A.TYPE_B {VECTOR}, A, B, pIMMEDIATES; }"
                 : OUTPUTS : INPUTS "r"(ACCUMULATES));
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
    asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
    for (int i = 0; i < COUNT; ++i) out[threadIdx.x * COUNT + i] = d[i];
}
int main() {
    static WORD host[128 * COUNT] = {STARTS}, *in, *out; cudaMalloc(&in, sizeof host); cudaMalloc(&out, sizeof host);
    cudaMemcpy(in, host, sizeof host, cudaMemcpyHostToDevice); k<<<1, 128>>>(in, out);
    cudaMemcpy(host, out, sizeof host, cudaMemcpyDeviceToHost);
    for (auto each : host) printf("%.17g\\n", (double)each);
}
"""


def written(case: Case, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> str:
    """The program of a case: A [64, depth], B [columns, depth], C [64, columns]."""
    per_register = 2 if case.sums == "f16" else 1
    count = case.columns // 2 // per_register
    letter, word = ("f", "float") if case.sums == "f32" else ("r", "unsigned" if case.sums == "f16" else "int")
    bytes_b, fields_b = image(b, case.swizzle_b, case.mn_b)
    from_registers = case.swizzle_a is None
    bytes_a, fields_a = ("0", "0, 0") if case.swizzle_a is None else image(a, case.swizzle_a, case.mn_a)
    words = a.contiguous().view(torch.int32).reshape(64, 8).tolist()
    inputs = [f'"r"(left[{i}])' for i in range(4)] if from_registers else [f'"l"(descriptor(a, {fields_a}))']
    inputs.append(f'"l"(descriptor(b, {fields_b}))')
    parts_a = ", ".join(f"%{count + i}" for i in range(4))
    immediates = ""
    if case.sums != "s32":
        immediates = f", {case.signs[0]}, {case.signs[1]}"
        if SIZES[case.type_a] == 2:
            immediates += f", {int(case.mn_b)}" if from_registers else f", {int(case.mn_a)}, {int(case.mn_b)}"
    places = [(t // 32 * 16 + t % 32 // 4 + 8 * h, 8 * j + 2 * (t % 4)) for t in range(128)
              for j in range(case.columns // 8) for h in (0, 1)]  # fmt: skip
    if case.sums == "f16":
        starts = [c[row, column : column + 2].half().view(torch.int32).item() for row, column in places]
    else:
        starts = [c[row, column + i].item() for row, column in places for i in (0, 1)]
    values = {
        "BYTES_A": bytes_a, "BYTES_B": bytes_b, "COLUMNS": case.columns, "DEPTH": case.depth, "COUNT": count,
        "REGISTERS_A": ", ".join("{" + ", ".join(f"{each & 0xFFFFFFFF}u" for each in row) + "}" for row in words),
        "WORD": word, "SUMS": case.sums, "TYPE_A": case.type_a, "TYPE_B": case.type_b, "IMMEDIATES": immediates,
        "VECTOR": ", ".join(f"%{i}" for i in range(count)), "%OPERAND": f"%{count + len(inputs)}",
        " A, B,": f" {{{parts_a}}}, %{count + 4}," if from_registers else f" %{count}, %{count + 1},",
        "OUTPUTS": ", ".join(f'"+{letter}"(d[{i}])' for i in range(count)), "INPUTS": ", ".join(inputs) + ",",
        "ACCUMULATES": int(case.accumulates), "STARTS": ", ".join(f"({word}){each}" for each in starts),
    }  # fmt: skip
    text = PROGRAM
    for name in sorted(values, key=len, reverse=True):
        text = text.replace(name, str(values[name]))
    return text


def result(case: Case, output: str) -> torch.Tensor:
    """C [64, columns] of what a program prints."""
    numbers = torch.tensor([float(line) for line in output.splitlines()], dtype=torch.float64)
    if case.sums == "f16":
        numbers = numbers.to(torch.int64).to(torch.int32).view(torch.float16).double()
    found = numbers.reshape(4, 8, 4, case.columns // 8, 2, 2)  # warp, row, pair of columns; block, half of rows, column
    return found.permute(0, 4, 1, 3, 2, 5).reshape(64, case.columns)


CASES = [
    *(Case(swizzle_a=a, swizzle_b=b) for a, b in ((128, 128), (64, 32), (32, 64), (16, 16), (None, 128))),
    *(
        Case(columns=128, swizzle_a=a, swizzle_b=b, mn_a=True, mn_b=True)
        for a, b in ((128, 64), (64, 128), (32, 16), (16, 32))
    ),
    Case(columns=24, mn_b=True, swizzle_b=16, swizzle_a=None),
    Case("bf16", "bf16", columns=256, mn_b=True),
    Case(sums="f16", columns=32, accumulates=False),
    Case(sums="f16", columns=8, signs=(1, -1)),
    Case("tf32", "tf32", columns=64, swizzle_b=64, signs=(-1, 1)),
    Case("tf32", "tf32", swizzle_a=None),
    Case("e4m3", "e5m2", columns=40),
    Case("e5m2", "e4m3", swizzle_a=None, swizzle_b=32),
    Case("e4m3", "e4m3", sums="f16", columns=16),
    Case("s8", "u8", sums="s32", columns=48),
    Case("u8", "s8", sums="s32", swizzle_a=None, accumulates=False),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=str)
def test_products(case: Case, run) -> None:
    torch.manual_seed(0)
    a, b = drawn(case.type_a, 64, case.depth), drawn(case.type_b, case.columns, case.depth)
    c = torch.randint(-9, 10, (64, case.columns)).float()
    if case.sums == "s32":
        c = c.int()
    found = result(case, run(written(case, a, b, c)))
    expected = case.signs[0] * case.signs[1] * (a.double() @ b.double().T) + (c.double() if case.accumulates else 0)
    tolerance = {"f16": 2e-3, "f32": 1e-5 if case.type_a == "tf32" else 0.0, "s32": 0.0}[case.sums]
    assert torch.allclose(found, expected, rtol=tolerance, atol=tolerance)


def tiled(columns: int = 16) -> str:
    """A program that is right, of which the mistakes are made."""
    case = Case(columns=columns)
    a, b = drawn("f16", 64, 16), drawn("f16", columns, 16)
    return written(case, a, b, torch.zeros(64, columns))


def test_a_constant_that_says_whether_it_accumulates(run) -> None:
    torch.manual_seed(0)
    for accumulates in (0, 1):
        a, b, c = drawn("f16", 64, 16), drawn("f16", 16, 16), torch.ones(64, 16)
        text = written(Case(), a, b, c).replace(", p, 1, 1", ", %10, 1, 1").replace('"r"(1)', f'"n"({accumulates})')
        assert torch.equal(result(Case(), run(text)), a.double() @ b.double().T + accumulates)


WAIT = 'asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");'
COMMIT = 'asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");'
PRODUCT = 'asm volatile("{ .reg .pred p; setp'


@pytest.mark.parametrize(
    ("written", "instead", "said"),
    [
        (WAIT, "", "reads an accumulator of wgmma (line 27) before the product (line 22) is complete"),
        (WAIT, f"if (threadIdx.x < 96) {WAIT} else return;", "wgmma.mma_async (line 22): the thread ends before"),
        (
            WAIT,
            f"if (threadIdx.x < 96) {WAIT} else __syncthreads();",
            "waits at wgmma.wait_group (line 26) for its warpgroup, but thread (96, 0, 0) waits at __syncthreads()",
        ),
        (COMMIT, "", "reads an accumulator of wgmma"),
        (
            PRODUCT,
            f"if (threadIdx.x / 32 != 2) {PRODUCT}",
            "thread (64, 0, 0) of the warpgroup has begun another product, or none",
        ),
        ('asm volatile("wgmma.fence.sync.aligned;" ::: "memory");', "", "execute wgmma.fence before the first product"),
        ('asm volatile("fence.proxy.async;" ::: "memory");', "", "without a fence.proxy.async since"),
        ("__syncthreads();", "", "(line 12), which the product of thread (0, 0, 0) (line 22) may still read"),
        ("b[16384];", "b[256];", "beyond the end"),
        ("k<<<1, 128>>>", "k<<<1, 96>>>", "it needs four whole warps"),
    ],
)
def test_mistakes_with_wgmma(written: str, instead: str, said: str, run) -> None:
    text = tiled()
    assert written in text
    found = run(text.replace(written, instead))
    assert said in found or (instead == "b[256];" and "but b has 256 elements" in found)
