"""Functions that compute with the halves or bytes of a word, and conversions of floats to integers, on the CPU."""

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from warpbus.cuda.programs import run_in_orders

Lanes = Callable[[int, int], int]


def bits(holds: bool) -> int:
    return -1 if holds else 0


SIGNED: dict[str, Lanes] = {
    "maxs": max,
    "mins": min,
    "absdiffs": lambda a, b: abs(a - b),
    "avgs": lambda a, b: (a + b + (a + b >= 0)) >> 1,
    "cmpges": lambda a, b: bits(a >= b),
    "cmpgts": lambda a, b: bits(a > b),
    "cmples": lambda a, b: bits(a <= b),
    "cmplts": lambda a, b: bits(a < b),
}
UNSIGNED: dict[str, Lanes] = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "maxu": max,
    "minu": min,
    "absdiffu": lambda a, b: abs(a - b),
    "avgu": lambda a, b: (a + b + 1) >> 1,
    "haddu": lambda a, b: (a + b) >> 1,
    "cmpeq": lambda a, b: bits(a == b),
    "cmpne": lambda a, b: bits(a != b),
    "cmpgeu": lambda a, b: bits(a >= b),
    "cmpgtu": lambda a, b: bits(a > b),
    "cmpleu": lambda a, b: bits(a <= b),
    "cmpltu": lambda a, b: bits(a < b),
}


def by_lane(function: Lanes, x: int, y: int, lanes: int, *, signed: bool) -> int:
    width = 32 // lanes
    found = 0
    for at in range(0, 32, width):
        a, b = ((word >> at) % (1 << width) for word in (x, y))
        if signed:
            a, b = (value - (1 << width) if value >> (width - 1) else value for value in (a, b))
        found |= function(a, b) % (1 << width) << at
    return found


def output(tmp_path: Path, text: str) -> list[str]:
    source = tmp_path / "program.cu"
    source.write_text(text)
    (run,) = run_in_orders(source, orders=("forward",))
    assert run.code == 0, (run.errors, run.mistake)
    return run.output.split()


@pytest.mark.parametrize("lanes", [2, 4])
def test_lanes_of_a_word(tmp_path: Path, lanes: int) -> None:
    draw = random.Random(lanes)
    pairs = [(draw.getrandbits(32), draw.getrandbits(32)) for _ in range(40)]
    pairs += [(0x80FF7F00, 0x807F7F00), (0, 0), (0xFFFFFFFF, 1)]
    names = [*SIGNED, *UNSIGNED]
    calls = ", ".join(f"__v{name}{lanes}(x, y)" for name in names)
    text = f"""
#include <cstdio>
__global__ void all(const unsigned *pairs) {{
    const unsigned x = pairs[2 * threadIdx.x], y = pairs[2 * threadIdx.x + 1];
    const unsigned found[] = {{{calls}}};
    for (unsigned each : found) printf("%u ", each);
    printf("%u %u\\n", __vneg{lanes}(x), __vabs{lanes}(x));
}}
int main() {{
    static const unsigned pairs[] = {{{", ".join(f"{x}u, {y}u" for x, y in pairs)}}};
    unsigned *there;
    cudaMalloc(&there, sizeof pairs);
    cudaMemcpy(there, pairs, sizeof pairs, cudaMemcpyHostToDevice);
    all<<<1, {len(pairs)}>>>(there);
    cudaDeviceSynchronize();
}}
"""
    expected = []
    for x, y in pairs:
        expected += [by_lane(function, x, y, lanes, signed=True) for function in SIGNED.values()]
        expected += [by_lane(function, x, y, lanes, signed=False) for function in UNSIGNED.values()]
        expected += [
            by_lane(lambda a, _: -a, x, y, lanes, signed=True),
            by_lane(lambda a, _: abs(a), x, y, lanes, signed=True),
        ]
    assert [int(word) for word in output(tmp_path, text)] == expected


def test_floats_become_the_nearest_integer_that_there_is(tmp_path: Path) -> None:
    text = """
#include <cstdio>
__global__ void all() {
    const float values[] = {2.5f, 3.5f, -1.5f, -0.4f, 3e9f, 5e9f, -5e9f, nanf("")};
    for (float x : values) {
        printf("%d %d %d %d ", __float2int_rn(x), __float2int_rz(x), __float2int_rd(x), __float2int_ru(x));
        printf("%u %u %u %u\\n", __float2uint_rn(x), __float2uint_rz(x), __float2uint_rd(x), __float2uint_ru(x));
    }
    printf("%u", __vsadu4(0x01FF0203, 0x02000403));
}
int main() { all<<<1, 1>>>(); cudaDeviceSynchronize(); }
"""
    most, least, all_ones = str(2**31 - 1), str(-(2**31)), str(2**32 - 1)
    rounded = "2 2 2 3 2 2 2 3  4 3 3 4 4 3 3 4  -2 -1 -2 -1 0 0 0 0  0 0 -1 0 0 0 0 0"
    expected = rounded.split()
    expected += [most] * 4 + ["3000000000"] * 4 + [most] * 4 + [all_ones] * 4 + [least] * 4 + ["0"] * 4 + ["0"] * 8
    assert output(tmp_path, text) == [*expected, "258"]
