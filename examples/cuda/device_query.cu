// What the devices of this machine can do: the limits of blocks and grids, memory and multiprocessors.
//
//     warpbus cuda run examples/cuda/device_query.cu
#include "check.h"

int main() {
    int count;
    CHECK(cudaGetDeviceCount(&count));
    for (int device = 0; device < count; ++device) {
        cudaDeviceProp found;
        CHECK(cudaGetDeviceProperties(&found, device));
        printf("device %d: %s\n", device, found.name);
        printf("  compute capability           %d.%d\n", found.major, found.minor);
        printf("  multiprocessors              %d\n", found.multiProcessorCount);
        printf("  device memory                %.1f GB\n", found.totalGlobalMem / 1e9);
        printf("  threads per block, at most   %d\n", found.maxThreadsPerBlock);
        printf("  block, at most               %d x %d x %d\n", found.maxThreadsDim[0], found.maxThreadsDim[1],
               found.maxThreadsDim[2]);
        printf("  grid, at most                %d x %d x %d\n", found.maxGridSize[0], found.maxGridSize[1],
               found.maxGridSize[2]);
        printf("  threads per multiprocessor   %d\n", found.maxThreadsPerMultiProcessor);
        printf("  shared memory per block      %zu bytes\n", found.sharedMemPerBlock);
        printf("  registers per block          %d\n", found.regsPerBlock);
        printf("  warp                         %d threads\n", found.warpSize);
    }
    return 0;
}
