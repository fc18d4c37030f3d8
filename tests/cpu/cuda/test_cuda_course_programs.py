"""CUDA programs as courses write them, run on the CPU with all checks in both orders of threads."""

import pytest
from cuda_program_runs import run_checked
from typer.testing import CliRunner

from warpbus.cli import app
from warpbus.errors import DataError


@pytest.fixture
def run(tmp_path):
    return lambda text: run_checked(tmp_path, text)


SHARED = """
extern __shared__ float whole[];
__global__ void rows(int *x) {
    extern __shared__ int table[][4];
    table[threadIdx.x / 4][threadIdx.x % 4] = threadIdx.x;
    __syncthreads();
    x[threadIdx.x] = (&table[0][0])[31 - threadIdx.x] + table[1][2];
}
template <class T> __global__ void raw(T *x) {
    extern __shared__ __align__(sizeof(T)) unsigned char bytes[];
    T *t = reinterpret_cast<T *>(bytes);
    t[threadIdx.x] = threadIdx.x;
    __syncthreads();
    x[threadIdx.x] = t[31 - threadIdx.x];
}
__global__ void kinds(int *x) {
    __shared__ volatile int a;
    volatile __shared__ int b;
    __shared__ unsigned long long c[2],
        d[2][3];
    __shared__ __align__(16) float e[4];
    alignas(16) __shared__ unsigned char f[4];
    if (threadIdx.x == 0) { a = 1; b = 2; c[1] = 3; d[1][2] = 4; e[3] = 5; f[3] = 6; whole[0] = 7; }
    __syncthreads();
    x[threadIdx.x] = a + b + c[1] + d[1][2] + e[3] + f[3] + whole[0] + __LINE__ * 100;
}
int main() {
    int *x, y[32]; cudaMalloc(&x, 128); double *z, w[32]; cudaMalloc(&z, 256);
    raw<<<1, 32, 128>>>(x); raw<<<1, 32, 256>>>(z);
    cudaMemcpy(y, x, 128, cudaMemcpyDeviceToHost); cudaMemcpy(w, z, 256, cudaMemcpyDeviceToHost);
    printf("%d %g ", y[1], w[2]);
    rows<<<1, 32, 128>>>(x); cudaMemcpy(y, x, 128, cudaMemcpyDeviceToHost); printf("%d ", y[1]);
    kinds<<<1, 32, 4>>>(x); cudaMemcpy(y, x, 128, cudaMemcpyDeviceToHost); printf("%d", y[31]);
}
"""


def test_declarations_of_shared_memory(run) -> None:
    assert run(SHARED) == "30 29 36 2828"


RUNTIME = """
#include <cuda.h>
#include "device_launch_parameters.h"
__constant__ float scale[2];
__device__ int counter;
__device__ __managed__ int managed = 3;
__global__ void k(const uchar4 *in, float *out, int pitch) {
    atomicAdd(&counter, 1);
    out[threadIdx.y * pitch + threadIdx.x] = in[threadIdx.x].y * scale[1];
}
int main() {
    float host[2] = {2, 3}, *out, back[6]; uchar4 *in, pixels[3]; size_t pitch; int counted, warp;
    for (int i = 0; i < 3; ++i) pixels[i] = make_uchar4(0, i, 0, 255);
    cudaMalloc(&in, sizeof pixels); cudaMemcpy(in, pixels, sizeof pixels, cudaMemcpyHostToDevice);
    cudaMallocPitch((void **)&out, &pitch, 12, 2);
    cudaMemcpyToSymbol(scale, host + 1, 4, 4);
    k<<<1, dim3(3, 2)>>>(in, out, pitch / sizeof(float));
    cudaMemcpy2D(back, 12, out, pitch, 12, 2, cudaMemcpyDeviceToHost);
    cudaMemcpyFromSymbol(&counted, counter, sizeof counted);
    cudaDeviceGetAttribute(&warp, cudaDevAttrWarpSize, 0);
    printf("%g %g %d %d %d\\n", back[2], back[4], counted, warp, managed);
    printf("%s, ", cudaGetErrorString(cudaMemcpy2D(back, 12, out, 8, 12, 2, cudaMemcpyDeviceToHost)));
    printf("%s, ", cudaGetErrorString(cudaMemcpy2D(back, 12, out, pitch, 12, 3, cudaMemcpyDeviceToHost)));
    printf("%s, ", cudaGetErrorString(cudaMemcpyFromSymbol(&counted, counter, 4, 4)));
    cudaGetLastError();
    k<<<1, 1, 49 << 10>>>(in, out, 0);
    printf("%s", cudaGetErrorString(cudaGetLastError()));
}
"""


def test_copies_of_rows_and_symbols(run) -> None:
    invalid = "invalid argument"
    assert run(RUNTIME) == f"6 3 6 32 3\ninvalid pitch argument, {invalid}, {invalid}, {invalid}"


FUNCTIONS = """
__global__ void k(unsigned *x) {
    const unsigned lane = threadIdx.x;
    atomicOr(x, 1u << lane); atomicAnd(x + 1, ~(1u << lane)); atomicXor(x + 2, lane); atomicInc(x + 3, 9);
    atomicDec(x + 4, 9);
    const unsigned sum = __reduce_add_sync(~0u, lane), most = __reduce_max_sync(~0u, lane);
    const unsigned same = __match_any_sync(~0u, lane % 4);
    if (lane == 1) printf("%u %u %x %x %d %g %g\\n", sum, most, same, __brev(2), __clzll(1), rsqrt(4.0), rsqrtf(4.0f));
}
int main() {
    unsigned *x, y[5] = {0, ~0u, 0, 0, 0}; cudaMalloc(&x, 20); cudaMemcpy(x, y, 20, cudaMemcpyHostToDevice);
    k<<<1, 32>>>(x); cudaMemcpy(y, x, 20, cudaMemcpyDeviceToHost);
    printf("%x %x %u %u %u", y[0], y[1], y[2], y[3], y[4]);
}
"""


def test_functions_of_the_device(run) -> None:
    assert run(FUNCTIONS) == "496 31 22222222 40000000 63 0.5 0.5\nffffffff 0 0 2 8"


LAUNCHES = """
#define SAY(call) printf("%s, ", cudaGetErrorString(call))
template <class T> __global__ void axpy(T a, const T *x, T *y, int n) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y[i] += a * x[i];
}
__global__ void reversed(float *out) {
    extern __shared__ float s[];
    s[threadIdx.x * 600] = threadIdx.x;
    __syncthreads();
    out[threadIdx.x] = s[(blockDim.x - 1 - threadIdx.x) * 600];
}
int main() {
    const int n = 1000; float a = 2, h[n], *x, *y;
    for (int i = 0; i < n; ++i) h[i] = i;
    cudaStream_t s; cudaStreamCreate(&s);
    cudaMallocAsync(&x, n * 4, s); cudaMallocAsync((void **)&y, n * 4, s);
    cudaMemcpyAsync(x, h, n * 4, cudaMemcpyHostToDevice, s); cudaMemsetAsync(y, 0, n * 4, s);
    int count = n; void *arguments[] = {&a, &x, &y, &count};
    SAY(cudaLaunchKernel((void *)axpy<float>, dim3(4), dim3(256), arguments, 0, s));
    a = 100;  // the launch has taken the values
    SAY(cudaLaunchKernel(reinterpret_cast<const void *>(&axpy<float>), 4, 2048, arguments));
    cudaMemcpyAsync(h, y, n * 4, cudaMemcpyDeviceToHost, s);
    SAY(cudaFreeAsync(x, s)); SAY(cudaFreeAsync(y, s)); SAY(cudaFreeAsync(y + 1, s)); cudaStreamSynchronize(s);
    printf("%g\\n", h[999]); cudaGetLastError();
    float *o; cudaMalloc(&o, 128);
    reversed<<<1, 32, 80000>>>(o); SAY(cudaGetLastError());
    SAY(cudaFuncSetAttribute(reversed, cudaFuncAttributeMaxDynamicSharedMemorySize, 80000));
    reversed<<<1, 32, 80000>>>(o); SAY(cudaGetLastError());
    SAY(cudaFuncSetAttribute(reversed, cudaFuncAttributeMaxDynamicSharedMemorySize, 240000));
    cudaMemcpy(h, o, 128, cudaMemcpyDeviceToHost);
    int blocks, grid, block;
    cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, reversed, 256, 80000);
    cudaOccupancyMaxPotentialBlockSize(&grid, &block, axpy<float>, 0, 0);
    printf("%g %d %d %d", h[0], blocks, grid, block);
}
"""


def test_launches_by_pointer_and_limits_of_kernels(run) -> None:
    refused, passed = "invalid argument, ", "no error, "
    first = f"{passed}invalid configuration argument, {passed}{passed}{refused}1998\n"
    assert run(LAUNCHES) == f"{first}{refused}{passed}{passed}{refused}31 2 1 1024"


MEMORY = """
__global__ void k(int *x, long long *ticks) {
    const long long begin = clock64();
    x[0] = __ldcg(x + 1) + __dp4a(0x01020304, 0x01010101, 5) + __byte_perm(0x11, 0x22, 0x0004);
    __stcs(x + 2, static_cast<int>(__funnelshift_l(0x80000000, 1, 1)));
    atomicAdd_block(x + 3, 4);
    ticks[0] = clock64() >= begin;
}
void CUDART_CB done(cudaStream_t, cudaError_t, void *data) { printf("%s ", static_cast<const char *>(data)); }
int main() {
    int *mapped, *seen, *managed, most; long long *ticks, same;
    static int registered[4] = {0, 7, 0, 1};
    cudaHostAlloc(&mapped, 16, cudaHostAllocMapped); cudaHostGetDevicePointer(&seen, mapped, 0);
    cudaHostRegister(registered, 16, cudaHostRegisterDefault);
    cudaMalloc(&ticks, 8); cudaMallocManaged(&managed, 64);
    printf("%d ", cudaMemAdvise(managed, 64, cudaMemAdviseSetReadMostly, 0));
    cudaStream_t s; int least, greatest; cudaDeviceGetStreamPriorityRange(&least, &greatest);
    cudaStreamCreateWithPriority(&s, cudaStreamNonBlocking, greatest);
    cudaMemcpyAsync(mapped, registered, 16, cudaMemcpyDefault, s);
    k<<<1, 1, 0, s>>>(seen, ticks); cudaStreamAddCallback(s, done, (void *)"done", 0); cudaStreamSynchronize(s);
    cudaMemcpy(&same, ticks, 8, cudaMemcpyDeviceToHost);
    printf("%d %d %d %lld ", mapped[0], mapped[2], mapped[3], same);
    cudaPointerAttributes of[3];
    cudaPointerGetAttributes(of, ticks); cudaPointerGetAttributes(of + 1, managed);
    cudaPointerGetAttributes(of + 2, mapped);
    for (auto &each : of) printf("%d ", each.type);
    cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, 0);
    printf("%d %d", most, cudaHostUnregister(registered)); cudaFreeHost(mapped);
}
"""


def test_memory_of_the_host_and_functions_of_courses(run) -> None:
    assert run(MEMORY) == f"0 done {7 + 15 + 0x11111122} 3 5 1 2 3 1 {227 << 10} 0"


def test_assembly_of_another_machine(run) -> None:
    text = '__global__ void k(unsigned *x) { asm("nothing_known %0" : "=q"(x[0])); }\nint main() {}\n'
    assert run(text).startswith(
        "the compiler rejects an asm statement (line 4): the CPU knows those with operands of PTX"
    )


def test_a_refused_launch_is_an_error_of_the_launch_alone(run) -> None:
    """A call that waits returns the errors of kernels that ran, not those of launches."""
    text = "__global__ void k() {}\nint main() { cudaStream_t s; cudaStreamCreate(&s); cudaEvent_t e; "
    text += "cudaEventCreate(&e); cudaEventRecord(e, s); k<<<1, 2000>>>();\n"
    waits = "cudaDeviceSynchronize(), cudaStreamSynchronize(s), cudaEventSynchronize(e)"
    text += f'printf("%d %d %d ", {waits}); printf("%d ", cudaPeekAtLastError());\n'
    assert run(text + 'printf("%d ", cudaGetLastError()); printf("%d", cudaGetLastError()); }') == "0 0 0 9 9 0"


def test_what_threads_print_does_not_depend_on_their_order(run) -> None:
    text = '__global__ void k() { printf("%d\\n", threadIdx.x); __syncthreads(); puts("after"); }\n'
    assert run(text + "int main() { k<<<1, 2>>>(); cudaDeviceSynchronize(); }\n") == "0\n1\nafter\nafter\n"


LOCK = """
__device__ int lock;
__global__ void k(int *x) {
    for (bool done = false; !done;)
        if (atomicCAS(&lock, 0, 1) == 0) {
            x[0] = x[0] + 1;
            FENCE
            atomicExch(&lock, 0);
            done = true;
        }
}
int main() {
    int *x, y = 0; cudaMalloc(&x, 4); cudaMemcpy(x, &y, 4, cudaMemcpyHostToDevice);
    k<<<1, 64>>>(x); cudaMemcpy(&y, x, 4, cudaMemcpyDeviceToHost); printf("%d", y);
}
"""


def test_a_lock_orders_threads_by_its_fence(run) -> None:
    assert run(LOCK.replace("FENCE", "__threadfence();")) == "64"
    assert "a race on device memory" in run(LOCK.replace("FENCE", ""))
    fence_alone = (
        "__global__ void k(int *x) { __shared__ int s[64]; s[threadIdx.x] = 1; __threadfence_block();\n"
        "    x[threadIdx.x] = s[63 - threadIdx.x]; }\nint main() { int *x; cudaMalloc(&x, 256); k<<<1, 64>>>(x); "
        "cudaDeviceSynchronize(); }\n"
    )
    assert "a race on shared memory" in run(fence_alone)


STRUCTS = """
struct Particle { float x, y, z; int id; };
struct Mixed { double a; char b; };
__global__ void k(Particle *p, Mixed *m, float3 *f) {
    Particle own = p[threadIdx.x]; own.x += 1; p[threadIdx.x] = own;
    Mixed mixed = m[threadIdx.x]; mixed.a += 1; m[threadIdx.x] = mixed;
    float3 three = f[threadIdx.x]; three.z += 1; f[threadIdx.x] = three;
}
int main() {
    Particle *p; Mixed *m; float3 *f, g[32];
    cudaMalloc(&p, 32 * sizeof *p); cudaMalloc(&m, 32 * sizeof *m); cudaMalloc(&f, 32 * sizeof *f);
    cudaMemset(p, 0, 32 * sizeof *p); cudaMemset(m, 0, 32 * sizeof *m); cudaMemset(f, 0, 32 * sizeof *f);
    k<<<1, 32>>>(p, m, f); cudaMemcpy(g, f, sizeof g, cudaMemcpyDeviceToHost); printf("%g", g[31].z);
}
"""


def test_structures_have_the_alignment_of_their_members(run) -> None:
    assert run(STRUCTS) == "1"


def test_large_local_arrays(run) -> None:
    text = (
        "__global__ void k(int *x) { int local[120000]; for (int i = 0; i < 120000; ++i) local[i] = threadIdx.x + i;\n"
        "    __syncthreads(); int wrong = 0; for (int i = 0; i < 120000; ++i) wrong += local[i] != threadIdx.x + i;\n"
        "    atomicAdd(x, wrong); }\n"
        "int main() { int *x, y; cudaMalloc(&x, 4); cudaMemset(x, 0, 4); k<<<1, 64>>>(x);\n"
        '    cudaMemcpy(&y, x, 4, cudaMemcpyDeviceToHost); printf("%d", y); }\n'
    )
    assert run(text) == "0"
    assert "need more than 512 KB (line 4)" in run(text.replace("120000", "300000"))


@pytest.mark.parametrize(
    ("kernel", "said"),
    [
        (
            "float4 v = ((const float4 *)(x + 1))[threadIdx.x]; v.x += v.y + v.z + v.w; ((float4 *)x)[16] = v;",
            "reads 16 bytes at x[1] (line 4), but its address is not a multiple of 16",
        ),
        ("((float4 *)(x + 1))[0] = make_float4(0, 0, 0, 0);", "writes 16 bytes at x[1] (line 4)"),
        ("x[0] = 5 / n;", "divides an integer by zero (line 4)"),
        ("assert(n > 0);", "its assert failed (see above)"),
        ("x[0] = depth(n);", "its local variables and calls need more than 512 KB (line 5)"),
    ],
)
def test_mistakes(run, kernel: str, said: str) -> None:
    text = (
        f"__device__ int depth(int n); __global__ void k(float *x, int n) {{ {kernel} }}\n"
        "__device__ int depth(int n) { volatile int a[64]; a[n & 63] = n; return depth(n + 1) + a[n & 63]; }\n"
        "int main() { float *x; cudaMalloc(&x, 400); cudaMemset(x, 0, 400); k<<<1, 1>>>(x, 0); "
        "cudaDeviceSynchronize(); }\n"
    )
    assert f"kernel k, block (0, 0, 0), thread (0, 0, 0): {said}" in run(text)


def test_memory_that_was_freed(run) -> None:
    text = "__global__ void k(int *x) { x[0] = 1; }\nint main() { int *x; cudaMalloc(&x, 4); cudaFree(x); "
    assert "accesses x (line 4), but cudaFree has freed it" in run(
        text + "k<<<1, 1>>>(x); cudaDeviceSynchronize(); }\n"
    )
    assert run(text + "return x[0]; }\n").startswith("host code: accesses x (line 5), but cudaFree has freed it")


@pytest.mark.parametrize(
    "name",
    ["cuda/barrier", "thrust/sort.h", "cub/cub.cuh", "cublas_v2.h", "curand_kernel.h", "cuda/pipeline"],
)
def test_headers_that_the_cpu_does_not_have(run, name: str) -> None:
    found = run(f"#include <{name}>\nint main() {{}}\n")
    assert f"{name}: No such file or directory. Of CUDA's headers the CPU has cuda_runtime.h" in found


def test_dynamic_parallelism_is_refused(run) -> None:
    text = "__global__ void child() {}\n__global__ void k() { if (threadIdx.x == 3) child<<<1, 1>>>(); }\n"
    found = run(text + "int main() { k<<<1, 32>>>(); cudaDeviceSynchronize(); }\n")
    assert found.startswith("kernel k, block (0, 0, 0), thread (3, 0, 0): launches the kernel child: the CPU does not")


@pytest.mark.parametrize(
    "text",
    [
        "#include <cooperative_groups.h>\nint main() { auto g = cooperative_groups::this_multi_grid(); }\n",
        "int main() { cudaGraphUpload(nullptr, nullptr); }\n",
        "__global__ void k() { __vaddss2(1, 2); }\nint main() {}\n",
    ],
)
def test_parts_of_cuda_that_the_cpu_does_not_have(run, text: str) -> None:
    assert "it belongs to the parts of CUDA that the CPU does not have" in run(text)


def test_a_program_that_fails_is_not_praised(tmp_path) -> None:
    source = tmp_path / "program.cu"
    words = ["cuda", "run", "--device", "cpu", "--check", str(source)]
    source.write_text('#include <cstdio>\nint main() { puts("wrong"); return 3; }\n', encoding="utf-8")
    found = CliRunner().invoke(app, words, catch_exceptions=False)
    assert (found.exit_code, found.stdout) == (3, "wrong\n")
    source.write_text("#include <cstdlib>\nint main() { abort(); }\n", encoding="utf-8")
    with pytest.raises(DataError, match="the signal SIGABRT ended the program"):
        CliRunner().invoke(app, words, catch_exceptions=False)


def test_headers_of_the_library_after_those_of_cuda(run) -> None:
    headers = "algorithm array atomic chrono functional iostream map memory mutex numeric random regex string thread"
    includes = "".join(f"#include <{name}>\n" for name in headers.split())
    assert (
        run(f"""
#include <cuda_runtime.h>
{includes}
__noinline__ __device__ int twice(int value) {{ return 2 * value; }}
__global__ void kernel(int *x) {{ x[threadIdx.x] = twice(threadIdx.x); }}
int main() {{
    auto x = std::make_shared<int *>();
    std::vector<int> y(32);
    cudaMalloc(x.get(), 128);
    kernel<<<1, 32>>>(*x);
    cudaMemcpy(y.data(), *x, 128, cudaMemcpyDeviceToHost);
    printf("%d", std::accumulate(y.begin(), y.end(), 0));
}}
""")
        == "992"
    )
