// Chapter 4: transpose a matrix through a tile in shared memory: coalesced reads, coalesced writes, no bank conflicts.
// 第 4 章：经过共享内存的小块转置矩阵：读和写都合并，而且没有 bank 冲突。
//
// x has `rows` rows of `columns` elements, y has `columns` rows of `rows`. Blocks are 32 x 32, one thread per element of a
// tile. A tile of 32 x 32 floats has a whole column in one bank.
// x 有 rows 行、columns 列，y 有 columns 行、rows 列。线程块为 32 x 32，每个线程负责小块的一个元素。
// 32 x 32 个 float 的小块中，一整列都在同一个 bank 里。
//
// Check it with / 检查：  warpbus learn 04.2 --check

__global__ void transpose(const float *x, float *y, int rows, int columns) {
    // y[column][row] = x[row][column]
}
