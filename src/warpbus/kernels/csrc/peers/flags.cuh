// Flags in memory that several GPUs address.
//
// Source: the memory consistency model of the PTX ISA. A release by one thread covers what the threads of its block
// wrote before the barrier ahead of it.
#pragma once

namespace peers {

// What was written before is seen by who waits for this round or a later one.
__device__ __forceinline__ void raise(unsigned int* flag, unsigned int round) {
    asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(flag), "r"(round) : "memory");
}

// Until the flag is at `round` or later; rounds count on from zero and may wrap around.
__device__ __forceinline__ void wait(const unsigned int* flag, unsigned int round) {
    unsigned int reached;
    do {
        asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(reached) : "l"(flag) : "memory");
    } while (static_cast<int>(reached - round) < 0);
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
