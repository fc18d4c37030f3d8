// Flags in memory that several GPUs address.
//
// Source: the memory consistency model of the PTX ISA. A release by one thread covers what the threads of its block
// wrote before the barrier ahead of it.
#pragma once

namespace peers {

// Earlier writes are visible to a GPU that has waited for this round or a later one.
__device__ __forceinline__ void raise(unsigned int* flag, unsigned int round) {
    asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(flag), "r"(round) : "memory");
}

// Nanoseconds since some moment, in steps of about a microsecond.
__device__ __forceinline__ unsigned long long global_time() {
    unsigned long long now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    return now;
}

// Until the flag is at `round` or later; rounds count on from zero and may wrap around. False where that took `limit`
// nanoseconds and more. The clock is read once in kPolls reads of the flag, and never where the flag comes before.
__device__ __forceinline__ bool wait(const unsigned int* flag, unsigned int round, unsigned long long limit) {
    constexpr unsigned int kPolls = 256;
    unsigned long long begin = 0;
    for (unsigned int polls = 1;; ++polls) {
        unsigned int reached;
        asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(reached) : "l"(flag) : "memory");
        if (static_cast<int>(reached - round) >= 0) return true;
        if (polls % kPolls != 0) continue;
        const unsigned long long now = global_time();
        if (begin == 0) begin = now;
        if (now - begin >= limit) return false;
    }
}

// End the kernel, and with it all work of this process on the GPU, after leaving `number` in memory of the host.
__device__ __forceinline__ void give_up(int* word, int number) {
    if (word != nullptr) asm volatile("st.release.sys.global.s32 [%0], %1;" ::"l"(word), "r"(number) : "memory");
    __threadfence_system();
    __trap();
}

// 16 bytes that another GPU wrote: past L1, which does not hear of its writes.
template <typename Vector>
__device__ __forceinline__ void load_16(Vector* value, unsigned long long address) {
    auto* words = reinterpret_cast<unsigned int*>(value);
    asm volatile("ld.volatile.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
                 : "l"(address)
                 : "memory");
}

}  // namespace peers
