// Every call of the CUDA runtime returns a status. CHECK ends the program with the place and the reason of a failure.
#pragma once

#include <cuda_runtime.h>

#include <cstdio>
#include <cstdlib>

#define CHECK(call)                                                                              \
    do {                                                                                         \
        const cudaError_t status = (call);                                                       \
        if (status != cudaSuccess) {                                                             \
            fprintf(stderr, "%s:%d: %s: %s\n", __FILE__, __LINE__, #call, cudaGetErrorString(status)); \
            exit(1);                                                                             \
        }                                                                                        \
    } while (0)

// A launch returns nothing: cudaGetLastError has what was wrong with it, cudaDeviceSynchronize what happened inside.
#define CHECK_LAUNCH()                  \
    do {                                \
        CHECK(cudaGetLastError());      \
        CHECK(cudaDeviceSynchronize()); \
    } while (0)
