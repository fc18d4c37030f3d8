// Scientific computing: heat spreads in a plate. Each step replaces a point by a mean of itself and its four neighbours.
//
//     warpbus cuda run examples/cuda/heat.cu
#include "check.h"

#include <cmath>
#include <utility>
#include <vector>

// An explicit step of the heat equation, u += r (sum of the neighbours - 4 u), which is stable for r up to 1/4. The edge of
// the plate keeps its temperature. A step reads one buffer and writes the other: no thread reads what another writes.
__global__ void step(const float *before, float *after, int rows, int columns, float r) {
    const int column = blockIdx.x * blockDim.x + threadIdx.x, row = blockIdx.y * blockDim.y + threadIdx.y;
    if (column >= columns || row >= rows) return;
    const int i = row * columns + column;
    const bool edge = row == 0 || column == 0 || row == rows - 1 || column == columns - 1;
    after[i] = edge ? before[i]
                    : before[i] + r * (before[i - 1] + before[i + 1] + before[i - columns] + before[i + columns] - 4 * before[i]);
}

int main() {
    const int rows = 60, columns = 90, points = rows * columns, steps = 50;
    const float r = 0.2f;
    std::vector<float> plate(points, 0), found(points);
    for (int column = 0; column < columns; ++column) plate[column] = 100;  // the upper edge is hot

    float *d_before, *d_after;
    CHECK(cudaMalloc(&d_before, points * sizeof(float)));
    CHECK(cudaMalloc(&d_after, points * sizeof(float)));
    CHECK(cudaMemcpy(d_before, plate.data(), points * sizeof(float), cudaMemcpyHostToDevice));
    const dim3 threads(32, 8), blocks((columns + 31) / 32, (rows + 7) / 8);
    for (int i = 0; i < steps; ++i) {
        step<<<blocks, threads>>>(d_before, d_after, rows, columns, r);
        std::swap(d_before, d_after);  // launches of one stream run in order: no wait is needed between two steps
    }
    CHECK_LAUNCH();
    CHECK(cudaMemcpy(found.data(), d_before, points * sizeof(float), cudaMemcpyDeviceToHost));

    std::vector<double> now(plate.begin(), plate.end()), next(now);
    for (int i = 0; i < steps; ++i) {
        for (int row = 1; row < rows - 1; ++row)
            for (int column = 1; column < columns - 1; ++column) {
                const int at = row * columns + column;
                next[at] = now[at] + r * (now[at - 1] + now[at + 1] + now[at - columns] + now[at + columns] - 4 * now[at]);
            }
        std::swap(now, next);
    }
    int wrong = 0;
    for (int i = 0; i < points; ++i) wrong += fabs(found[i] - now[i]) > 1e-3;
    printf("%d x %d points, %d steps, %.1f degrees in the middle of row 5: ", rows, columns, steps, found[5 * columns + columns / 2]);
    printf(wrong ? "%d points are wrong\n" : "all match the CPU\n", wrong);
    CHECK(cudaFree(d_before));
    CHECK(cudaFree(d_after));
    return wrong ? 1 : 0;
}
