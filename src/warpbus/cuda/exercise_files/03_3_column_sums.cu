// Chapter 3: the sum of each column of a matrix, so that each warp reads neighbouring elements.
// 第 3 章：矩阵每一列的和，并且每个线程束读取相邻的元素。
//
// The matrix has `rows` rows of `columns` elements, one row after the other. Blocks have 64 threads in one dimension, and
// there are as many threads as columns, rounded up to whole blocks.
// 矩阵按行存放，共 rows 行，每行 columns 个元素。线程块是一维的，有 64 个线程；线程总数等于列数，向上取整到整块。
//
// Check it with / 检查：  warpbus learn 03.3 --check

__global__ void column_sums(const float *x, float *sums, int rows, int columns) {
    // One thread per column. Which elements do neighbouring threads read in the same round?
    // 每列一个线程。同一轮里，相邻的线程读取哪些元素？
}
