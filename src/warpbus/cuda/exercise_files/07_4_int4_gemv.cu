// Chapter 7: y = W x with weights of 4 bits, by one warp per row: an eighth of the bytes of float32.
// 第 7 章：4 比特权重的 y = W x，每行用一个线程束：字节数是 float32 的八分之一。
//
// A row of `packed` is columns / 8 words with 8 codes each, as in exercise 07.3; a row of `scales` has columns / 32.
// columns is a multiple of 32. Blocks are 32 x 4 as in exercise 07.2. A lane reads a word, and uses its 8 codes.
// packed 的一行是 columns / 8 个字，每个字 8 个编码，与练习 07.3 相同；scales 的一行有 columns / 32 个数。
// columns 是 32 的倍数。线程块与练习 07.2 一样是 32 x 4。每个线程读一个字，用它的 8 个编码。
//
// Check it with / 检查：  warpbus learn 07.4 --check

__global__ void int4_gemv(const unsigned *packed, const float *scales, const float *x, float *y, int rows, int columns) {
}
