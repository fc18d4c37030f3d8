// Chapter 13: the columns of a 3 x 3 convolution with a border of zeros (im2col).
// 第 13 章：3 x 3 卷积（四周补零）的列矩阵（im2col）。
//
// columns[k][p] is the pixel that tap k = 3 dy + dx sees at place p = row * width + column: image[row + dy - 1]
// [column + dx - 1], or 0 outside of the image. One thread per element: p along x, k along y.
// columns[k][p] 是第 k = 3 dy + dx 个抽头在位置 p = row * width + column 看到的像素：image[row + dy - 1][column + dx - 1]，
// 超出图像则为 0。每个元素一个线程：p 沿 x，k 沿 y。
//
// Check it with / 检查：  warpbus learn 13.1 --check

__global__ void im2col(const float *image, float *columns, int height, int width) {
    const int p = blockIdx.x * blockDim.x + threadIdx.x, k = blockIdx.y;
    // The row and the column of place p, and of the pixel. 位置 p 的行和列，以及像素的行和列。
}
