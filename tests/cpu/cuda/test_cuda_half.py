"""Half precision, bfloat16 and tensor cores in CUDA programs on the CPU."""

import re

import numpy as np
import pytest
import torch
from cuda_program_runs import run_checked


@pytest.fixture
def run(tmp_path):
    return lambda text: run_checked(tmp_path, "#include <cuda_fp16.h>\n#include <mma.h>\n#include <cmath>\n" + text)


VALUES = """
int main() {
    for (unsigned i = 0; i < 65536; ++i) {
        const half x = __ushort_as_half(static_cast<unsigned short>(i));
        if (!__hisnan(x) && __half_as_ushort(__float2half(__half2float(x))) != i) printf("%u ", i);
    }
    unsigned state = 1;
    for (int i = 0; i < 3000; ++i) {
        state = state * 1664525u + 1013904223u;
        const float x = ldexpf(static_cast<float>(state >> 8) / 16777216.0f + 1, i % 45 - 27);
        printf("%a %u ", x, __half_as_ushort(__float2half(i % 2 ? x : -x)));
    }
}
"""


def test_numbers_are_rounded_to_the_nearest_half(run) -> None:
    """Normal, subnormal and infinite ones, as by NumPy; and each half is its own nearest."""
    words = run(VALUES).split()
    assert len(words) == 6000
    exact = np.array([float.fromhex(word) for word in words[::2]], dtype=np.float32) * np.tile([-1, 1], 1500)
    with np.errstate(over="ignore"):
        expected = exact.astype(np.float32).astype(np.float16)
    assert np.array_equal(np.array(list(map(int, words[1::2])), dtype=np.uint16), expected.view(np.uint16))


def test_numbers_are_rounded_to_the_nearest_bfloat16(run) -> None:
    """As by PyTorch; and each bfloat16 is its own nearest."""
    program = VALUES.replace("__ushort_as_half", "__ushort_as_bfloat16").replace("__half_as", "__bfloat16_as")
    program = program.replace("__float2half", "__float2bfloat16").replace("__half2float", "__bfloat162float")
    program = program.replace("const half", "const __nv_bfloat16")
    words = run("#include <cuda_bf16.h>\n" + program).split()
    assert len(words) == 6000
    exact = torch.tensor([float.fromhex(word) for word in words[::2]]) * torch.tensor([-1.0, 1.0]).repeat(1500)
    expected = exact.bfloat16().view(torch.int16).int() & 0xFFFF
    assert expected.tolist() == list(map(int, words[1::2]))


OPERATIONS = """
__global__ void axpy(half2 *y, const half2 *x, half a, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y[i] = __hfma2(__half2half2(a), x[i], y[i]);
}
__global__ void sums(const half *x, half *out) {
    atomicAdd(out, x[threadIdx.x]);
    half pair = x[threadIdx.x];
    pair += __shfl_xor_sync(~0u, pair, 1);
    if (threadIdx.x != 7) return;
    out[1] = pair;
    out[2] = -hsqrt(pair) / half(4);
    out[3] = __hlt(pair, half(30)) ? hexp(half(1)) : half(0);
}
int main() {
    half h[32]; half *x, *y;
    for (int i = 0; i < 32; ++i) h[i] = i;
    cudaMalloc(&x, 64); cudaMalloc(&y, 64); cudaMemcpy(x, h, 64, cudaMemcpyHostToDevice); cudaMemset(y, 0, 64);
    sums<<<1, 32>>>(x, y);
    axpy<<<1, 32>>>((half2 *)x, (half2 *)y, half(2), 2);
    cudaMemcpy(h, x, 64, cudaMemcpyDeviceToHost);
    printf("%g %g %g %g ", (float)h[0], (float)h[1], (float)h[2], (float)h[3]);
    printf("%g %g", (float)(half(2048) + half(1)), (float)__hfma(half(2048), half(2), half(-1)));
}
"""


def test_operations_on_halves_and_pairs(run) -> None:
    """y = 496, 13, -sqrt(13) / 4 = -0.90137, e = 2.71875; x = 0, 1, 2, 3 grows by twice as much."""
    assert run(OPERATIONS) == "992 27 0.197266 8.4375 2048 4096"


PRODUCT = """
using namespace nvcuda;
__global__ void gemm(const half *a, const half *b, float *c, int M, int N, int K) {
    int warpM = (blockIdx.x * blockDim.x + threadIdx.x) / warpSize, warpN = blockIdx.y * blockDim.y + threadIdx.y;
    wmma::fragment<wmma::matrix_a, 16, 16, 16, half, wmma::row_major> fa;
    wmma::fragment<wmma::matrix_b, 16, 16, 16, half, wmma::col_major> fb;
    wmma::fragment<wmma::accumulator, 16, 16, 16, float> acc;
    wmma::fill_fragment(acc, 0.0f);
    for (int i = 0; i < K; i += 16) {
        wmma::load_matrix_sync(fa, a + warpM * 16 * K + i, K);
        wmma::load_matrix_sync(fb, b + warpN * 16 * K + i, K);
        wmma::mma_sync(acc, fa, fb, acc);
    }
    for (int i = 0; i < acc.num_elements; ++i) acc.x[i] *= 2;
    wmma::store_matrix_sync(c + warpM * 16 * N + warpN * 16, acc, N, wmma::mem_row_major);
}
int main() {
    const int M = 64, N = 32, K = 48;
    half *a = new half[M * K], *b = new half[N * K]; float *c = new float[M * N];
    for (int i = 0; i < M * K; ++i) a[i] = __float2half((i * 7 % 11 - 5) / 4.0f);
    for (int i = 0; i < N * K; ++i) b[i] = (half)((i * 5 % 13 - 6) / 8.0f);
    half *da, *db;
    float *dc;
    cudaMalloc(&da, M * K * sizeof(half)); cudaMalloc(&db, N * K * sizeof(half)); cudaMalloc(&dc, M * N * 4);
    cudaMemcpy(da, a, M * K * 2, cudaMemcpyHostToDevice); cudaMemcpy(db, b, N * K * 2, cudaMemcpyHostToDevice);
    gemm<<<dim3(M / 16 / 4, N / 16 / 2), dim3(128, 2)>>>(da, db, dc, M, N, K);
    cudaMemcpy(c, dc, M * N * 4, cudaMemcpyDeviceToHost);
    int bad = 0;
    for (int i = 0; i < M; ++i)
        for (int j = 0; j < N; ++j) {
            float sum = 0;
            for (int k = 0; k < K; ++k) sum += __half2float(a[i * K + k]) * __half2float(b[j * K + k]);
            bad += c[i * N + j] != 2 * sum;
        }
    printf("bad %d\\n", bad);
}
"""


def test_products_of_tensor_cores(run) -> None:
    assert run(PRODUCT) == "bad 0\n"


OTHER_TYPES = """
using namespace nvcuda;
using Element = ELEMENT; using Stored = STORED; using Sum = SUM;
constexpr int kDepth = DEPTH;
__global__ void k(const Stored *a, const Stored *b, Sum *c) {
    wmma::fragment<wmma::matrix_a, 16, 16, kDepth, Element, wmma::row_major> left;
    wmma::fragment<wmma::matrix_b, 16, 16, kDepth, Element, wmma::row_major> right;
    wmma::fragment<wmma::accumulator, 16, 16, kDepth, Sum> sums;
    wmma::fill_fragment(sums, 0);
    wmma::load_matrix_sync(left, a, kDepth);
    wmma::load_matrix_sync(right, b, 16);
    wmma::mma_sync(sums, left, right, sums);
    wmma::store_matrix_sync(c, sums, 16, wmma::mem_col_major);
}
int main() {
    Stored a[16 * kDepth], b[16 * kDepth], *d_a, *d_b; Sum c[256], *d_c; int bad = 0;
    for (int i = 0; i < 16 * kDepth; ++i) a[i] = Stored(float(i * 7 % 11 - 5)), b[i] = Stored(float(i * 5 % 13 - 6));
    cudaMalloc(&d_a, sizeof a); cudaMalloc(&d_b, sizeof b); cudaMalloc(&d_c, sizeof c);
    cudaMemcpy(d_a, a, sizeof a, cudaMemcpyHostToDevice); cudaMemcpy(d_b, b, sizeof b, cudaMemcpyHostToDevice);
    k<<<1, 32>>>(d_a, d_b, d_c); cudaMemcpy(c, d_c, sizeof c, cudaMemcpyDeviceToHost);
    for (int i = 0; i < 256; ++i) {
        float sum = 0;
        for (int k = 0; k < kDepth; ++k) sum += float(a[i % 16 * kDepth + k]) * float(b[k * 16 + i / 16]);
        bad += c[i] != sum;
    }
    printf("bad %d", bad);
}
"""


@pytest.mark.parametrize(
    ("element", "stored", "sums", "depth"),
    [
        ("__nv_bfloat16", "__nv_bfloat16", "float", "16"),
        ("signed char", "signed char", "int", "16"),
        ("wmma::precision::tf32", "float", "float", "8"),
    ],
)
def test_products_of_other_types(element: str, stored: str, sums: str, depth: str, run) -> None:
    text = OTHER_TYPES.replace("ELEMENT", element).replace("STORED", stored).replace("SUM", sums)
    assert run(text.replace("DEPTH", depth)) == "bad 0"


def test_all_lanes_multiply(run) -> None:
    found = run(PRODUCT.replace("wmma::mma_sync(", "if (threadIdx.x % 32 != 5) wmma::mma_sync("))
    assert re.search(r"waits at mma_sync \(line \d+\) for the lanes of its mask 0xffffffff, but thread", found)
