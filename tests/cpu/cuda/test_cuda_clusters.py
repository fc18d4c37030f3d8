"""Clusters of blocks on the CPU: shared memory of other blocks, the barrier, mbarriers across blocks, multicast."""

import pytest
from cuda_program_runs import run_checked


@pytest.fixture
def run(tmp_path):
    return lambda text: run_checked(tmp_path, text)


HISTOGRAM = """
#include <cooperative_groups.h>
namespace cg = cooperative_groups;
constexpr int kBlocks = 2;
__global__ void __cluster_dims__(kBlocks, 1, 1) __launch_bounds__(64) histogram(const int *in, int *out, int n) {
    __shared__ int bins[32];
    const auto cluster = cg::this_cluster();
    if (threadIdx.x < 32) bins[threadIdx.x] = 0;
    cluster.sync();
    for (int i = cluster.thread_rank(); i < n; i += cluster.num_threads()) {
        const int bin = in[blockIdx.x / kBlocks * n + i];
        atomicAdd(cluster.map_shared_rank(bins, bin / 32) + bin % 32, 1);
    }
    cluster.sync();
    const int ranks = cluster.block_rank() + 10 * cluster.num_blocks();
    if (threadIdx.x < 32) out[blockIdx.x * 32 + threadIdx.x] = bins[threadIdx.x] + 1000 * ranks;
}
int main() {
    const int n = 500; static int host[3 * n], *in, *out, back[192];
    for (int i = 0; i < 3 * n; ++i) host[i] = i * 7 % 64;
    cudaMalloc(&in, sizeof host); cudaMalloc(&out, sizeof back);
    cudaMemcpy(in, host, sizeof host, cudaMemcpyHostToDevice);
    histogram<<<6, 64>>>(in, out, n);
    cudaMemcpy(back, out, sizeof back, cudaMemcpyDeviceToHost);
    for (int each : back) printf("%d ", each);
    histogram<<<5, 64>>>(in, out, n); printf("%s", cudaGetErrorString(cudaGetLastError()));
}
"""


def test_shared_memory_of_another_block(run) -> None:
    *found, last, word = run(HISTOGRAM).split()
    assert (last, word) == ("cluster", "misconfiguration")
    for cluster in range(3):
        values = [(cluster * 500 + i) * 7 % 64 for i in range(500)]
        for rank in range(2):
            begin = (2 * cluster + rank) * 32
            expected = [values.count(rank * 32 + bin) + 1000 * (rank + 20) for bin in range(32)]
            assert list(map(int, found[begin : begin + 32])) == expected


@pytest.mark.parametrize(
    ("written", "instead", "said"),
    [
        ("bin / 32)", "bin / 16)", "of a cluster of 2 (line 15)"),
        ("cluster.sync();\n    for", "cluster.barrier_arrive();\n    for",
         "arrives at the barrier of the cluster again before it has waited (line 17)"),
        ("cluster.sync();\n    for", "if (threadIdx.x < 32) cluster.sync(); else __syncthreads();\n    for",
         "waits at barrier.cluster.wait (line 12): 64 of 128 threads of the cluster have arrived"),
        ("cluster.sync();\n    const", "cluster.barrier_wait();\n    const",
         "waits at the barrier of the cluster without having arrived"),
    ],
)  # fmt: skip
def test_mistakes_in_clusters(written: str, instead: str, said: str, run) -> None:
    assert written in HISTOGRAM
    assert said in run(HISTOGRAM.replace(written, instead))


MULTICAST = """
#include <cuda.h>
__device__ unsigned shared(const void *p) { return static_cast<unsigned>(__cvta_generic_to_shared(p)); }
__device__ void wait(const void *bar, int parity) {
    asm volatile("{ .reg .pred p; again: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1; @!p bra again; }"
                 ::"r"(shared(bar)), "r"(parity) : "memory");
}
__global__ void k(const __grid_constant__ CUtensorMap map, float *out, int rounds) {
    __shared__ __align__(128) float tile[4][8];
    __shared__ unsigned long long full, empty;
    unsigned rank, count;
    asm("mov.u32 %0, %%cluster_ctarank; mov.u32 %1, %%cluster_nctarank;" : "=r"(rank), "=r"(count));
    if (threadIdx.x == 0) {
        asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared(&full)));
        asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared(&empty)), "r"(count));
        asm volatile("fence.mbarrier_init.release.cluster;");
    }
    asm volatile("barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;" ::: "memory");
    float sum = 0;
    for (int round = 0; round < rounds; ++round) {
        if (threadIdx.x == 0) {
            asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], 128;" ::"r"(shared(&full)) : "memory");
            if (rank == 0) {
                wait(&empty, (round & 1) ^ 1);
                asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
                             ".multicast::cluster [%0], [%1, {%3, %4}], [%2], %5;"
                             ::"r"(shared(tile)), "l"(&map), "r"(shared(&full)), "r"(0), "r"(4 * round),
                             "h"(static_cast<unsigned short>((1 << count) - 1)) : "memory");
            }
        }
        wait(&full, round & 1);
        sum += tile[threadIdx.x / 8][threadIdx.x % 8] * (rank + 1);
        __syncwarp();
        if (threadIdx.x == 0)
            asm volatile("{ .reg .b32 remote; mapa.shared::cluster.u32 remote, %0, %1;"
                         " mbarrier.arrive.release.cluster.shared::cluster.b64 _, [remote]; }"
                         ::"r"(shared(&empty)), "r"(0) : "memory");
    }
    out[blockIdx.x * 32 + threadIdx.x] = sum;
    asm volatile("barrier.cluster.arrive; barrier.cluster.wait;" ::: "memory");
}
int main() {
    float host[96], *in, *out, back[128]; for (int i = 0; i < 96; ++i) host[i] = i;
    cudaMalloc(&in, sizeof host); cudaMalloc(&out, sizeof back);
    cudaMemcpy(in, host, sizeof host, cudaMemcpyHostToDevice);
    void *entry; cudaDriverEntryPointQueryResult found;
    cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &entry, cudaEnableDefault, &found);
    CUtensorMap map; cuuint64_t sides[] = {8, 12}, strides[] = {32}; cuuint32_t box[] = {8, 4}, steps[] = {1, 1};
    reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(entry)(
        &map, CU_TENSOR_MAP_DATA_TYPE_FLOAT32, 2, in, sides, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
        CU_TENSOR_MAP_SWIZZLE_NONE, CU_TENSOR_MAP_L2_PROMOTION_NONE, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    cudaLaunchConfig_t config = {}; config.gridDim = dim3(2, 2); config.blockDim = 32;
    cudaLaunchAttribute attribute; attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim = {2, 1, 1}; config.attrs = &attribute; config.numAttrs = 1;
    config.gridDim = 4;
    printf("%s ", cudaGetErrorString(cudaLaunchKernelEx(&config, k, map, out, 3)));
    cudaMemcpy(back, out, sizeof back, cudaMemcpyDeviceToHost);
    printf("%g %g %g %g", back[0], back[33], back[64], back[127]);
}
"""


def test_multicast_and_arrivals_at_another_block(run) -> None:
    assert run(MULTICAST) == f"no error {0 + 32 + 64} {2 * (1 + 33 + 65)} 96 {2 * (31 + 63 + 95)}"


@pytest.mark.parametrize(
    ("written", "instead", "said"),
    [
        ('"r"(shared(&empty)), "r"(0) : "memory"', '"r"(shared(&empty)), "r"(rank) : "memory"',
         "for the mbarrier full[0], phase of parity 1, which can never end"),
        ("(1 << count) - 1", "(1 << count + 1) - 1", "the mask 7 of the multicast names blocks"),
        ("(1 << count) - 1", "1", "for the mbarrier full[0], phase of parity 0, which can never end: 0 of 1"),
    ],
)  # fmt: skip
def test_mistakes_with_multicast(written: str, instead: str, said: str, run) -> None:
    assert written in MULTICAST
    assert said in run(MULTICAST.replace(written, instead))
