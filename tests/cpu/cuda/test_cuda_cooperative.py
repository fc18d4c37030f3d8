"""Cooperative groups, cooperative launches and asynchronous copies in CUDA programs on the CPU."""

import pytest
from cuda_program_runs import run_checked

HEADERS = "".join(
    f"#include <{name}.h>\n"
    for name in (
        "cooperative_groups",
        "cooperative_groups/reduce",
        "cooperative_groups/scan",
        "cooperative_groups/memcpy_async",
        "cuda_pipeline",
    )
)
HEADERS += "namespace cg = cooperative_groups;\n"


@pytest.fixture
def run(tmp_path):
    return lambda text: run_checked(tmp_path, HEADERS + text)


GROUPS = """
__device__ int sum_group(cg::thread_group g, int *temp, int value) {
    int lane = g.thread_rank();
    for (int i = g.size() / 2; i > 0; i /= 2) {
        temp[lane] = value;
        g.sync();
        if (lane < i) value += temp[lane + i];
        g.sync();
    }
    return value;
}
__global__ void groups() {
    __shared__ int temp[64];
    cg::thread_block block = cg::this_thread_block();
    int s = sum_group(block, temp, block.thread_rank());
    auto tile = cg::tiled_partition<32>(block);
    cg::thread_block_tile<8> small = cg::tiled_partition<8>(tile);
    int r = cg::reduce(small, (int)block.thread_rank(), cg::plus<int>());
    int w = (int)block.thread_rank();
    for (int i = tile.size() / 2; i > 0; i /= 2) w += tile.shfl_down(w, i);
    int sc = cg::exclusive_scan(tile, 1);
    unsigned votes = small.ballot(small.thread_rank() % 2);
    cg::thread_group four = cg::tiled_partition(block, 4);
    int f = sum_group(four, temp + threadIdx.x / 4 * 4, 1);
    if (block.thread_rank() == 0) printf("%d %d %d %x %d\\n", s, r, w, votes, f);
    if (block.thread_rank() == 63) printf("%d %d %d %d\\n", r, sc, tile.meta_group_rank(), small.meta_group_size());
}
int main() { groups<<<1, 64>>>(); cudaDeviceSynchronize(); }
"""


def test_blocks_and_tiles(run) -> None:
    assert run(GROUPS) == "2016 28 496 aa 4\n476 31 1 4\n"


CONVERGED = """
__global__ void filter(int *kept, const int *in, int *count) {
    const int x = in[threadIdx.x];
    if (x % 3 == 0) {  // one atomic operation per warp
        auto active = cg::coalesced_threads();
        int begin = 0;
        if (active.thread_rank() == 0) begin = atomicAdd(count, active.size());
        begin = active.shfl(begin, 0);
        kept[begin + active.thread_rank()] = x;
        const int most = cg::reduce(active, x, cg::greater<int>());
        const unsigned votes = active.ballot(x % 2), up = active.shfl_up(x, 1), down = active.shfl_down(x, 2);
        if (threadIdx.x == 63) printf("%d %x %d %d %d, ", active.size(), votes, most, up, down);
    } else {
        const unsigned others = __activemask();
        if (threadIdx.x == 1) printf("%x %x, ", others, __ballot_sync(others, x % 2));
        else __ballot_sync(others, x % 2);
    }
    __syncwarp();
}
int main() {
    int host[64], *in, *kept, *count, found = 0;
    for (int i = 0; i < 64; ++i) host[i] = i;
    cudaMalloc(&in, 256); cudaMalloc(&kept, 256); cudaMalloc(&count, 4); cudaMemset(count, 0, 4);
    cudaMemcpy(in, host, 256, cudaMemcpyHostToDevice);
    filter<<<1, 64>>>(kept, in, count);
    cudaMemcpy(&found, count, 4, cudaMemcpyDeviceToHost); cudaMemcpy(host, kept, 4 * found, cudaMemcpyDeviceToHost);
    int sum = 0; for (int i = 0; i < found; ++i) sum += host[i];
    printf("%d %d", found, sum);
}
"""


def test_lanes_that_run_together(run) -> None:
    others = [x for x in range(32) if x % 3]
    mask, odd = (sum(1 << x for x in some) for some in (others, [x for x in others if x % 2]))
    kept = [x for x in range(33, 64) if x % 3 == 0]
    votes = sum((x % 2) << rank for rank, x in enumerate(kept))
    found = run(CONVERGED)
    assert f"{mask:x} {odd:x}, " in found
    assert f"{len(kept)} {votes:x} 63 60 63, " in found
    assert found.endswith(f"22 {sum(range(0, 64, 3))}")


GRID = """
__global__ void iterate(float *a, float *b, int n, int steps) {
    __shared__ float mine[64];
    cg::grid_group grid = cg::this_grid();
    mine[threadIdx.x] = grid.thread_rank();
    for (int s = 0; s < steps; ++s) {
        for (int i = grid.thread_rank(); i < n; i += grid.size()) {
            float left = i ? a[i - 1] : 0, right = i + 1 < n ? a[i + 1] : 0;
            b[i] = left + right + mine[threadIdx.x] * 0;
        }
        grid.sync();
        float *t = a; a = b; b = t;
    }
}
int main() {
    int n = 1000, steps = 3; float h[1000], *a, *b;
    for (int i = 0; i < n; ++i) h[i] = i;
    cudaMalloc(&a, 4000); cudaMalloc(&b, 4000);
    cudaMemcpy(a, h, 4000, cudaMemcpyHostToDevice);
    void *arguments[] = {&a, &b, &n, &steps};
    cudaLaunchCooperativeKernel((void *)iterate, 8, 64, arguments);
    cudaMemcpy(h, b, 4000, cudaMemcpyDeviceToHost);
    printf("%g %g", h[0], h[500]);
}
"""


def test_a_barrier_of_the_grid(run) -> None:
    """Each block keeps its shared memory."""
    assert run(GRID) == "5 4000"


def test_mistakes_with_barriers_of_the_grid(run) -> None:
    launch = "cudaLaunchCooperativeKernel((void *)iterate, 8, 64, arguments)"
    plain = run(GRID.replace(launch, "iterate<<<8, 64>>>(a, b, n, steps)"))
    assert "kernel iterate waits at grid.sync() (line 20), which needs a cooperative launch: start it with" in plain
    absent = run(GRID.replace("float mine[64];", "float mine[64]; if (blockIdx.x == 7) return;"))
    assert "block (6, 0, 0) waits at grid.sync() (line 20), but block (7, 0, 0) has returned" in absent
    assert "a race on device memory" in run(GRID.replace("grid.sync();", "__syncthreads();"))
    large = GRID.replace(launch, 'printf("%s ", cudaGetErrorString(' + launch.replace("8, 64", "1000, 64") + "))")
    assert run(large).startswith("too many blocks in cooperative launch ")


STAGED = """
__global__ void staged(const float *in, float *out, int n) {
    __shared__ float4 tile[2][64];
    const float4 *v = (const float4 *)in;
    int tiles = n / 256;
    __pipeline_memcpy_async(&tile[0][threadIdx.x], v + threadIdx.x, 16);
    __pipeline_commit();
    for (int t = 0; t < tiles; ++t) {
        if (t + 1 < tiles) __pipeline_memcpy_async(&tile[(t + 1) % 2][threadIdx.x], v + (t + 1) * 64 + threadIdx.x, 16);
        __pipeline_commit();
        __pipeline_wait_prior(1);
        __syncthreads();
        float4 x = tile[t % 2][63 - threadIdx.x];
        out[t * 64 + threadIdx.x] = x.x + x.w;
        __syncthreads();
    }
}
__global__ void grouped(const float *in, float *out) {
    __shared__ float s[128];
    auto block = cg::this_thread_block();
    cg::memcpy_async(block, s, in, sizeof s);
    cg::wait(block);
    out[threadIdx.x] = s[127 - threadIdx.x];
}
int main() {
    float h[1024], *in, *out; cudaMalloc(&in, 4096); cudaMalloc(&out, 4096);
    for (int i = 0; i < 1024; ++i) h[i] = i;
    cudaMemcpy(in, h, 4096, cudaMemcpyHostToDevice);
    staged<<<1, 64>>>(in, out, 1024); cudaMemcpy(h, out, 1024, cudaMemcpyDeviceToHost);
    printf("%g %g ", h[0], h[255]);
    grouped<<<1, 128>>>(in, out); cudaMemcpy(h, out, 512, cudaMemcpyDeviceToHost);
    printf("%g", h[0]);
}
"""


def test_asynchronous_copies_to_shared_memory(run) -> None:
    assert run(STAGED) == "507 1539 127"


def test_a_copy_that_is_not_waited_for_has_not_happened(run) -> None:
    for wait in ("__pipeline_wait_prior(1);", "cg::wait(block);"):
        assert "to which nothing was written" in run(STAGED.replace(wait, "__syncthreads();"))
    assert "kernel staged" in run(STAGED.replace("__pipeline_wait_prior(1);", "__pipeline_wait_prior(2);"))
