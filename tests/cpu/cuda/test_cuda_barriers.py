"""Barriers of parts of a block on the CPU: mbarriers, named barriers, warpgroups, and loops that wait for a value."""

import pytest
from cuda_program_runs import run_checked


@pytest.fixture
def run(tmp_path):
    return lambda text: run_checked(tmp_path, text)


MBARRIERS = """
__device__ unsigned shared(const void *p) { return static_cast<unsigned>(__cvta_generic_to_shared(p)); }
__device__ void init(void *bar, int count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared(bar)), "r"(count));
}
__device__ void arrive(void *bar) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared(bar)) : "memory");
}
__device__ void wait(void *bar, int parity) {
    asm volatile("{\\n.reg .pred done;\\n"
                 "again:\\n mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\\n"
                 "@done bra over;\\n bra.uni again;\\n over:\\n}\\n" ::"r"(shared(bar)), "r"(parity) : "memory");
}
"""

RING = (
    MBARRIERS
    + """
__global__ void ring(int *out, int n) {
    __shared__ unsigned long long full[2], empty[2];
    __shared__ int slot[2][32];
    if (threadIdx.x == 0)
        for (int i = 0; i < 2; ++i) { init(&full[i], 1); init(&empty[i], 2); }
    __syncthreads();
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    int sum = 0;
    for (int i = 0; i < n; ++i) {
        const int s = i % 2, round = i / 2;
        if (warp == 0) {
            wait(&empty[s], (round & 1) ^ 1);
            slot[s][lane] = i * lane;
            __syncwarp();
            if (lane == 0) arrive(&full[s]);
        } else {
            wait(&full[s], round & 1);
            sum += slot[s][31 - lane];
            __syncwarp();
            if (lane == 0) arrive(&empty[s]);
        }
    }
    if (warp) out[threadIdx.x - 32] = sum;
}
int main() {
    int *out, host[64]; cudaMalloc(&out, 256); ring<<<1, 96>>>(out, 7);
    cudaMemcpy(host, out, 256, cudaMemcpyDeviceToHost); printf("%d %d %d", host[0], host[30], host[33]);
}
"""
)


def test_a_ring_of_mbarriers(run) -> None:
    assert run(RING) == "651 21 630"


@pytest.mark.parametrize(
    ("written", "instead", "said"),
    [
        ("if (lane == 0) arrive(&full[s]);", "",
         "thread (0, 0, 0) waits at mbarrier.try_wait (line 13) for the mbarrier empty[0], phase of parity 0, which "
         "can never end: 2 of 2 arrivals and 0 bytes of copies are missing"),
        ("init(&empty[i], 2)", "init(&empty[i], 64)",
         "for the mbarrier empty[0], phase of parity 0, which can never end: 62 of 64"),
        ("__syncwarp();\n            if (lane == 0) arrive(&full[s]);", "if (lane == 0) arrive(&full[s]);",
         "a race on shared memory"),
        ("wait(&full[s], round & 1);", "", "shared memory"),
        ("for (int i = 0; i < 2; ++i) { init(&full[i], 1); init(&empty[i], 2); }", "init(&full[0], 1);",
         "there is no mbarrier: call mbarrier.init first"),
        ("init(&full[i], 1);", "init(&full[i], 0);", "mbarrier.init (line 7) on full[0]: its count is 0"),
        ("sum += slot[s][31 - lane];", "sum += slot[s][31 - lane]; if (threadIdx.x == 32) empty[1] = 0;",
         "on empty[1]: the program has overwritten the mbarrier"),
    ],
)  # fmt: skip
def test_mistakes_with_mbarriers(written: str, instead: str, said: str, run) -> None:
    assert written in RING
    assert said in run(RING.replace(written, instead))


STATES = (
    MBARRIERS
    + """
__global__ void states(int *out) {
    __shared__ unsigned long long bar;
    __shared__ int seen[64];
    const unsigned at = shared(&bar);
    if (threadIdx.x == 0) init(&bar, 64);
    __syncthreads();
    for (int round = 0; round < 3; ++round) {
        unsigned long long state;
        unsigned done = 0, pending;
        seen[threadIdx.x] = round + threadIdx.x;
        if (threadIdx.x % 2)
            asm volatile("mbarrier.arrive.release.cta.shared::cta.b64 %0, [%1];" : "=l"(state) : "r"(at) : "memory");
        else asm volatile("mbarrier.arrive.shared.b64 %0, [%1], 1;" : "=l"(state) : "r"(at) : "memory");
        asm("mbarrier.pending_count.b64 %0, %1;" : "=r"(pending) : "l"(state));
        if (pending < 1 || pending > 64) out[0] = -1;
        while (!done)
            asm volatile("{ .reg .pred p; mbarrier.test_wait.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
                         : "=r"(done) : "r"(at), "l"(state) : "memory");
        out[threadIdx.x] = seen[63 - threadIdx.x];
        asm volatile("barrier.cta.sync.aligned 3, 64;" ::: "memory");
    }
    if (threadIdx.x == 0) asm volatile("mbarrier.inval.shared::cta.b64 [%0];" ::"r"(at));
}
__global__ void dropped(int *out) {
    __shared__ unsigned long long bar;
    const unsigned at = shared(&bar);
    if (threadIdx.x == 0) init(&bar, 33);
    __syncthreads();
    if (threadIdx.x == 0) asm volatile("mbarrier.arrive_drop.shared.b64 _, [%0];" ::"r"(at) : "memory");
    arrive(&bar); wait(&bar, 0); arrive(&bar); wait(&bar, 1);
    if (threadIdx.x == 0) {
        asm volatile("mbarrier.arrive.noComplete.shared.b64 _, [%0], 2;" ::"r"(at) : "memory");
        asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], 48;" ::"r"(at));
        asm volatile("mbarrier.complete_tx.shared::cta.b64 [%0], 16; mbarrier.arrive.shared.b64 _, [%0], 29;"
                     " mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], BYTES;"
                     " mbarrier.complete_tx.shared::cta.b64 [%0], 33;" ::"r"(at));
        wait(&bar, 0);
        *out = 7;
    }
}
int main() {
    int *out, host[64], seven; cudaMalloc(&out, 256); cudaMemset(out, 0, 256); states<<<1, 64>>>(out);
    cudaMemcpy(host, out, 256, cudaMemcpyDeviceToHost); dropped<<<1, 32>>>(out);
    cudaMemcpy(&seven, out, 4, cudaMemcpyDeviceToHost); printf("%d %d %d", host[0], host[63], seven);
}
"""
)


def test_a_test_that_never_succeeds(run) -> None:
    found = run(STATES.replace("init(&bar, 64)", "init(&bar, 65)"))
    assert (
        "waits at mbarrier.test_wait (line 34) for the mbarrier bar[0], phase of parity 0, which can never end" in found
    )


def test_states_counts_and_bytes_of_mbarriers(run) -> None:
    assert run(STATES.replace("BYTES", "1")) == "65 2 7"
    stuck = run(STATES.replace("BYTES", "11"))
    many = run(STATES.replace("_, [%0], 29", "_, [%0], 31"))
    assert "mbarrier.arrive (line 51) on bar[0]: more than the 32 arrivals of mbarrier.init in one phase" in many
    assert "mbarrier bar[0], phase of parity 0, which can never end: 0 of 32 arrivals and 10 bytes" in stuck


COPIES = (
    MBARRIERS
    + """
__global__ void k(const int *in, int *out) {
    __shared__ unsigned long long bar;
    __shared__ int tile[64];
    if (threadIdx.x == 0) init(&bar, 64);
    __syncthreads();
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(shared(&tile[threadIdx.x])), "l"(in + threadIdx.x));
    asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(shared(&bar)));
    wait(&bar, 0);
    out[threadIdx.x] = tile[63 - threadIdx.x];
}
int main() {
    int host[64], *in, *out; for (int i = 0; i < 64; ++i) host[i] = i;
    cudaMalloc(&in, 256); cudaMalloc(&out, 256); cudaMemcpy(in, host, 256, cudaMemcpyHostToDevice);
    k<<<1, 64>>>(in, out); cudaMemcpy(host, out, 256, cudaMemcpyDeviceToHost); printf("%d %d", host[0], host[62]);
}
"""
)


def test_an_mbarrier_that_waits_for_copies_of_threads(run) -> None:
    assert run(COPIES) == "63 1"
    assert "shared memory" in run(COPIES.replace("wait(&bar, 0);", "wait(&bar, 1);"))


NAMED = """
__global__ void k(int *out) {
    __shared__ int slot[64];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    unsigned leader = 99, chosen = 0;
    asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
    asm volatile("{ .reg .pred p; elect.sync %0|p, 0xffffffff; selp.u32 %1, 1, 0, p; }" : "=r"(leader), "=r"(chosen));
    if (warp < 2) {
        slot[threadIdx.x] = threadIdx.x + chosen * 100;
        asm volatile("bar.arrive 1, 128;" ::: "memory");
        asm volatile("bar.sync 2, 64;" ::: "memory");
    } else {
        asm volatile("bar.sync 1, 128;" ::: "memory");
        out[threadIdx.x - 64] = slot[127 - threadIdx.x] + leader;
    }
    asm volatile("griddepcontrol.launch_dependents; griddepcontrol.wait;");
}
int main() {
    int *out, host[64]; cudaMalloc(&out, 256); k<<<2, 128>>>(out); cudaMemcpy(host, out, 256, cudaMemcpyDeviceToHost);
    printf("%d %d %d", host[0], host[31], host[63]);
}
"""


def test_named_barriers_and_warpgroups(run) -> None:
    assert run(NAMED.replace("k<<<2", "k<<<1")) == "63 132 100"


@pytest.mark.parametrize(
    ("written", "instead", "said"),
    [
        ("bar.arrive 1, 128", "bar.arrive 3, 128",
         "thread (64, 0, 0) waits at bar.sync 1 (line 16): 64 of 128 threads have arrived"),
        ("bar.arrive 1, 128", "bar.arrive 1, 96", "but others have arrived with another number of threads"),
        ("bar.sync 2, 64", "bar.sync 16, 64", "bar.sync 16 (line 14): barriers have the numbers 0 to 15"),
        ("bar.sync 2, 64", "bar.sync 2, 60", "60 threads are no multiple of 32"),
        ("bar.sync 2, 64", "bar.sync 2, 256", "256 threads are more than the 128 of the block"),
        ('asm volatile("bar.sync 1, 128;" ::: "memory");', "", "shared memory"),
        ("setmaxnreg.dec.sync.aligned.u32 24", "setmaxnreg.inc.sync.aligned.u32 260",
         "setmaxnreg 260 (line 9): the number"),
        ('asm volatile("setmaxnreg', 'if (warp != 3) asm volatile("setmaxnreg',
         "waits at setmaxnreg (line 9) for its warpgroup, but thread (96, 0, 0)"),
        ("elect.sync %0|p, 0xffffffff", "elect.sync %0|p, 0xffff", "is not in its own mask"),
    ],
)  # fmt: skip
def test_mistakes_with_named_barriers(written: str, instead: str, said: str, run) -> None:
    assert written in NAMED
    assert said in run(NAMED.replace("k<<<2", "k<<<1").replace(written, instead))


FLAGS = """
__global__ void k(int *flag, int *out, int n) {
    if (threadIdx.x == 0) {
        if (blockIdx.x) WAIT
        *out += blockIdx.x + 1;
        asm volatile("st.release.gpu.global.s32 [%0], %1;" ::"l"(flag), "r"(blockIdx.x + 1) : "memory");
    }
    __syncthreads();
}
int main() {
    int *flag, *out, n = 4, host; cudaMalloc(&flag, 4); cudaMalloc(&out, 4);
    cudaMemset(flag, 0, 4); cudaMemset(out, 0, 4); void *arguments[] = {&flag, &out, &n};
    cudaLaunchCooperativeKernel((void *)k, 4, 64, arguments);
    cudaMemcpy(&host, out, 4, cudaMemcpyDeviceToHost); printf("%d", host);
}
"""
ACQUIRE = """{ int seen; do { asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(seen) : "l"(flag) : "memory"); }
            while (seen != (blockIdx.x + LATER) % n); }"""
WAITS = {
    "acquire": ACQUIRE,
    "atomic": "while (atomicAdd(flag, 0) != (blockIdx.x + LATER) % n) {}",
    "sleep": "for (;;) { if (atomicAdd(flag, 0) == (blockIdx.x + LATER) % n) break; __nanosleep(20); }",
    "volatile": "{ while (*(volatile int *)flag != (blockIdx.x + LATER) % n); __threadfence(); }",
    "volatile body": "{ for (;;) { int seen = *(volatile int *)flag; if (seen == (blockIdx.x + LATER) % n) break; } "
                     "__threadfence(); }",
}  # fmt: skip


@pytest.mark.parametrize("wait", WAITS)
def test_blocks_that_wait_for_each_other(wait: str, run) -> None:
    assert run(FLAGS.replace("WAIT", WAITS[wait]).replace("LATER", "0")) == "10"


@pytest.mark.parametrize("wait", WAITS)
def test_a_wait_for_a_value_that_nobody_writes(wait: str, run) -> None:
    text = FLAGS.replace("WAIT", WAITS[wait]).replace("LATER", "7")
    assert "for a value that no other thread writes any more: all threads wait" in run(text)
    launch = "cudaLaunchCooperativeKernel((void *)k, 4, 64, arguments)"
    found = run(text.replace(launch, "k<<<4, 64>>>(flag, out, n)"))
    assert "thread (0, 0, 0): waits in " in found
    assert "Start kernels whose blocks wait for each other with cudaLaunchCooperativeKernel" in found
