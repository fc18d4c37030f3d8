// A convolution of 3 x 3, directly and as a matrix product (im2col): both are compared with the CPU.
//
//     warpbus cuda run examples/cuda/convolution.cu
#include "check.h"

#include <cmath>
#include <vector>

constexpr int kSide = 3, kTaps = kSide * kSide, kTile = 16;

// One thread per output pixel and filter. Pixels outside the image count as zeros, so the output has its size.
__global__ void direct(const float *image, const float *filters, float *out, int channels, int height, int width) {
    const int x = blockIdx.x * blockDim.x + threadIdx.x, y = blockIdx.y * blockDim.y + threadIdx.y;
    const int filter = blockIdx.z;
    if (x >= width || y >= height) return;
    float sum = 0;
    for (int c = 0; c < channels; ++c)
        for (int tap = 0; tap < kTaps; ++tap) {
            const int from_y = y + tap / kSide - 1, from_x = x + tap % kSide - 1;
            if (from_y >= 0 && from_y < height && from_x >= 0 && from_x < width)
                sum += image[(c * height + from_y) * width + from_x] * filters[(filter * channels + c) * kTaps + tap];
        }
    out[(filter * height + y) * width + x] = sum;
}

// Row (channel, tap), column (pixel): what this tap of a filter sees at this pixel.
__global__ void im2col(const float *image, float *columns, int channels, int height, int width) {
    const int pixel = blockIdx.x * blockDim.x + threadIdx.x, row = blockIdx.y;
    if (pixel >= height * width) return;
    const int c = row / kTaps, tap = row % kTaps;
    const int y = pixel / width + tap / kSide - 1, x = pixel % width + tap % kSide - 1;
    const bool inside = y >= 0 && y < height && x >= 0 && x < width;
    columns[row * height * width + pixel] = inside ? image[(c * height + y) * width + x] : 0;
}

// C (m x n) = A (m x k) B (k x n), with tiles in shared memory: filters times columns.
__global__ void multiply(const float *a, const float *b, float *c, int m, int n, int k) {
    __shared__ float tile_a[kTile][kTile], tile_b[kTile][kTile];
    const int row = blockIdx.y * kTile + threadIdx.y, column = blockIdx.x * kTile + threadIdx.x;
    float sum = 0;
    for (int first = 0; first < k; first += kTile) {
        const int k_a = first + threadIdx.x, k_b = first + threadIdx.y;
        tile_a[threadIdx.y][threadIdx.x] = row < m && k_a < k ? a[row * k + k_a] : 0;
        tile_b[threadIdx.y][threadIdx.x] = column < n && k_b < k ? b[k_b * n + column] : 0;
        __syncthreads();
        for (int i = 0; i < kTile; ++i) sum += tile_a[threadIdx.y][i] * tile_b[i][threadIdx.x];
        __syncthreads();
    }
    if (row < m && column < n) c[row * n + column] = sum;
}

int main() {
    const int channels = 3, filters = 8, height = 30, width = 40, pixels = height * width, taps = channels * kTaps;
    std::vector<float> image(channels * pixels), weights(filters * taps), out(filters * pixels);
    for (size_t i = 0; i < image.size(); ++i) image[i] = (i * 37 % 101) / 50.0f - 1;
    for (size_t i = 0; i < weights.size(); ++i) weights[i] = (i * 29 % 23) / 11.0f - 1;
    std::vector<double> expected(out.size(), 0);
    for (int f = 0; f < filters; ++f)
        for (int y = 0; y < height; ++y)
            for (int x = 0; x < width; ++x)
                for (int c = 0; c < channels; ++c)
                    for (int dy = -1; dy <= 1; ++dy)
                        for (int dx = -1; dx <= 1; ++dx)
                            if (y + dy >= 0 && y + dy < height && x + dx >= 0 && x + dx < width)
                                expected[(f * height + y) * width + x] +=
                                    double(image[(c * height + y + dy) * width + x + dx]) *
                                    weights[(f * channels + c) * kTaps + (dy + 1) * kSide + dx + 1];

    float *d_image, *d_weights, *d_columns, *d_out;
    CHECK(cudaMalloc(&d_image, image.size() * 4));
    CHECK(cudaMalloc(&d_weights, weights.size() * 4));
    CHECK(cudaMalloc(&d_columns, size_t(taps) * pixels * 4));
    CHECK(cudaMalloc(&d_out, out.size() * 4));
    CHECK(cudaMemcpy(d_image, image.data(), image.size() * 4, cudaMemcpyHostToDevice));
    CHECK(cudaMemcpy(d_weights, weights.data(), weights.size() * 4, cudaMemcpyHostToDevice));
    printf("image %zu bytes, its columns %d x %d: %d bytes\n", image.size() * 4, taps, pixels, taps * pixels * 4);
    bool right = true;
    for (int version = 0; version < 2; ++version) {
        CHECK(cudaMemset(d_out, 0xFF, out.size() * 4));
        if (version == 0) {
            const dim3 threads(32, 8), blocks((width + 31) / 32, (height + 7) / 8, filters);
            direct<<<blocks, threads>>>(d_image, d_weights, d_out, channels, height, width);
        } else {
            const dim3 rows((pixels + 255) / 256, taps);
            im2col<<<rows, 256>>>(d_image, d_columns, channels, height, width);
            CHECK_LAUNCH();
            const dim3 threads(kTile, kTile), blocks((pixels + kTile - 1) / kTile, (filters + kTile - 1) / kTile);
            multiply<<<blocks, threads>>>(d_weights, d_columns, d_out, filters, pixels, taps);
        }
        CHECK_LAUNCH();
        CHECK(cudaMemcpy(out.data(), d_out, out.size() * 4, cudaMemcpyDeviceToHost));
        int wrong = 0;
        for (size_t i = 0; i < out.size(); ++i) wrong += !(std::fabs(out[i] - expected[i]) <= 1e-4);
        printf("%s: ", version ? "im2col and product" : "direct");
        printf(wrong ? "%d elements are wrong\n" : "all match the CPU\n", wrong);
        right = right && !wrong;
    }
    CHECK(cudaFree(d_image));
    CHECK(cudaFree(d_weights));
    CHECK(cudaFree(d_columns));
    CHECK(cudaFree(d_out));
    return !right;
}
