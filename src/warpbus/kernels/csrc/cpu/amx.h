// Whether this process can use the tile registers of AMX.
#pragma once

// Compilers that do not know AMX make the code for AVX-512.
#if defined(LANES_AMX) && !(defined(__clang__) ? __clang_major__ >= 12 : __GNUC__ >= 11)
#undef LANES_AMX
#endif

#if defined(LANES_AMX)
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

// A function that uses tiles. It cannot be inlined into one that does not.
#define USES_TILES __attribute__((target("amx-tile,amx-int8")))

// Linux gives tile registers to a process that asks for them; false if it refuses.
inline bool has_tiles() {
    constexpr long kRequestPermission = 0x1023, kTileData = 18;  // arch_prctl, ARCH_REQ_XCOMP_PERM
    static const bool permitted = syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
    return permitted;
}
#endif
