"""FP8 on the CPU: every code against PyTorch, and the conversions of cuda_fp8.h."""

import pytest
import torch
from cuda_program_runs import run_checked


@pytest.fixture
def run(tmp_path):
    return lambda text: run_checked(tmp_path, text)


ALL = """
#include <cuda_fp8.h>
#include <vector>
__global__ void decode(unsigned *out) {
    __nv_fp8_KIND x;
    x.__x = threadIdx.x;
    out[threadIdx.x] = __float_as_uint(float(x));
}
__global__ void encode(const float *in, unsigned char *out, int n) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) out[i] = __nv_fp8_KIND(in[i]).__x;
}
int main() {
    unsigned *bits, host[256]; cudaMalloc(&bits, 1024); decode<<<1, 256>>>(bits);
    cudaMemcpy(host, bits, 1024, cudaMemcpyDeviceToHost);
    for (unsigned each : host) printf("%u ", each);
    const float values[] = {VALUES}; const int n = sizeof values / 4; float *in; unsigned char *out, codes[n];
    cudaMalloc(&in, sizeof values); cudaMalloc(&out, n); cudaMemcpy(in, values, sizeof values, cudaMemcpyHostToDevice);
    encode<<<(n + 63) / 64, 64>>>(in, out, n); cudaMemcpy(codes, out, n, cudaMemcpyDeviceToHost);
    for (int each : codes) printf("%d ", each);
}
"""


@pytest.mark.parametrize(("kind", "dtype"), [("e4m3", torch.float8_e4m3fn), ("e5m2", torch.float8_e5m2)])
def test_every_code_and_the_rounding(kind: str, dtype: torch.dtype, run) -> None:
    codes = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(dtype)
    finite = codes.float()[codes.float().isfinite()].sort().values
    middle = (finite[1:] + finite[:-1]) / 2
    nudged = torch.cat([finite, middle, middle * 1.0001, middle * 0.9999])
    most = finite.max()
    found = [int(each) for each in run(
        ALL.replace("KIND", kind).replace("VALUES", ", ".join(f"{x:.9e}f" for x in [*nudged.tolist(), 1e30, -1e30]))
    ).split()]  # fmt: skip
    values = torch.tensor(found[:256], dtype=torch.int64).to(torch.int32).view(torch.float32)
    assert torch.equal(values[codes.float().isfinite()], codes.float()[codes.float().isfinite()])
    assert torch.equal(values.isnan(), codes.float().isnan())
    expected = nudged.clamp(-most, most).to(dtype).view(torch.uint8)
    assert found[256:-2] == expected.tolist()
    assert found[-2:] == [{"e4m3": 0x7E, "e5m2": 0x7B}[kind], {"e4m3": 0xFE, "e5m2": 0xFB}[kind]]


VECTORS = """
#include <cuda_fp8.h>
#include <initializer_list>
__global__ void k() {
    const __nv_fp8x2_e4m3 two(make_float2(1.5f, -500.0f));
    const float2 back(two);
    const __nv_fp8x4_e5m2 four(make_float4(1, 2, 3, -4));
    const float4 all(four);
    const __half2 halves(__nv_fp8x2_e4m3(__halves2half2(__float2half(0.5f), __float2half(0.75f))));
    printf("%g %g %g %g ", back.x, back.y, all.x, all.w);
    printf("%g %g %d\\n", __low2float(halves), __high2float(halves), int(__nv_fp8_e4m3(7)));
    const float large[] = {1e6f, -1e6f, nanf(""), INFINITY};
    for (float each : large)
        for (auto limit : {__NV_NOSAT, __NV_SATFINITE})
            printf("%x %x%s", __nv_cvt_float_to_fp8(each, limit, __NV_E4M3),
                   __nv_cvt_float_to_fp8(each, limit, __NV_E5M2), limit == __NV_NOSAT ? " " : ", ");
    const __nv_fp8_storage_t code = __nv_cvt_halfraw_to_fp8(__float2half(-0.11f), __NV_SATFINITE, __NV_E4M3);
    const __half_raw raw = __nv_cvt_fp8_to_halfraw(code, __NV_E4M3);
    printf("%g %g", __half2float(raw), float(__nv_bfloat16(__nv_fp8_e5m2(__float2bfloat16(0.3f)))));
}
int main() { k<<<1, 1>>>(); cudaDeviceSynchronize(); }
"""


def test_vectors_and_numbers_that_are_too_large(run) -> None:
    assert run(VECTORS) == (
        "1.5 -448 1 -4 0.5 0.75 7\n7f 7c 7e 7b, ff fc fe fb, 7f 7f 7f 7f, 7f 7c 7e 7b, -0.109375 0.3125"
    )
