// Image processing: a Gaussian blur and the edges of an image (Sobel), with tiles in shared memory; compared with the CPU.
//
//     warpbus cuda run examples/cuda/image_filter.cu              # a picture that the program makes
//     warpbus cuda run examples/cuda/image_filter.cu edges.pgm    # writes the edges as a PGM picture
#include "check.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <vector>

constexpr int kTile = 16, kHalo = 2, kRow = kTile + 2 * kHalo;

// Weights of the blur along one axis; their sum is 1.
__constant__ float kBlur[5] = {1 / 16.0f, 4 / 16.0f, 6 / 16.0f, 4 / 16.0f, 1 / 16.0f};

// The tile of a block, with a border of kHalo pixels. Outside the image, its nearest pixel counts.
__device__ void load(const float *image, float (*tile)[kRow + 1], int width, int height) {
    for (int i = threadIdx.y * kTile + threadIdx.x; i < kRow * kRow; i += kTile * kTile) {
        const int x = blockIdx.x * kTile + i % kRow - kHalo, y = blockIdx.y * kTile + i / kRow - kHalo;
        tile[i / kRow][i % kRow] = image[min(max(y, 0), height - 1) * width + min(max(x, 0), width - 1)];
    }
    __syncthreads();
}

__global__ void blur(const float *image, float *out, int width, int height) {
    __shared__ float tile[kRow][kRow + 1];
    load(image, tile, width, height);
    const int x = blockIdx.x * kTile + threadIdx.x, y = blockIdx.y * kTile + threadIdx.y;
    if (x >= width || y >= height) return;
    float sum = 0;
    for (int dy = 0; dy < 5; ++dy)
        for (int dx = 0; dx < 5; ++dx) sum += kBlur[dy] * kBlur[dx] * tile[threadIdx.y + dy][threadIdx.x + dx];
    out[y * width + x] = sum;
}

// The length of the gradient: how much the brightness changes around a pixel.
__global__ void edges(const float *image, float *out, int width, int height) {
    __shared__ float tile[kRow][kRow + 1];
    load(image, tile, width, height);
    const int x = blockIdx.x * kTile + threadIdx.x, y = blockIdx.y * kTile + threadIdx.y;
    if (x >= width || y >= height) return;
    auto at = [&](int dy, int dx) { return tile[threadIdx.y + kHalo + dy][threadIdx.x + kHalo + dx]; };
    const float right = at(-1, 1) + 2 * at(0, 1) + at(1, 1) - at(-1, -1) - 2 * at(0, -1) - at(1, -1);
    const float down = at(1, -1) + 2 * at(1, 0) + at(1, 1) - at(-1, -1) - 2 * at(-1, 0) - at(-1, 1);
    out[y * width + x] = sqrtf(right * right + down * down);
}

// The same on the CPU, without tiles.
std::vector<double> expected_edges(const std::vector<float> &image, int width, int height) {
    auto pixel = [&](const auto &of, int y, int x) {
        return static_cast<double>(of[std::min(std::max(y, 0), height - 1) * width + std::min(std::max(x, 0), width - 1)]);
    };
    const double weights[5] = {1 / 16.0, 4 / 16.0, 6 / 16.0, 4 / 16.0, 1 / 16.0};
    std::vector<double> blurred(image.size()), found(image.size());
    for (int y = 0; y < height; ++y)
        for (int x = 0; x < width; ++x)
            for (int i = 0; i < 25; ++i)
                blurred[y * width + x] += weights[i / 5] * weights[i % 5] * pixel(image, y + i / 5 - 2, x + i % 5 - 2);
    for (int y = 0; y < height; ++y)
        for (int x = 0; x < width; ++x) {
            double right = 0, down = 0;
            for (int i = -1; i <= 1; ++i) {
                right += (2 - abs(i)) * (pixel(blurred, y + i, x + 1) - pixel(blurred, y + i, x - 1));
                down += (2 - abs(i)) * (pixel(blurred, y + 1, x + i) - pixel(blurred, y - 1, x + i));
            }
            found[y * width + x] = sqrt(right * right + down * down);
        }
    return found;
}

int main(int count, char **arguments) {
    const int width = 150, height = 100, pixels = width * height;
    std::vector<float> image(pixels), out(pixels);
    for (int i = 0; i < pixels; ++i) {  // a bright disc on a dark ground, with noise
        const int x = i % width - 60, y = i / width - 45;
        image[i] = (x * x + y * y < 900 ? 0.8f : 0.2f) + (i * 37 % 101) / 1000.0f;
    }
    float *d_image, *d_blurred, *d_edges;
    CHECK(cudaMalloc(&d_image, pixels * sizeof(float)));
    CHECK(cudaMalloc(&d_blurred, pixels * sizeof(float)));
    CHECK(cudaMalloc(&d_edges, pixels * sizeof(float)));
    CHECK(cudaMemcpy(d_image, image.data(), pixels * sizeof(float), cudaMemcpyHostToDevice));
    const dim3 threads(kTile, kTile), blocks((width + kTile - 1) / kTile, (height + kTile - 1) / kTile);
    blur<<<blocks, threads>>>(d_image, d_blurred, width, height);
    CHECK_LAUNCH();
    edges<<<blocks, threads>>>(d_blurred, d_edges, width, height);
    CHECK_LAUNCH();
    CHECK(cudaMemcpy(out.data(), d_edges, pixels * sizeof(float), cudaMemcpyDeviceToHost));

    const std::vector<double> right = expected_edges(image, width, height);
    int wrong = 0, on_edge = 0;
    for (int i = 0; i < pixels; ++i) {
        wrong += fabs(out[i] - right[i]) > 1e-5;
        on_edge += out[i] > 0.5f;
    }
    printf("%d x %d pixels, %d of them on an edge: ", width, height, on_edge);
    printf(wrong ? "%d pixels are wrong\n" : "all match the CPU\n", wrong);
    if (count > 1) {
        FILE *file = fopen(arguments[1], "wb");
        if (!file) return 1;
        fprintf(file, "P5 %d %d 255\n", width, height);
        for (float value : out) fputc(static_cast<int>(std::min(value, 1.0f) * 255), file);
        fclose(file);
    }
    CHECK(cudaFree(d_image));
    CHECK(cudaFree(d_blurred));
    CHECK(cudaFree(d_edges));
    return wrong ? 1 : 0;
}
