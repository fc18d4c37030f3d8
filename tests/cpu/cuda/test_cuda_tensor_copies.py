"""Copies of boxes by tensor maps (cp.async.bulk.tensor) on the CPU: swizzles, edges, stores, and what is refused."""

import itertools
import re

import pytest
from cuda_program_runs import run_checked


@pytest.fixture
def run(tmp_path):
    return lambda text: run_checked(tmp_path, text)


# Elements of 2 bytes are numbered; the kernel writes what a box holds in shared memory.
PROGRAM = """
#include <cuda.h>
#include <cudaTypedefs.h>
__device__ unsigned shared(const void *p) { return static_cast<unsigned>(__cvta_generic_to_shared(p)); }
__global__ void k(const __grid_constant__ CUtensorMap map, unsigned short *out) {
    extern __shared__ __align__(1024) unsigned short tile[];
    __shared__ unsigned long long bar;
    if (threadIdx.x == 0) {
        asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
        asm volatile("cp.async.bulk.prefetch.tensor.@RANK@d.L2.global.tile [%0, {@COORDINATES@}];" ::"l"(&map));
        asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared(&bar)));
        asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], @BYTES@;" ::"r"(shared(&bar)) : "memory");
        asm volatile("cp.async.bulk.tensor.@RANK@d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
                     " [%0], [%1, {@COORDINATES@}], [%2];"
                     ::"r"(shared(tile)), "l"(&map), "r"(shared(&bar)) : "memory");
    }
    __syncthreads();
    asm volatile("{ .reg .pred p; again: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], 0; @!p bra again; }"
                 ::"r"(shared(&bar)) : "memory");
    for (int i = threadIdx.x; i < @BYTES@ / 2; i += 32) out[i] = tile[i];
}
int main() {
    const int n = @COUNT@; static unsigned short host[n], back[@BYTES@ / 2];
    for (int i = 0; i < n; ++i) host[i] = i;
    unsigned short *in, *out; cudaMalloc(&in, n * 2); cudaMalloc(&out, @BYTES@);
    cudaMemcpy(in, host, n * 2, cudaMemcpyHostToDevice);
    PFN_cuTensorMapEncodeTiled_v12000 encode = nullptr; cudaDriverEntryPointQueryResult found;
    cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", reinterpret_cast<void **>(&encode), 12000,
                                     cudaEnableDefault, &found);
    CUtensorMap map;
    cuuint64_t sides[] = {@SIDES@}, strides[] = {@STRIDES@}; cuuint32_t box[] = {@BOX@}, steps[] = {@STEPS@};
    const CUresult status =
        encode(&map, CU_TENSOR_MAP_DATA_TYPE_FLOAT16, @RANK@, in + @OFFSET@, sides, strides, box, steps,
               CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_@MODE@, CU_TENSOR_MAP_L2_PROMOTION_NONE,
               CU_TENSOR_MAP_FLOAT_OOB_FILL_@FILL@);
    if (status != CUDA_SUCCESS) { printf("refused %d", status); return 0; }
    k<<<1, 32, @BYTES@>>>(map, out);
    cudaMemcpy(back, out, @BYTES@, cudaMemcpyDeviceToHost);
    for (auto each : back) printf("%d ", each);
}
"""


def program(
    sides: list[int],
    box: list[int],
    at: list[int],
    *,
    swizzle: str = "NONE",
    steps: list[int] | None = None,
    fill: str = "NONE",
    strides: list[int] | None = None,
    offset: int = 0,
) -> str:
    steps = steps or [1] * len(box)
    if strides is None:
        strides = [2 * x for x in itertools.accumulate(sides[:-1], lambda a, b: a * b)]
    total = 2
    for length, step in zip(box, steps, strict=True):
        total *= -(-length // step)
    count = 1
    for length in sides:
        count *= length
    values = {"COUNT": count, "RANK": len(sides), "BYTES": total, "FILL": fill, "MODE": swizzle, "OFFSET": offset}
    lists = {"SIDES": sides, "STRIDES": strides or [0], "BOX": box, "STEPS": steps, "COORDINATES": at}
    text = PROGRAM
    for name, value in (lists | values).items():
        shown = ", ".join(map(str, value)) if isinstance(value, list) else str(value)
        text = re.sub(rf"@{name}@", shown, text)
    return text


def expected(sides: list[int], box: list[int], at: list[int], *, swizzle: int = 16, steps: list[int] | None = None,
             outside: int = 0) -> list[int]:  # fmt: skip
    """Elements in the order of shared memory."""
    steps = steps or [1] * len(box)
    ranges = [range(start, start + length, step) for start, length, step in zip(at, box, steps, strict=True)]
    values = []
    for place in itertools.product(*reversed(ranges)):
        index, inside = 0, True
        for x, side in zip(place, reversed(sides), strict=True):
            index, inside = index * side + x, inside and 0 <= x < side
        values.append(index if inside else outside)
    found = list(values)
    for i, value in enumerate(values):
        byte = 2 * i
        found[(byte ^ (byte >> 7 & (swizzle // 16 - 1)) << 4) // 2] = value
    return found


@pytest.mark.parametrize(
    ("mode", "swizzle", "width"), [("NONE", 16, 72), ("32B", 32, 16), ("64B", 64, 32), ("128B", 128, 64)]
)
def test_swizzles(mode: str, swizzle: int, width: int, run) -> None:
    box = [80, 40], [width, 8], [8, 3]
    assert list(map(int, run(program(*box, swizzle=mode)).split())) == expected(*box, swizzle=swizzle)


@pytest.mark.parametrize(
    ("sides", "box", "at", "steps"),
    [
        ([40, 10], [16, 4], [32, 8], None),  # beyond both ends
        ([40, 10], [16, 4], [-5, -2], None),
        ([64], [24], [50], None),
        ([16, 6, 5], [8, 3, 2], [8, 4, 4], None),
        ([8, 3, 4, 5], [8, 2, 3, 2], [0, 2, 2, -1], None),
        ([8, 3, 2, 2, 3], [8, 1, 2, 2, 2], [0, 1, 1, 0, 2], None),
        ([64, 12], [32, 6], [4, 5], [2, 3]),
    ],
)
def test_boxes_of_1_to_5_axes_and_elements_outside(
    sides: list[int], box: list[int], at: list[int], steps: list[int] | None, run
) -> None:
    found = list(map(int, run(program(sides, box, at, steps=steps)).split()))
    assert found == expected(sides, box, at, steps=steps)


def test_nan_outside(run) -> None:
    box = [40, 10], [16, 2], [32, 9]
    found = list(map(int, run(program(*box, fill="NAN_REQUEST_ZERO_FMA")).split()))
    assert found == expected(*box, outside=0x7FFF)


@pytest.mark.parametrize(
    "text",
    [
        program([40, 10], [4, 4], [0, 0]),  # 8 bytes
        program([40, 10], [64, 4], [0, 0], swizzle="64B"),
        program([40, 10], [16, 300], [0, 0]),
        program([42, 10], [16, 4], [0, 0]),  # rows of 84 bytes
        program([40, 9], [16, 4], [0, 0], offset=4),
        program([40, 10], [16, 4], [0, 0], steps=[9, 1]),
        program([40, 10], [16, 4], [0, 0], strides=[64]),
    ],
)
def test_maps_that_the_driver_refuses(text: str, run) -> None:
    assert run(text) == "refused 1"


GOOD = program([40, 10], [16, 4], [8, 3], swizzle="32B")


@pytest.mark.parametrize(
    ("written", "instead", "said"),
    [
        ("tensor.2d.shared::cluster", "tensor.3d.shared::cluster",
         "does not have the PTX instruction cp.async.bulk.tensor.3d"),
        ('"r"(shared(tile)), "l"(&map)', '"r"(shared(tile) + 64), "l"(&map)',
         "cp.async.bulk.tensor (line 16): the address in shared memory is 64 bytes behind a multiple of 128"),
        ("k<<<1, 32, 128>>>(map, out)", "map = {}; k<<<1, 32, 128>>>(map, out)",
         "there is no tensor map at the address"),
        ('"l"(&map), "r"(shared(&bar))', '"l"((const char *)&map + 16), "r"(shared(&bar))',
         "the tensor map is 16 bytes behind"),
        ("<<<1, 32, 128>>>", "<<<1, 32, 96>>>", "but tile has 48 elements"),
        ("sides[] = {40, 10}, strides[] = {80}", "sides[] = {40, 10}, strides[] = {160}", "but in has 400 elements"),
        ("_, [%0], 128;", "_, [%0], 64;", "the copies have brought 64 bytes more than expect_tx has announced"),
        ("[%0, {8, 3}]", "[%0, {8}]", "does not have the PTX instruction cp.async.bulk.prefetch.tensor.2d"),
    ],
)  # fmt: skip
def test_mistakes_with_tensor_maps(written: str, instead: str, said: str, run) -> None:
    assert written in GOOD
    assert said in run(GOOD.replace(written, instead))


STORES = """
#include <cuda.h>
__device__ unsigned shared(const void *p) { return static_cast<unsigned>(__cvta_generic_to_shared(p)); }
__global__ void k(const __grid_constant__ CUtensorMap map, int x, int y) {
    __shared__ __align__(1024) float tile[4][8];
    tile[threadIdx.x / 8][threadIdx.x % 8] = threadIdx.x + 1;
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    __syncthreads();
    if (threadIdx.x == 0) {
        asm volatile("OPCODE [%0, {%1, %2}], [%3];" ::"l"(&map), "r"(x), "r"(y), "r"(shared(tile)) : "memory");
        asm volatile("cp.async.bulk.commit_group;\\n cp.async.bulk.wait_group.read 0;" ::: "memory");
    }
}
int main() {
    float host[160], *out; cudaMalloc(&out, 640); for (float &each : host) each = 100;
    cudaMemcpy(out, host, 640, cudaMemcpyHostToDevice);
    void *entry = nullptr; cudaDriverEntryPointQueryResult found;
    cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &entry, cudaEnableDefault, &found);
    CUtensorMap map; cuuint64_t sides[] = {15, 10}, strides[] = {64}; cuuint32_t box[] = {8, 4}, steps[] = {1, 1};
    if (found != cudaDriverEntryPointSuccess || reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(entry)(
            &map, CU_TENSOR_MAP_DATA_TYPE_FLOAT32, 2, out, sides, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
            CU_TENSOR_MAP_SWIZZLE_NONE, CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE))
        return 1;
    k<<<1, 32>>>(map, 10, 8);
    cudaMemcpy(host, out, 640, cudaMemcpyDeviceToHost);
    for (int i = 128; i < 160; ++i) printf("%g ", host[i]);
    printf("%d", cudaGetDriverEntryPoint("cuNothing", &entry, cudaEnableDefault, &found) + 10 * found);
}
"""


@pytest.mark.parametrize("operation", ["", "add", "min", "max"])
def test_stores_and_reductions(operation: str, run) -> None:
    opcode = (
        "cp.reduce.async.bulk.tensor.2d.global.shared::cta"
        if operation
        else "cp.async.bulk.tensor.2d.global.shared::cta"
    )
    found = run(STORES.replace("OPCODE", opcode + (f".{operation}.tile" if operation else "") + ".bulk_group"))
    rows = [[100.0] * 16 for _ in range(2)]
    join = {"": lambda _, new: new, "add": lambda old, new: old + new, "min": min, "max": max}[operation]
    for y in range(2):
        for x in range(10, 15):  # the last column of the box lies between the rows
            rows[y][x] = join(rows[y][x], y * 8 + x - 10 + 1)
    assert list(map(float, found.split())) == [*rows[0], *rows[1], 10.0]
