// Chapter 2: y = sigmoid(x) for a matrix, with threads and blocks in two dimensions.
// 第 2 章：对矩阵求 y = sigmoid(x)，线程和线程块都是二维的。
//
// The matrix has `rows` rows of `columns` elements, one row after the other. Columns run along x. Blocks are 32 x 8.
// 矩阵按行存放，共 rows 行，每行 columns 个元素。列沿 x 方向。线程块为 32 x 8。
//
// Check it with / 检查：  warpbus learn 02.1 --check

__device__ float sigmoid(float x) {
    return 0;  // 1 / (1 + e^-x); expf(x) is e^x
}

__global__ void sigmoid_matrix(const float *x, float *y, int rows, int columns) {
    // Which row and which column are this thread's? 本线程负责哪一行、哪一列？
}
