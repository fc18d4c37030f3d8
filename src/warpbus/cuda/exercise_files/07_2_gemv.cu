// Chapter 7: y = W x, by one warp per row.
// 第 7 章：y = W x，每行用一个线程束。
//
// W has `rows` rows of `columns` elements. Blocks are 32 x 4: threadIdx.y chooses one of 4 rows, threadIdx.x is the lane.
// W 有 rows 行、columns 列。线程块为 32 x 4：threadIdx.y 选择 4 行中的一行，threadIdx.x 是线程束内的线程号。
//
// Check it with / 检查：  warpbus learn 07.2 --check

__global__ void gemv(const float *w, const float *x, float *y, int rows, int columns) {
    // Neighbouring lanes read neighbouring elements of the row. 相邻的线程读取这一行里相邻的元素。
}
