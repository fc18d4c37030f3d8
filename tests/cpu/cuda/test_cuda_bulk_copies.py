"""Bulk copies (cp.async.bulk) on the CPU: a ring with mbarriers, stores in groups, and what is reported."""

import pytest
from cuda_program_runs import START, run_checked

from warpbus.cuda import programs


@pytest.fixture
def run(tmp_path):
    return lambda text: run_checked(tmp_path, text)


RING = """
__device__ unsigned shared(const void *p) { return static_cast<unsigned>(__cvta_generic_to_shared(p)); }
__device__ void wait(void *bar, int parity) {
    asm volatile("{\\n.reg .pred done;\\n"
                 "again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\\n@!done bra again;\\n}"
                 ::"r"(shared(bar)), "r"(parity) : "memory");
}
__global__ void k(const int *in, int *out, int n) {
    __shared__ __align__(128) int tile[2][64], result[64];
    __shared__ unsigned long long full[2];
    if (threadIdx.x == 0) {
        for (int i = 0; i < 2; ++i) asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared(&full[i])));
        asm volatile("fence.mbarrier_init.release.cluster;");
    }
    __syncthreads();
    const auto fetch = [&](int i) {
        const unsigned bar = shared(&full[i % 2]);
        asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], 256;" ::"r"(bar) : "memory");
        asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], 256, [%2];"
                     ::"r"(shared(tile[i % 2])), "l"(in + 64 * i), "r"(bar) : "memory");
    };
    if (threadIdx.x == 0) fetch(0);
    for (int i = 0; i < n; ++i) {
        if (threadIdx.x == 0 && i + 1 < n) fetch(i + 1);
        wait(&full[i % 2], i / 2 & 1);
        if (threadIdx.x == 0 && i) asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
        __syncthreads();
        result[threadIdx.x] = tile[i % 2][63 - threadIdx.x] * 2;
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
        __syncthreads();
        if (threadIdx.x == 0) {
            asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], 256;"
                         ::"l"(out + 64 * i), "r"(shared(result)) : "memory");
            asm volatile("cp.async.bulk.commit_group;" ::: "memory");
        }
    }
    if (threadIdx.x == 0) asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}
int main() {
    int *in, *out, host[256]; for (int i = 0; i < 256; ++i) host[i] = i;
    cudaMalloc(&in, 1024); cudaMalloc(&out, 1024); cudaMemcpy(in, host, 1024, cudaMemcpyHostToDevice);
    cudaMemset(out, 0, 1024); k<<<1, 64>>>(in, out, 4); cudaMemcpy(host, out, 1024, cudaMemcpyDeviceToHost);
    printf("%d %d %d", host[0], host[63], host[255]);
}
"""


def test_a_ring_of_bulk_copies(run) -> None:
    assert run(RING) == "126 0 384"


STORE = "cp.async.bulk.global.shared::cta.bulk_group"


def test_reductions_prefetches_and_cache_hints(run) -> None:
    added = RING.replace(STORE, "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.s32").replace(
        "cudaMemset(out, 0", "cudaMemset(out, 1"
    )
    assert run(added) == f"{126 + 0x1010101} {0x1010101} {384 + 0x1010101}"
    hints = RING.replace("bytes [%0], [%1], 256, [%2];", "bytes.L2::cache_hint [%0], [%1], 256, [%2], policy; }")
    policy = '"{ .reg .b64 policy; createpolicy.fractional.L2::evict_first.b64 policy, 1.0; '
    prefetch = "cp.async.bulk.prefetch.L2.global [%1], 256; cp.async.bulk.shared::cluster"
    assert run(hints.replace('"cp.async.bulk.shared::cluster', policy + prefetch)) == "126 0 384"


@pytest.mark.parametrize(
    ("written", "instead", "said"),
    [
        ('asm volatile("fence.proxy.async.shared::cta;" ::: "memory");', "",
         "its store reads result[0] (line 35), which thread (0, 0, 0) has written (line 31) without a fence"),
        ("wait(&full[i % 2], i / 2 & 1);", "",
         "(line 31), but nothing orders that behind the copy of thread (0, 0, 0) (line 22), which writes it: wait for"),
        ("cp.async.bulk.wait_group.read 0", "cp.async.bulk.commit_group",
         "which the store of thread (0, 0, 0) (line 35) may still read"),
        ('if (threadIdx.x == 0) asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");', "",
         "thread (0, 0, 0): it ends before its copy from shared to device memory (line 35) was waited for"),
        ("_, [%0], 256", "_, [%0], 512", "0 of 1 arrivals and 256 bytes of copies are missing"),
        ("_, [%0], 256", "_, [%0], 128", "the copies have brought 128 bytes more than expect_tx has announced"),
        ("(in, out, 4)", "(in, out, 5)", "reads in[319] (line 22), but in has 256 elements"),
        ('"r"(shared(tile[i % 2]))', '"r"(shared(tile[i % 2]) + 512)', "writes tile[191] (line 22)"),
        ("[%1], 256, [%2]", "[%1], 264, [%2]",
         "cp.async.bulk (line 22): 264 bytes are copied, but it has to be a multiple"),
        ('"l"(in + 64 * i)', '"l"(in + 64 * i + 1)', "the address in device memory is 4 bytes behind a multiple of 16"),
        ('"r"(shared(tile[i % 2]))', '"r"(shared(tile[i % 2]) + 8)', "the address in shared memory is 8 bytes behind"),
        ("wait(&full[i % 2], i / 2 & 1);",
         'if (i + 1 == n) { asm volatile("cp.async.bulk.wait_group 0;"); return; } wait(&full[i % 2], i / 2 & 1);',
         "it ends while an asynchronous copy into its shared memory is under way"),
    ],
)  # fmt: skip
def test_mistakes_with_bulk_copies(written: str, instead: str, said: str, run) -> None:
    assert written in RING
    assert said in run(RING.replace(written, instead))


def test_without_checks_a_read_before_the_wait_gets_the_old_bytes(tmp_path) -> None:
    """New shared memory holds 0xA5 in each byte."""
    wait = "wait(&full[i % 2], i / 2 & 1);"
    late = RING.replace(wait, "").replace('asm volatile("fence.proxy', wait + '\n asm volatile("fence.proxy')
    source = tmp_path / "program.cu"
    source.write_text(START + late, encoding="utf-8")
    (found,) = programs.run_in_orders(source, orders=("forward",))
    assert found.output.startswith(f"{0xA5A5A5A5 * 2 % 2**32} ")
